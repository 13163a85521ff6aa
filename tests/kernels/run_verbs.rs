//! The verbs that use a model: the GPU gives the same output as the CPU.

use crate::jobs::{command, output_text, prepare, with};
use crate::run_start::HIDDEN;
use crate::{device, emulation, skip_on_a_real_gpu};
use rlhf_hpc::comm::Axes;
use rlhf_hpc::config::rollout::RolloutConfig;
use rlhf_hpc::device::Device;
use rlhf_hpc::device::cuda::gpu;
use rlhf_hpc::model::{Arch, Head, TensorPart, Transformer, export, init};
use rlhf_hpc::rng::{Purpose, Rng};
use rlhf_hpc::rollout::{self, Engine, Hooks, Model, Stop};
use rlhf_hpc::tensor::DType;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Output;
use std::sync::Arc;

/// Weights with a large std, so that the distributions are not flat, unlike those of untrained weights.
const CONFIG: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2,
 "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
 "vocab_size": 264, "max_position_embeddings": 160, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
 "initializer_range": 0.15, "bos_token_id": 0, "eos_token_id": 1}"#;

/// The largest error of a log-probability due to bf16, in nats (measured: 0.082 in a thousand).
const NATS: f64 = 0.12;

/// A verb on the model `model` and the rows of `input`, on an emulated GPU.
fn verb(at: &Path, verb: &str, model: &str, input: &str, more: &str) -> Output {
    let line = format!("{verb} --model {model} --input {input} {more}");
    command(1, at, &line).output().expect("the binary starts")
}

fn lines(done: &Output) -> Vec<Value> {
    assert!(done.status.success(), "{}", output_text(done));
    let text = String::from_utf8_lossy(&done.stdout);
    text.lines().map(|line| serde_json::from_str(line).expect("a JSON line")).collect()
}

/// The output of a verb on the GPU, without the self-test, and on the CPU.
fn both(at: &Path, name: &str, model: &str, input: &str, more: &str) -> [Vec<Value>; 2] {
    let on = |device: &str| verb(at, name, model, input, &format!("{more} --device {device}"));
    let (gpu, cpu) = (on("gpu --no-check"), on("cpu"));
    assert!(output_text(&gpu).contains(" in bf16, kernels not checked (--no-check)"), "{}", output_text(&gpu));
    assert!(output_text(&cpu).contains(" in f32\n"), "{}", output_text(&cpu));
    [lines(&gpu), lines(&cpu)]
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().expect("a list").iter().map(|x| x.as_u64().expect("a number") as u32).collect()
}

fn floats(value: &Value) -> Vec<f64> {
    value.as_array().expect("a list").iter().map(|x| x.as_f64().expect("a number")).collect()
}

/// Rows of these lengths, of tokens that look random.
fn rows(lengths: &[usize]) -> Vec<Vec<u32>> {
    let row =
        |(i, &len): (usize, &usize)| (0..len).map(|j| ((i * 89 + j * 37 + j * j * 11) % 260 + 2) as u32).collect();
    lengths.iter().enumerate().map(row).collect()
}

fn write(at: &Path, name: &str, rows: &[Vec<u32>]) {
    let text: String = rows.iter().map(|tokens| json!({ "tokens": tokens }).to_string() + "\n").collect();
    std::fs::write(at.join(name), text).expect("a file");
}

/// The lengths of most tests: within a page, beyond one, and beyond the size of a prefill chunk.
const LENGTHS: [usize; 7] = [5, 40, 1, 130, 17, 64, 33];

/// A directory with a model, its tokenizer and rows.
fn prepared() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a directory");
    prepare(dir.path(), CONFIG);
    write(dir.path(), "rows.jsonl", &rows(&LENGTHS));
    dir
}

