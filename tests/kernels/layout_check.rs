//! What a job tries of its own layout before it trains: healthy ways pass, and what goes wrong only where a model sends, gathers,
//! sums or draws is named with what ranks did then. The faults spare what patterns send (`axes_check`), by the size of messages.

use crate::emulation::{self, Fault};
use crate::jobs::{CONFIG, binary, prepare};
use crate::on_a_real_gpu;
use std::path::Path;
use std::process::Command;

/// Two layers with what several tensor ranks share of each: four query heads to two of keys.
const WIDE: [(&str, &str); 3] = [
    ("num_hidden_layers\": 1", "num_hidden_layers\": 2"),
    ("attention_heads\": 2", "attention_heads\": 4"),
    ("key_value_heads\": 1", "key_value_heads\": 2"),
];
/// What the banner says of a layout.
const PASSED: &str = "a small model in this layout, in ";

fn directory(config: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a directory");
    prepare(dir.path(), config);
    dir
}

fn wide() -> tempfile::TempDir {
    directory(&WIDE.iter().fold(CONFIG.to_string(), |config, (from, to)| config.replace(from, to)))
}

/// A job up to its first step, of `ranks` ranks: whether it comes there, and what it says in one line.
fn job(at: &Path, ranks: usize, sets: &str, gpu: &Path, fault: (&str, &str)) -> (bool, String) {
    let mut command = Command::new("mpirun");
    command
        .current_dir(at)
        .args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", &ranks.to_string()])
        .arg(binary())
        .args(["run", "ppo.toml", "model.actor=model", "ppo.advantage=grpo", "--dry-run", "job.check=true"])
        .args(sets.split_whitespace())
        .env("OMPI_MCA_mpi_yield_when_idle", "1")
        .envs(emulation::environment_of(gpu))
        .env("RLHF_NCCL_LIB", gpu)
        .env(fault.0, fault.1);
    let done = command.output().expect("mpirun starts");
    (done.status.success(), String::from_utf8_lossy(&done.stderr).split_whitespace().collect::<Vec<_>>().join(" "))
}

/// The same over the emulated NCCL, with a fault where one is named.
fn emulated(at: &Path, ranks: usize, sets: &str, fault: &str) -> (bool, String) {
    late(at, ranks, sets, ("EMULATED_NCCL_FAULT", if fault.is_empty() { "none" } else { fault }))
}

fn late(at: &Path, ranks: usize, sets: &str, fault: (&str, &str)) -> (bool, String) {
    job(at, ranks, sets, &emulation::gpu(), fault)
}

#[test]
fn every_layout_is_tried_and_passes() {
    if on_a_real_gpu() {
        return;
    }
    let dir = wide();
    let at = dir.path();
    for (ranks, sets) in [
        (2, "mesh.data=2 mesh.zero=0"),
        (3, "mesh.data=3 mesh.zero=1 job.collectives=mpi"),
        (4, "mesh.data=2 mesh.tensor=2 mesh.zero=2 rollout.tensor=2"),
        (4, "mesh.data=2 mesh.tensor=2 mesh.zero=3 rollout.tensor=4 gradient.recompute=true"),
        (4, "mesh.data=2 mesh.sequence=2 mesh.zero=3 rollout.tensor=2 job.products=fast"),
        (2, "mesh.data=2 mesh.zero=1 gradient.order=fixed gradient.chunks=4"),
        (2, "mesh.data=2 mesh.zero=3 mesh.offload=[\"optimizer\",\"roles\"]"),
    ] {
        let (ran, words) = emulated(at, ranks, sets, "");
        assert!(ran && words.contains(PASSED), "{sets}: {words}");
        let from = words.find("kernels checked").expect("a row");
        eprintln!("{sets}: {}", &words[from..(from + 420).min(words.len())]);
    }
    let (ran, words) = emulated(at, 1, "", "");
    assert!(ran && !words.contains(PASSED), "there is no layout to try: {words}");
}

#[test]
fn what_goes_wrong_where_a_model_sends_is_named_with_what_its_ranks_did() {
    if on_a_real_gpu() {
        return;
    }
    let dir = wide();
    let at = dir.path();
    for (ranks, sets, fault, what) in [
        (
            2,
            "mesh.data=2 mesh.zero=3",
            "gather 60000 75000",
            "whose weights are gathered as they are used, over ranks 0..2",
        ),
        (2, "mesh.data=2 mesh.zero=2", "gather 60000 75000", "weights of all ranks behind an update over ranks 0..2"),
        (2, "mesh.data=2 mesh.zero=1", "summand 122000 150000", "gradients that are summed over ranks 0..2"),
        (2, "mesh.data=2 mesh.zero=2", "summand 122000 150000", "gradients that are summed over ranks 0..2"),
        (2, "mesh.data=2 mesh.zero=3", "summand 122000 150000", "that of model.layers.0."),
        (
            2,
            "mesh.data=2 mesh.zero=3 rollout.tensor=2",
            "receive 10000 39000",
            "weights brought into the layout of the rollout",
        ),
    ] {
        let (ran, words) = emulated(at, ranks, sets, fault);
        let from = words.find("error: ").unwrap_or(0);
        eprintln!("{sets}, {fault}: {}", &words[from..(from + 400).min(words.len())]);
        assert!(!ran && words.contains(what) && !words.contains("gave other values"), "{sets}, {fault}: {words}");
    }
}

/// A kernel that takes rows of another rank's part.
const OF_PART: Fault = ("embedding.cu", "tokens[index / eights] - first;", "tokens[index / eights];");

