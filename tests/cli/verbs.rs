//! The verbs: their help, and the words for those that are not there.

use super::room::Room;
use std::path::Path;

const VERBS: [&str; 12] = [
    "run",
    "plan",
    "init",
    "shard",
    "corpus",
    "tokenizer",
    "generate",
    "logprobs",
    "reward",
    "export",
    "bench",
    "info",
];

fn run(arguments: &[&str]) -> super::command::Ended {
    super::command::run(Path::new("/"), arguments)
}

#[test]
fn help_lists_every_verb_and_each_verb_explains_itself() {
    for arguments in [&["--help"][..], &["-h"], &["help"], &[]] {
        let help = run(arguments).well().stdout;
        for verb in VERBS {
            assert!(help.lines().any(|line| line.trim_start().starts_with(verb)), "{verb} is not in {help}");
        }
    }
    for verb in VERBS {
        for ask in ["--help", "-h"] {
            let ended = run(&[verb, ask]).well();
            assert!(ended.stdout.starts_with(&format!("Usage: rlhf-hpc {verb}")), "{}", ended.stdout);
            assert!(ended.stdout.len() > 100 && ended.stderr.is_empty(), "{}", ended.stdout);
        }
    }
}

#[test]
fn the_version_is_that_of_the_package() {
    for ask in ["--version", "-V"] {
        assert_eq!(run(&[ask]).well().stdout.trim(), format!("rlhf-hpc {}", env!("CARGO_PKG_VERSION")));
    }
}

#[test]
fn verbs_of_a_later_release_are_refused_by_name() {
    for verb in ["report", "verify", "migrate"] {
        let words = format!("the verb `{verb}` is not in this release");
        run(&[verb, "x.toml", "--ranks", "4"]).refused(2, &[&words]).hinted("verbs of this release: run, ");
    }
}

#[test]
fn a_verb_that_is_misspelt_comes_with_the_one_that_was_meant() {
    run(&["genrate", "--model", "m"]).refused(2, &["`genrate` is no verb"]).hinted("`generate`");
    run(&["exprot", "x"]).refused(2, &["`exprot`"]).hinted("`export`");
}

#[test]
fn unknown_and_missing_options_are_named() {
    for verb in VERBS {
        run(&[verb, "--nonsense"]).refused(2, &["--nonsense"]).hinted("rlhf-hpc VERB --help");
    }
    run(&["generate", "--model", "m"]).refused(2, &["--input"]);
    run(&["shard", "x.jsonl"]).refused(2, &["--tokenizer", "--out"]);
    run(&["run"]).refused(2, &["job"]);
    run(&["bench", "nonsense"]).refused(2, &["bench has no suite nonsense"]).hinted("kernels, rollout");
    run(&["generate", "--model", "m", "--input", "f", "--samples", "many"]).refused(2, &["--samples", "many"]);
    run(&["generate", "--model", "m", "--input", "f", "--dtype", "int4"]).refused(2, &["--dtype", "int4", "bf16"]);
}

#[test]
fn beam_search_is_refused_by_name() {
    let room = Room::new();
    let ended = room.run(&["generate", "--model", "model", "--input", "rows.jsonl", "--beams", "4"]);
    ended.refused(2, &["--beams", "no beam search"]).hinted("--samples");
}

#[test]
fn inputs_that_do_not_exist_are_named() {
    let room = Room::new();
    for line in [
        "generate --model model --input nosuch",
        "logprobs --model model --input nosuch",
        "shard nosuch --tokenizer model --out x",
        "tokenizer nosuch --vocabulary 300 --out x",
        "init --config nosuch --out x",
    ] {
        room.run(&line.split(' ').collect::<Vec<_>>()).refused(74, &["cannot", "nosuch", "No such file"]);
    }
    room.run(&["export", "nosuch", "--out", "x"]).refused(65, &["nosuch holds no checkpoint"]).hinted("manifest.json");
    room.run(&["shard", "--tokenizer", "model", "--out", "x"]).refused(2, &["at least one input file"]);
    assert!(!room.path("x").exists());
}

#[test]
fn flags_that_contradict_each_other_are_refused() {
    let room = Room::new();
    let shard = ["shard", "rows.jsonl", "--tokenizer", "model", "--out", "x"];
    let twice = room.run(&[&shard[..], &["--split-field", "split", "--split-ratio", "0.1"]].concat());
    twice.refused(2, &["only one of --split-field, --split-ratio and --split-test"]);
    room.run(&[&shard[..], &["--split-ratio", "1.5"]].concat())
        .refused(2, &["--split-ratio is 1.5", "between 0 and 1"]);
    room.run(&["corpus", "--out", "c.jsonl", "--digits", "0"]).refused(2, &["digits"]);
    room.run(&["tokenizer", "rows.jsonl", "--vocabulary", "10", "--out", "x"]).refused(2, &["10"]);
}

#[test]
fn info_tells_what_this_machine_and_this_binary_are() {
    let info = run(&["info"]).well().stdout;
    for word in [
        "rlhf-hpc",
        "mpi",
        "cuda",
        "carried",
        "nvrtc",
        "cublaslt",
        "nccl",
        "kernels",
        "cpu",
        "memory",
        "world      1 rank",
        "threads",
    ] {
        assert!(info.contains(word), "{word} is not in\n{info}");
    }
}

#[test]
fn without_a_driver_info_says_why_the_cpu_computes() {
    // SAFETY: the driver's initialisers ask nothing of the process that opens it.
    if unsafe { libloading::Library::new("libcuda.so.1") }.is_ok() {
        return;
    }
    let info = run(&["info"]).well().stdout;
    let words = "cuda       none: libcuda.so.1 is not on this machine; computing on the CPU";
    assert!(info.lines().any(|line| line == words), "{info}");
    let carried = rlhf_hpc::device::cuda::embedded::describe();
    assert!(info.contains(&carried) && carried.contains(" kernels"), "{carried} is not in\n{info}");
}

#[test]
fn info_shows_what_kernels_take_where_nvcc_told_it() {
    match rlhf_hpc::device::cuda::embedded::resources() {
        Ok(table) => assert_eq!(run(&["info", "--kernels"]).well().stdout, table),
        Err(why) => drop(run(&["info", "--kernels"]).refused(2, &[&why, "RLHF_NVCC"])),
    }
}