#[test]
fn the_bench_measures_every_kernel_that_it_names() {
    let dir = tempfile::tempdir().expect("a directory");
    let done = command(1, dir.path(), "bench cuda --small --repeats 1 --json --record record")
        .output()
        .expect("the binary starts");
    let lines = lines(&done);
    assert!(lines.len() >= 40, "{} works", lines.len());
    assert!(lines.iter().all(|line| line["seconds"].as_f64().is_some_and(|s| s > 0.0)));
    let recorded = std::fs::read_to_string(dir.path().join("record")).expect("the record");
    assert_eq!(recorded, String::from_utf8_lossy(&done.stdout));
    // Kernels with a target. On GPUs newer than sm_80 the target is relative to PyTorch.
    let verdicts: Vec<&str> =
        lines.iter().filter_map(|line| line["verdict"].as_str()).filter(|said| !said.is_empty()).collect();
    let is_said = |verdict: &&str| verdict.ends_with("too small to judge") || verdict.starts_with("target PyTorch's");
    assert!(verdicts.len() >= 10 && verdicts.iter().all(is_said), "{verdicts:?}");
}

#[test]
fn first_samples_and_likeliest_tokens_equal_the_cpus_except_for_near_ties() {
    let dir = prepared();
    let at = dir.path();
    // Only the first token is compared: later ones depend on it.
    let options = "--max-new-tokens 1 --samples 2 --ignore-eos --seed 5";
    let [gpu, cpu] = both(at, "generate", "model", "rows.jsonl", options);
    let alike = gpu.iter().zip(&cpu).filter(|(a, b)| a["tokens"] == b["tokens"]).count();
    assert!(gpu.len() == 2 * LENGTHS.len() && alike * 3 > gpu.len() * 2, "{alike} of {} are alike", gpu.len());
    // A temperature of 0 selects the likeliest token. If the tokens differ, it is a near tie.
    let [gpu, cpu] = both(at, "generate", "model", "rows.jsonl", "--max-new-tokens 8 --temperature 0 --ignore-eos");
    for (a, b) in gpu.iter().zip(&cpu) {
        let (x, y) = (ids(&a["tokens"]), ids(&b["tokens"]));
        let first = (0..8).find(|&j| x[j] != y[j]).unwrap_or(7);
        let gap = (floats(&a["logprobs"])[first] - floats(&b["logprobs"])[first]).abs();
        assert!(gap < NATS, "{x:?} and {y:?} part at {first}, {gap} apart");
    }
}

#[test]
fn log_probabilities_of_generated_rows_equal_those_of_generate_bitwise() {
    let dir = prepared();
    let at = dir.path();
    let options = "--max-new-tokens 20 --samples 2";
    let [gpu, _] = both(at, "generate", "model", "rows.jsonl", options);
    let rows = rows(&LENGTHS);
    let whole: Vec<Vec<u32>> =
        gpu.iter().enumerate().map(|(i, line)| [&rows[i / 2][..], &ids(&line["tokens"])].concat()).collect();
    write(at, "whole.jsonl", &whole);
    let [scored, on_cpu] = both(at, "logprobs", "model", "whole.jsonl", "");
    let mut farthest = 0.0_f64;
    for (i, (line, made)) in scored.iter().zip(&gpu).enumerate() {
        let (all, new) = (floats(&line["logprobs"]), floats(&made["logprobs"]));
        assert_eq!(all[rows[i / 2].len() - 1..], new, "row {i}");
        let gap = all.iter().zip(floats(&on_cpu[i]["logprobs"])).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(gap > 0.0 && gap < NATS, "row {i}: {gap} nats from the CPU");
        farthest = farthest.max(gap);
    }
    eprintln!("the farthest log-probability is {farthest} nats away");
}

