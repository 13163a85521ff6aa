//! The planned memory compared with the GPU memory of whole jobs, and the planned tensor size of a rollout.

use crate::jobs::{CONFIG, command, emulated, metrics, number, rlhf_hpc, well, with};
use serde_json::json;
use std::path::Path;

/// Several units, whose heads two tensor ranks share.
fn config() -> String {
    let heads = json!({"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 6, "vocab_size": 265});
    with(CONFIG, &heads)
}

/// Responses of a known length.
const KNOWN: &str = "rollout.ignore_eos=true checkpoint.every_steps=0";

/// Runs a job on `ranks` ranks with further settings. Returns the messages.
fn said(at: &Path, ranks: usize, job: &str, sets: &str) -> String {
    let known = if job == "ppo.toml" { KNOWN } else { "" };
    well(&mut command(ranks, at, &format!("run {job} {known} {sets}")))
}

/// The bytes of words like `4.8 MiB`.
fn bytes_of(words: &str) -> f64 {
    let (number, unit) = words.split_once(' ').unwrap_or_else(|| panic!("{words}"));
    let unit = ["B", "KiB", "MiB", "GiB"].iter().position(|known| *known == unit).expect("a unit");
    number.parse::<f64>().expect("a number") * 1024f64.powi(unit as i32)
}

/// The memory of a job's fullest GPU and the planned memory, from its last messages.
fn measured_and_planned(text: &str) -> [f64; 2] {
    let of = |line: &str| {
        let (measured, planned) = line.split_once(" above the start, ")?;
        let words = measured.rsplit_once("up to ")?.1;
        Some([bytes_of(words), bytes_of(planned.trim().strip_suffix(" planned per rank")?)])
    };
    text.lines().find_map(of).unwrap_or_else(|| panic!("{text}"))
}

/// The planned pinned host memory.
fn planned_to_pin(text: &str) -> f64 {
    let part = |line: &str| {
        let mut parts = line.split(": ");
        parts.find_map(|part| part.trim().strip_suffix(" of pinned host memory").map(str::to_owned))
    };
    bytes_of(&text.lines().find_map(part).unwrap_or_else(|| panic!("{text}")))
}

/// Samples whose keys and values use most of a job's memory.
const WIDE: &str =
    "rollout.prompts_per_step=2 rollout.samples_per_prompt=32 ppo.minibatch_samples=64 gradient.recompute=true";

/// Settings with many samples, whose keys, values and samples remain on the GPU, with everything else on the host.
const MANY: &str = "rollout.prompts_per_step=2 rollout.samples_per_prompt=64 ppo.minibatch_samples=128 \
     mesh.offload=[\"optimizer\",\"roles\"] gradient.recompute=true rollout.response_tokens_max=4";

/// The actor on the first ranks, the critic on one more.
fn placement(actors: usize) -> String {
    let place = |roles: &str, ranks: std::ops::Range<usize>| {
        format!("{{roles=[{roles}],ranks=\"{}..{}\"}}", ranks.start, ranks.end)
    };
    let (first, rest) =
        (place("\"actor\",\"reference\"", 0..actors), place("\"critic\",\"reward\"", actors..actors + 1));
    format!("mesh.placement=[{first},{rest}]")
}

/// Settings with many held-out prompts and steps of few prompts, with little else on the GPU.
const EVALUATES: &str = "eval.every_steps=1 eval.samples_max=64 data.eval_split=test data.split.by=ratio \
                         data.split.eval_ratio=0.5 rollout.prompts_per_step=2 rollout.response_tokens_max=2 \
                         gradient.recompute=true mesh.offload=[\"optimizer\",\"roles\"]";

/// The plan counts buffers like the pool, and messages have one decimal digit: 2 % in both directions for every job.
#[test]
#[ignore = "long: whole jobs of every layout, several minutes"]
fn the_planned_memory_of_jobs_is_right_within_two_percent() {
    let Some(dir) = emulated(&config()) else { return };
    let at = dir.path();
    let two = "mesh.data=2 mesh.tensor=1";
    let fixed = "gradient.order=fixed gradient.chunks=4";
    let mut jobs: Vec<(usize, &str, String)> = vec![
        (1, "ppo.toml", "job.gemm=exact".into()),
        (1, "ppo.toml", "job.gemm=exact gradient.recompute=true rollout.graphs=false".into()),
        (1, "ppo.toml", "job.gemm=cublaslt".into()),
        (1, "ppo.toml", format!("job.gemm=exact {fixed}")),
        // One chunk, which needs no sum; and three, one of which waits for no other.
        (1, "ppo.toml", "job.gemm=exact gradient.order=fixed gradient.chunks=1".into()),
        (1, "ppo.toml", "job.gemm=exact gradient.order=fixed gradient.chunks=3".into()),
        (1, "ppo.toml", "job.gemm=exact mesh.offload=[\"optimizer\",\"roles\"]".into()),
        // A batch that does not divide the samples.
        (1, "ppo.toml", format!("job.gemm=exact rollout.batch_max=40 {WIDE} mesh.offload=[\"optimizer\",\"roles\"]")),
        (1, "sft.toml", "job.gemm=exact".into()),
        (2, "ppo.toml", format!("job.gemm=exact {two} mesh.zero=1 {fixed}")),
        (2, "ppo.toml", "job.gemm=exact mesh.sequence=2 mesh.zero=1".into()),
        (2, "ppo.toml", "job.gemm=exact mesh.tensor=2 rollout.tensor=2".into()),
        (2, "ppo.toml", format!("job.gemm=exact {two} mesh.zero=3 rollout.tensor=2")),
        (4, "ppo.toml", "job.gemm=exact mesh.tensor=2 mesh.data=2 mesh.zero=3 rollout.tensor=4".into()),
        // Roles with their own ranks: the rank with the most memory counts.
        (2, "ppo.toml", format!("job.gemm=exact {}", placement(1))),
        (3, "ppo.toml", format!("job.gemm=exact {} mesh.zero=3", placement(2))),
        // A limited cache, of which the prompts of an evaluation use more than those of a step.
        (1, "ppo.toml", format!("job.gemm=exact {WIDE} rollout.kv_bytes_max=1000000")),
        (1, "ppo.toml", format!("job.gemm=exact {EVALUATES}")),
    ];
    // Decoding by graphs uses more memory, which counts if the rollout has the peak.
    jobs.extend([true, false].map(|graphs| (1, "ppo.toml", format!("job.gemm=exact {MANY} rollout.graphs={graphs}"))));
    jobs.push((1, "ppo.toml", format!("job.gemm=exact {MANY} rollout.kv_dtype=fp8")));
    jobs.extend((0..4).map(|zero| (2, "ppo.toml", format!("job.gemm=exact {two} mesh.zero={zero}"))));
    let mut beyond = Vec::new();
    let mut peaks = Vec::new();
    for (i, (ranks, job, sets)) in jobs.iter().enumerate() {
        let text = said(at, *ranks, job, &format!("{sets} job.dir=m-{i} job.steps=2"));
        let [measured, planned] = measured_and_planned(&text);
        let mut pinned = [measured, planned];
        if sets.contains(MANY) {
            peaks.push(measured);
            pinned = [number(&metrics(at, &format!("m-{i}"))[0], "memory_pinned_bytes"), planned_to_pin(&text)];
        }
        let shares = [planned / measured, pinned[1] / pinned[0]];
        let words =
            format!("{ranks} x {job} {sets}: {measured} bytes, {shares:?} of them, and of the pinned ones, planned");
        eprintln!("{words}");
        if (shares[0] - 1.0).abs() >= 0.02 || (shares[1] - 1.0).abs() >= 0.05 {
            beyond.push(words);
        }
    }
    assert!(beyond.is_empty(), "{beyond:#?}");
    assert!(peaks[0] > peaks[1], "graphs keep something: {peaks:?}");
    assert!(peaks[0] > peaks[2], "keys in 8 bits are smaller: {peaks:?}");
}

#[test]
fn the_memory_of_the_self_test_is_reported_and_freed() {
    let Some(dir) = emulated(CONFIG) else { return };
    let at = dir.path();
    let text = said(at, 1, "sft.toml", "job.steps=1 job.check=true");
    let [measured, planned] = measured_and_planned(&text);
    assert!((planned / measured - 1.0).abs() < 0.05, "{measured} bytes, {planned} planned");
    let told = text.lines().find_map(|line| line.trim().strip_prefix("self-test and GEMM timing used up to "));
    let checks =
        bytes_of(told.and_then(|told| told.strip_suffix(" of GPU memory")).unwrap_or_else(|| panic!("{text}")));
    eprintln!("{measured} bytes, {planned} planned, {checks} for the checks");
    assert!(checks > 0.0, "{text}");
    assert_eq!(
        metrics(at, "sft")[0]["memory_peak_bytes"].as_f64().map(|peak| (peak / measured - 1.0).abs() < 0.05),
        Some(true)
    );
}

/// Attention splits rows of more than 4096 tokens into key segments, and keeps f32 rows of each head between them.
/// Here they are about half of the planned memory: the reference, which has no backward, has many heads, actor and
/// critic have one.
#[test]
fn rows_split_into_key_segments_use_the_planned_memory() {
    // A short window: few keys to compute.
    let of_heads = |heads: usize| {
        let others = json!({
            "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 16, "hidden_size": 32,
            "intermediate_size": 32, "num_attention_heads": heads, "head_dim": 32, "max_position_embeddings": 8192,
        });
        with(CONFIG, &others)
    };
    let Some(dir) = emulated(&of_heads(1)) else { return };
    let at = dir.path();
    std::fs::write(at.join("reference.json"), of_heads(32)).expect("a file");
    rlhf_hpc(at, "init --config reference.json --tokenizer tokenizer --out reference");
    // The tokenizer's merges contain no capitals, so each is one token.
    let prompt: String = (0..4200).map(|i| char::from(b'A' + (i * i % 23) as u8)).collect();
    std::fs::write(at.join("rows.jsonl"), format!("{{\"prompt\": \"{prompt}\"}}\n")).expect("a file");
    let sets = "model.reference=reference data.prompt_tokens_max=5000 rollout.prompts_per_step=1 \
                rollout.samples_per_prompt=1 rollout.response_tokens_max=2 ppo.minibatch_samples=1 \
                ppo.microbatch_tokens_max=8192 job.steps=1";
    let [measured, planned] = measured_and_planned(&said(at, 1, "ppo.toml", sets));
    eprintln!("{measured} bytes, {planned} planned");
    assert!((planned / measured - 1.0).abs() < 0.05, "{measured} bytes, {planned} planned");
    let between = (4200 * 32 * (32 + 8) * size_of::<f32>()) as f64;
    assert!(between > 0.4 * measured, "{between} bytes of {measured} between runs");
}

/// A rollout with fewer tensor ranks than training communicates less and is predicted to be faster: the run follows the
/// plan.
#[test]
fn an_automatic_rollout_tensor_size_is_the_plans_and_is_shown_in_the_banner() {
    let Some(dir) = emulated(&config()) else { return };
    let at = dir.path();
    // Decoding is most of a step, and tensor ranks communicate twice per layer and token.
    let named = "job.steps=1 mesh.tensor=2 mesh.data=1 mesh.zero=0 rollout.prompts_per_step=2 \
                 rollout.samples_per_prompt=1 ppo.minibatch_samples=2 rollout.response_tokens_max=64";
    let text = said(at, 2, "ppo.toml", &format!("{named} --dry-run"));
    assert!(text.lines().any(|line| line.contains("rollout") && line.contains("tensor 1, 2 in training")), "{text}");
    // An explicit value is kept.
    let text = said(at, 2, "ppo.toml", &format!("{named} rollout.tensor=2 --dry-run"));
    assert!(!text.contains(" in training"), "{text}");
}