#[test]
fn a_kernel_that_is_wrong_on_parts_alone_is_named_as_matrices_that_are_cut() {
    if on_a_real_gpu() {
        return;
    }
    let dir = wide();
    let at = dir.path();
    let (ran, words) = job(at, 2, "mesh.tensor=2", &emulation::library(&[OF_PART]), ("EMULATED_NCCL_FAULT", "none"));
    assert!(!ran && words.contains("matrices that are cut over ranks 0..2"), "{words}");
    assert!(words.contains("the hidden state behind the last layer is"), "{words}");
}

#[test]
fn a_graph_whose_collectives_send_what_they_sent_before_is_named_as_draws_of_its_ranks() {
    if on_a_real_gpu() {
        return;
    }
    let dir = wide();
    let at = dir.path();
    let sets = "mesh.tensor=2 rollout.tensor=2 job.collectives=nccl";
    let (ran, words) = late(at, 2, sets, ("EMULATED_NCCL_FAULT", "none"));
    assert!(ran && words.contains(PASSED) && words.contains("which hold the collectives"), "{words}");
    let (ran, words) = late(at, 2, sets, ("EMULATED_NCCL_FAULT", "once"));
    let from = words.find("error: ").unwrap_or(0);
    eprintln!("{}", &words[from..(from + 400).min(words.len())]);
    assert!(!ran && words.contains("draws from matrices that are cut over ranks 0..2"), "{words}");
    assert!(words.contains("from the cache and "), "{words}");
}

/// Bytes of the weights of a layer of the small model, and of its state: all that goes elsewhere at once is of other sizes.
const WEIGHTS: &str = "130000 140000";
const STATE: &str = "700000 900000";

#[test]
fn state_and_weights_that_come_back_from_the_host_with_other_bits_are_named() {
    if on_a_real_gpu() {
        return;
    }
    let dir = wide();
    let at = dir.path();
    let sets = "mesh.offload=[\"optimizer\",\"roles\"]";
    let (ran, words) = late(at, 1, sets, ("EMULATED_MOVES", "none"));
    assert!(ran && words.contains(PASSED), "{words}");
    // A piece that stays away, one in another's place, a bit, what was there before; and what never left.
    for (how, bytes, what) in [
        ("lost", STATE, "an update with its state in the host's memory: a "),
        ("bit", STATE, "an update with its state in the host's memory: a "),
        ("kept", STATE, "an update with its state in the host's memory: a "),
        ("stale", STATE, "an update with its state in the host's memory: a "),
        ("lost", WEIGHTS, "weights that were in the host's memory: a value of model.layers.0."),
        ("halves", WEIGHTS, "weights that were in the host's memory: a value of model.layers.0."),
        ("bit", WEIGHTS, "weights that were in the host's memory: a value of model.layers.0."),
        ("stale", WEIGHTS, "weights that were in the host's memory: a value of model.layers.0."),
    ] {
        let (ran, words) = late(at, 1, sets, ("EMULATED_MOVES", &format!("{how} {bytes}")));
        let from = words.find("error: ").unwrap_or(0);
        eprintln!("{how} {bytes}: {}", &words[from..(from + 300).min(words.len())]);
        assert!(!ran && words.contains(what), "{how} {bytes}: {words}");
    }
}

#[test]
fn a_unit_that_is_used_before_its_gather_has_ended_is_named_as_weights_that_are_gathered() {
    if on_a_real_gpu() {
        return;
    }
    let dir = wide();
    // Patterns have waited for theirs by then.
    let sets = "mesh.data=2 mesh.zero=3 job.collectives=nccl";
    let (ran, words) = late(dir.path(), 2, sets, ("EMULATED_FORGETS", "1 35"));
    let from = words.find("error: ").unwrap_or(0);
    eprintln!("{}", &words[from..(from + 300).min(words.len())]);
    let what = "log-probabilities of a model whose weights are gathered as they are used, over ranks 0..2";
    assert!(!ran && words.contains(what), "{words}");
}

/// Kernels that a ring alone asks so.
const MERGED: Fault = ("attention.cu", "by[m][h] *= expf(all - both);", "");
const ADDED: Fault = ("copy.cu", "b[i] += a[i];", "");
/// Attention of other head dims than the job's takes long to compile.
const OTHER_DIMS: [&str; 5] = ["_32", "_80", "_96", "_128", "_256"];

#[test]
fn ring_attention_that_differs_from_attention_of_the_row_is_named_with_its_first_result() {
    if on_a_real_gpu() {
        return;
    }
    let dir = directory(CONFIG);
    let at = dir.path();
    let sets = "mesh.sequence=2";
    let refused = |(ran, words): (bool, String), what: &str| {
        let from = words.find("error: ").unwrap_or(0);
        eprintln!("{}", &words[from..(from + 300).min(words.len())]);
        let named = ["ring attention over the sequence axis of ranks 0..2 (", &format!("): {what} is ")];
        assert!(!ran && named.iter().all(|named| words.contains(named)), "{what}: {words}");
    };
    // A block of keys and values that stays away, or comes in another order, and gradients of one that do not come home.
    refused(emulated(at, 2, sets, "receive 9000 20000"), "o");
    refused(emulated(at, 2, sets, "halves 9000 20000"), "o");
    refused(emulated(at, 2, sets, "receive 30000 40000"), "dk");
    // Results of two blocks that are merged with a wrong weight, and gradients of a block that come without another rank's.
    for (fault, what) in [(MERGED, "o"), (ADDED, "dk")] {
        let (faulty, _) = emulation::library_of(&[fault], |kernel| !OTHER_DIMS.iter().any(|dim| kernel.ends_with(dim)));
        refused(job(at, 2, sets, &faulty, ("EMULATED_NCCL_FAULT", "none")), what);
    }
}