#[test]
fn a_score_has_the_same_bits_in_every_batch_and_memory_does_not_grow_with_the_rows() {
    let dir = prepared();
    let at = dir.path();
    // Repeated batches of the same rows; the first row is alone in its batch.
    let lengths = [70, 1, 30, 17, 48, 5, 5, 38, 60, 9].repeat(4);
    write(at, "many.jsonl", &rows(&lengths));
    write(at, "few.jsonl", &rows(&lengths[..10]));
    let run = |input: &str, tokens: &str| {
        let more = format!("--device gpu --no-check --batch-tokens {tokens}");
        verb(at, "logprobs", "model", input, &more)
    };
    // Also with rows that are longer than a batch.
    let (few, many) = (run("few.jsonl", "48"), run("many.jsonl", "48"));
    let memory = |done: &Output| {
        let said = output_text(done);
        let told = said.lines().find_map(|line| line.strip_suffix(" of GPU memory")).map(String::from);
        told.unwrap_or_else(|| panic!("{said}")).rsplit(", ").next().map(String::from)
    };
    assert_eq!(memory(&few), memory(&many));
    let (many, together) = (lines(&many), lines(&run("many.jsonl", "4096")));
    assert_eq!((many.len(), &many), (40, &together));
    for (line, len) in many.iter().zip(&lengths) {
        assert_eq!(floats(&line["logprobs"]).len(), len - 1);
    }
}

fn arch(config: &str) -> Arch {
    Arch::from_config(&serde_json::from_str(config).expect("an object")).expect("a known family")
}

/// A reward model of the same kind as "reward", with mean and std.
fn reward_model(at: &Path) {
    let others = json!({"architectures": ["LlamaForSequenceClassification"], "mean": 0.5, "std": 0.25});
    let arch = arch(&with(CONFIG, &others));
    let weights = init::init(&arch, Head::Value, DType::F32, 3);
    export::export(&at.join("reward"), &arch, &weights, DType::F32, None).expect("an export");
}

#[test]
fn rewards_on_the_gpu_equal_the_cpus() {
    let dir = prepared();
    let at = dir.path();
    reward_model(at);
    let [gpu, cpu] = both(at, "reward", "reward", "rows.jsonl", "--batch-tokens 64");
    let of = |lines: &[Value]| -> Vec<f64> { lines.iter().map(|l| l["reward"].as_f64().expect("a number")).collect() };
    let (gpu, cpu) = (of(&gpu), of(&cpu));
    assert_eq!(gpu.len(), LENGTHS.len());
    let norm = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>().sqrt();
    let gaps: Vec<f64> = gpu.iter().zip(&cpu).map(|(a, b)| a - b).collect();
    assert!(norm(&gaps) < 0.02 * norm(&cpu), "{gpu:?} on the GPU, {cpu:?} on the CPU");
    let [normalised, _] = both(at, "reward", "reward", "rows.jsonl", "--normalize");
    for (a, b) in of(&normalised).iter().zip(&gpu) {
        assert!((a - (b - 0.5) / 0.25).abs() < 1e-5, "{a} of {b}");
    }
}

#[test]
fn a_gpu_whose_results_differ_gives_no_answers() {
    if skip_on_a_real_gpu() {
        return;
    }
    let dir = prepared();
    let at = dir.path();
    let run = |name: &str, more: &str| {
        let line = format!("{name} --model model --input rows.jsonl {more}");
        command(1, at, &line).env(emulation::SPOILS, HIDDEN).output().expect("the binary starts")
    };
    let wrong = "the kernels of this GPU failed the self-test against the CPU: ";
    for (name, device) in [("generate", "--device gpu"), ("logprobs", "--device gpu"), ("logprobs", "")] {
        let done = run(name, device);
        let said = output_text(&done);
        assert!(done.status.code() == Some(1) && said.contains(wrong) && said.contains("the hidden state"), "{said}");
        assert!(said.contains("--no-check") && said.contains("--device cpu") && !said.contains("job."), "{said}");
        assert!(done.stdout.is_empty(), "a wrong GPU answers");
    }
    // Without the self-test it is not detected.
    let right = verb(at, "logprobs", "model", "rows.jsonl", "");
    assert_ne!(lines(&run("logprobs", "--no-check")), lines(&right));
}

