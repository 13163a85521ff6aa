//! `verify`: equal computations pass, and each planted fault is named.

use super::command::mpirun;
use super::fixture::Fixture;
use crate::process::{Ended, Running, launched};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::collections::HashMap;
use std::fs;
use std::path::Path;

/// The tensors of a file in f32, with its metadata.
type Tensors = (Vec<(String, Vec<usize>, Vec<f32>)>, Option<HashMap<String, String>>);

fn read(path: &Path) -> Tensors {
    let bytes = fs::read(path).expect("a file");
    let (_, metadata) = SafeTensors::read_metadata(&bytes).expect("a header");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let floats = |view: &TensorView| view.data().chunks_exact(4).map(bytemuck::pod_read_unaligned).collect();
    let all = file.tensors().into_iter().filter(|(_, view)| view.dtype() == Dtype::F32);
    (all.map(|(name, view)| (name, view.shape().to_vec(), floats(&view))).collect(), metadata.metadata().clone())
}

/// Changes the f32 tensors of a file; others stay.
fn edit(path: &Path, change: impl Fn(&str, &[usize], &mut Vec<f32>)) {
    let (mut all, metadata) = read(path);
    for (name, shape, values) in &mut all {
        change(name, shape, values);
    }
    let bytes = fs::read(path).expect("a file");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let others = file.tensors().into_iter().filter(|(_, view)| view.dtype() != Dtype::F32);
    let floats = all.iter().map(|(name, shape, values)| {
        let view = TensorView::new(Dtype::F32, shape.clone(), bytemuck::cast_slice(values)).expect("a tensor");
        (name.clone(), view)
    });
    let views: Vec<(String, TensorView)> = floats.chain(others).collect();
    let written = safetensors::serialize(views, metadata).expect("safetensors");
    fs::write(path, written).expect("writes");
}

fn transpose(shape: &[usize], values: &mut Vec<f32>) {
    let (n, k) = (shape[0], shape[1]);
    *values = (0..n * k).map(|i| values[i % n * k + i / n]).collect();
}

/// A change of every element by about a thousandth.
fn shake(values: &mut [f32]) {
    values.iter_mut().enumerate().for_each(|(i, x)| *x *= 1.0 + 1e-3 * ((i % 7) as f32 - 3.0) / 3.0);
}

impl Fixture {
    fn verify(&self, arguments: &[&str]) -> Ended {
        self.run(&[&["verify"], arguments].concat())
    }
}

impl Ended {
    /// Asserts an exit code and words of the page, in any line breaks.
    #[track_caller]
    fn page(self, code: i32, words: &[&str]) -> Self {
        let flat = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(self.code, Some(code), "{}{}", self.stdout, self.stderr);
        for word in words {
            assert!(flat(&self.stdout).contains(&flat(word)), "{word:?} is not in:\n{}", self.stdout);
        }
        assert!(self.stdout.lines().all(|line| line.chars().count() <= 140), "{}", self.stdout);
        self
    }
}

const Q: &str = "model.layers.1.self_attn.q_proj.weight";