#[test]
fn a_model_without_kernels_is_rejected_with_the_supported_shapes_and_runs_on_the_cpu() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = dir.path();
    prepare(at, &with(CONFIG, &json!({"head_dim": 48})));
    write(at, "rows.jsonl", &rows(&[3, 9]));
    let run = |more: &str| verb(at, "logprobs", "model", "rows.jsonl", more);
    let known = "the head dim must be one of 32, 64, 80, 96, 128, 256";
    assert_eq!(lines(&run("--device cpu")).len(), 2);
    // Only the CPU has f32 weights.
    for (options, why) in [
        ("--device gpu", format!("error: {known} with --device gpu (got 48)")),
        ("", format!("error: {known} on a GPU (got 48)")),
        ("--dtype f32", "error: GPUs do not support --dtype f32".to_string()),
    ] {
        let done = run(options);
        let said = output_text(&done);
        assert!(done.status.code() == Some(2) && said.contains(&why) && said.contains("--device cpu"), "{said}");
    }
}

#[test]
fn an_engine_uses_at_most_the_memory_that_weights_and_cache_leave() {
    let (_gpu, _one) = device();
    if skip_on_a_real_gpu() {
        return;
    }
    let arch = arch(CONFIG);
    let weights = init::init_on(Device::Cuda, &arch, Head::LanguageModel, DType::Bf16, 1, TensorPart::whole());
    let transformer = Transformer::for_axes(&arch, &weights.table, &Axes::one());
    let config = RolloutConfig { response_tokens_max: 6, repetition_penalty: 1.2, ..RolloutConfig::default() };
    let prompts: Vec<_> = rows(&[100; 24])
        .into_iter()
        .map(|tokens| rlhf_hpc::experience::Prompt { tokens, ..Default::default() })
        .collect();
    let stop = Arc::new(Stop::default());
    let requests = rollout::requests(&prompts, &config, &stop, arch.context).expect("requests");
    // The cache has its largest size: otherwise it would use the remaining memory.
    let cache = 40 * transformer.kv_page_bytes(DType::Bf16).iter().sum::<usize>() as u64;
    let mut engine = Engine::new(&config, 0);
    engine.allow(cache);
    let reckoned = rollout::forward_bytes(&arch, 1, &config, requests.len(), rollout::edits_logits(&config));
    gpu().set_limit(gpu().usage().in_use as u64 + cache + reckoned);
    let model = Model { transformer: &transformer, weights: &weights, tokenizer: None };
    let mut hooks = Hooks::default();
    let outcome = engine.generate(model, Rng::new(1, Purpose::Sample), 0, &requests, &mut hooks);
    gpu().set_limit(0);
    let outcome = outcome.expect("it fits");
    assert_eq!(engine.kv_bytes() as u64, cache);
    assert!(outcome.graph_steps > 0 && !outcome.responses.contains(&None));
}

/// An emulated NCCL joins the emulated GPUs of two ranks. It is slower than the links that the plan assumes.
#[test]
fn verify_compares_a_gpu_with_the_cpu_and_names_the_slow_link_of_emulated_gpus() {
    if skip_on_a_real_gpu() {
        return;
    }
    let dir = prepared();
    let page = |ranks: usize, line: &str, code: i32, words: &[&str]| {
        let done = command(ranks, dir.path(), line).output().expect("the binary starts");
        let page = String::from_utf8_lossy(&done.stdout).into_owned();
        assert_eq!(done.status.code(), Some(code), "{page}{}", output_text(&done));
        for word in words {
            assert!(page.contains(word), "{word:?} is not in:\n{page}");
        }
    };
    page(1, "verify model --device gpu", 0, &["rounding of bf16 explains all differences"]);
    let slow = "FAIL  collectives   slow link: all-reduce over the data axis of ranks 0 to 1";
    let checks =
        ["step", "sharded step", "replicas", "sampler", "checkpoint", "clocks"].map(|name| format!("ok    {name} "));
    let words: Vec<&str> = checks.iter().map(String::as_str).chain(["NCCL", slow]).collect();
    page(2, "verify sft.toml", 1, &words);
}