#[test]
fn a_fault_of_another_model_directory_is_named_and_an_equal_one_passes() {
    let fixture = Fixture::new();
    let file = fixture.path("other/model.safetensors");
    fixture.copy("model", "other");
    let against = || fixture.verify(&["model", "--against", "other"]);
    against()
        .page(0, &["all states are equal to the bit", "16 sampled tokens are equal", "tensors are equal to the bit"]);
    fixture
        .verify(&["model"])
        .page(0, &["1 file, complete", "log-probabilities of sampled tokens are those of training"]);

    fixture.edit("other/config.json", |config| {
        let rope = config.pointer_mut("/rope_parameters/rope_theta").map(|theta| *theta = 1e6.into());
        if rope.is_none() {
            config["rope_theta"] = 1e6.into();
        }
    });
    let ended = against();
    ended.page(1, &["rope_theta is 10000 in model and 1000000 in other", "the difference starts at layer 0, token 1"]);
    fixture.copy("model", "other");

    edit(&file, |name, shape, values| {
        if name == Q {
            transpose(shape, values);
        }
    });
    let words = format!("{Q} is transposed in other");
    against().page(1, &[&words, "the difference starts at final norm"]);
    fixture.copy("model", "other");

    edit(&file, |_, _, values| shake(values));
    let words = "tensors differ a little everywhere, by up to";
    against().page(
        1,
        &["stale weights: ", words, "they are of another training step", "the difference starts at embedding"],
    );
    fixture.copy("model", "other");

    edit(&file, |name, _, values| {
        if name == Q {
            values[70] = f32::from_bits(values[70].to_bits() ^ 1 << 29);
        }
    });
    against().page(1, &[&format!("{Q} [2, 6] is "), "which is bit 29 flipped"]);
    fixture.copy("model", "other");

    edit(&file, |_, _, values| values.iter_mut().for_each(|x| *x = half::bf16::from_f32(*x).to_f32()));
    against().page(1, &["bf16: ", "tensors of other are those of model, rounded to bf16"]);

    let length = fs::metadata(&file).unwrap().len();
    fs::File::options().write(true).open(&file).unwrap().set_len(length - 100).unwrap();
    against().page(1, &["other: other/model.safetensors: the file is truncated"]);
    fixture.copy("model", "other");

    fixture.run(&["tokenizer", "job.toml", "--vocabulary", "264", "--out", "foreign"]).well();
    fixture.copy("foreign", "other");
    against().page(1, &["foreign: "]);
}

/// Copies a model and the dump that `tests/golden/dumps.py` makes of it.
fn with_dump(fixture: &Fixture, name: &str) {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    super::command::copy(&golden.join("models").join(name), ".", &fixture.path("dumped"));
    fs::copy(golden.join(format!("dumps/{name}.safetensors")), fixture.path("dump.safetensors")).expect("a dump");
}

#[test]
fn a_dump_of_transformers_is_reproduced_within_rounding() {
    let fixture = Fixture::new();
    for name in ["llama3", "qwen3", "gemma3_text"] {
        with_dump(&fixture, name);
        let ended = fixture.verify(&["dumped", "--against", "dump.safetensors"]);
        ended.page(
            0,
            &["rounding of f32 explains all differences", "8 sampled tokens are equal", "100.0 % of the 10 likeliest"],
        );
        fs::remove_dir_all(fixture.path("dumped")).unwrap();
    }
}

#[test]
fn the_fault_of_a_model_is_found_from_a_dump_without_weights() {
    let fixture = Fixture::new();
    let against = || fixture.verify(&["dumped", "--against", "dump.safetensors"]);
    let theta = |theta: f64| {
        fixture.edit("dumped/config.json", |config| config["rope_parameters"]["rope_theta"] = theta.into());
    };
    with_dump(&fixture, "llama3");
    theta(1e6);
    against()
        .page(1, &["rope_theta: the differences grow with the position", "ours is 1000000, theirs fits theta 500"]);
    theta(500.0);

    let o = "model.layers.0.self_attn.o_proj.weight";
    for path in fs::read_dir(fixture.path("dumped")).unwrap().map(|entry| entry.unwrap().path()) {
        if path.extension().is_some_and(|end| end == "safetensors") {
            edit(&path, |name, shape, values| {
                if name == o {
                    transpose(shape, values);
                }
            });
        }
    }
    against().page(1, &[&format!("{o} is transposed: theirs fits its transpose")]);

    with_dump(&fixture, "llama3");
    for path in fs::read_dir(fixture.path("dumped")).unwrap().map(|entry| entry.unwrap().path()) {
        if path.extension().is_some_and(|end| end == "safetensors") {
            edit(&path, |_, _, values| shake(values));
        }
    }
    against().page(1, &["stale weights: the embeddings already differ by"]);

    with_dump(&fixture, "llama3");
    let dump = fixture.path("dump.safetensors");
    edit(&dump, |_, _, values| values.iter_mut().for_each(|x| *x = f32::from_bits(x.to_bits() & 0xffff_0000)));
    against().page(1, &["bf16: all hidden states of the dump are numbers of bf16, although it names f32"]);

    with_dump(&fixture, "llama3");
    fs::copy(fixture.path("tokenizer/tokenizer.json"), fixture.path("dumped/tokenizer.json")).unwrap();
    against().page(1, &["foreign: the tokenizer has 264 tokens, but the model embeds 131"]);
    fs::remove_file(fixture.path("dumped/tokenizer.json")).unwrap();
    let length = fs::metadata(&dump).unwrap().len();
    fs::File::options().write(true).open(&dump).unwrap().set_len(length - 4).unwrap();
    against().refused(65, &["dump.safetensors: the file is truncated"]);
}

#[test]
fn a_layout_of_two_ranks_has_the_results_of_one_and_needs_two_ranks() {
    let fixture = Fixture::new();
    for layout in ["tensor=2", "sequence=2,zero=3"] {
        let ended = mpirun(fixture.root(), 2, &["verify", "model", "--layout", layout]);
        ended.page(
            0,
            &[
                "2 ranks hold the values of the files",
                "rounding of f32 explains all differences",
                "16 sampled tokens are equal",
            ],
        );
    }
    fixture
        .verify(&["model", "--layout", "tensor=2"])
        .refused(2, &["--layout tensor=2 needs 2 ranks (got 1)"])
        .hinted("mpirun -n 2 rlhf-hpc verify model --layout tensor=2");
    fixture.verify(&["model", "job.steps=2"]).refused(2, &["changes of keys belong to a job file"]);
    fixture.verify(&["model", "--against", "model", "--device", "gpu"]).refused(2, &["exclude each other"]);
    fixture.verify(&["nosuch"]).page(1, &["nosuch does not exist"]);
}

#[test]
fn a_machine_with_the_ranks_of_a_job_passes() {
    let fixture = Fixture::new();
    let before = fixture.files(".");
    let words = [
        "operations 14 equal their equations in f64",
        "killed after step",
        "ends with the same weights to the bit",
        "equal those of training to the bit",
        "the next step is the same to the bit",
    ];
    fixture.verify(&["job.toml"]).page(0, &words);
    assert_eq!(fixture.files("."), before, "nothing is left");
    let of_ranks =
        ["2 ranks agree to the bit", "loss, gradient and update of one rank", "right sums; ", "hold the same bits"];
    for layout in ["mesh.tensor=2", "mesh.zero=3", "mesh.pipeline=2"] {
        mpirun(fixture.root(), 2, &["verify", "job.toml", layout]).page(0, &[&words[..], &of_ranks[..]].concat());
    }
}

#[test]
fn a_damaged_shard_a_foreign_tokenizer_and_a_full_disk_are_named() {
    let fixture = Fixture::new();
    fs::File::options().write(true).open(fixture.path("demonstrations.bin")).unwrap().set_len(40).unwrap();
    fixture.run(&["tokenizer", "job.toml", "--vocabulary", "264", "--out", "foreign"]).well();
    fixture.copy("foreign", "model");
    let set = "data.prompts=[\"questions\", \"demonstrations\"]";
    let line = format!(
        "ulimit -f 64; exec {} verify job.toml '{set}' rollout.response_tokens_max=4",
        env!("CARGO_BIN_EXE_rlhf-hpc")
    );
    let mut shell = launched(Path::new("bash"), 0);
    shell.args(["-c", &line]).current_dir(fixture.root());
    let words =
        ["foreign tokenizer: ", "questions was made with tokenizer", "damaged shard: ", "full disk: cannot write"];
    Running::new(shell).end().page(1, &words);
}
