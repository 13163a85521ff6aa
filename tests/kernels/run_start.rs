//! The start of a run on a GPU: the self-test of its kernels, and the choice of `auto` values.

use crate::jobs::{self, CONFIG, binary, command, command_on, emulated, flat, launched, metrics, number, with};
use crate::{emulation, skip};
use rlhf_hpc::device::cuda::embedded::{CUBINS, units};
use serde_json::json;
use std::path::Path;
use std::process::Output;

/// The default values of the keys that `jobs` sets for other tests.
const DEFAULTS: &str = "job.device=auto model.dtype=auto job.gemm=auto job.check=true";

/// Kernels that leave zeros in a result (`emulation::SPOILS`): the hidden state, or a gradient, is wrong.
pub const HIDDEN: &str = "attention_forward_64:1+:10";
const GRADIENT: &str = "swiglu_backward:1+:3";

/// Runs a job with or without a GPU.
fn run(dir: &Path, gpu: bool, line: &str, env: &[(&str, &str)]) -> Output {
    let mut command = command_on(gpu, dir, &format!("run {line}"));
    command.envs(env.iter().copied()).output().expect("the binary starts")
}

/// Runs a job that must succeed.
fn ends(dir: &Path, gpu: bool, line: &str, env: &[(&str, &str)]) -> String {
    let done = run(dir, gpu, line, env);
    assert!(done.status.success(), "{line}: {}\n{}", done.status, flat(&done));
    flat(&done)
}

fn resolved(dir: &Path, job: &str) -> String {
    std::fs::read_to_string(dir.join(job).join("config.resolved.toml")).expect("a configuration")
}

fn losses(dir: &Path, job: &str) -> Vec<u64> {
    metrics(dir, job).iter().map(|step| number(step, "loss").to_bits()).collect()
}

#[test]
fn a_gpu_whose_results_differ_is_rejected_with_the_first_quantity_that_differs() {
    let Some(dir) = emulated(CONFIG) else { return };
    let at = dir.path();
    for (i, (spoils, what)) in [
        (HIDDEN, "the hidden state"),
        (GRADIENT, "the gradient of model.layers.1."),
        ("kv_append:1+:0", "tokens sampled after a prompt of "),
    ]
    .into_iter()
    .enumerate()
    {
        let line = format!("sft.toml job.check=true job.steps=1 job.dir=refused-{i}");
        let done = run(at, true, &line, &[(emulation::SPOILS, spoils)]);
        let words = flat(&done);
        assert_eq!(done.status.code(), Some(1), "{spoils}: {words}");
        assert!(words.contains("the kernels of this GPU failed the self-test against the CPU: "), "{spoils}: {words}");
        assert!(words.contains(what), "{spoils}: {words}");
        assert!(!at.join(format!("refused-{i}/metrics.jsonl")).exists(), "{spoils}: something was trained");
    }
    // Without the self-test it is not detected.
    let ill = [(emulation::SPOILS, GRADIENT)];
    ends(at, true, "sft.toml job.check=false job.steps=1 job.dir=unseen", &ill);
    // An automatic device does not fall back to the CPU.
    let done = run(at, true, &format!("sft.toml job.dir=open {DEFAULTS}"), &ill);
    let words = flat(&done);
    let why =
        "error: GPU 0 at 0000:3b:00.0: the kernels of this GPU failed the self-test against the CPU: the gradient of";
    assert!(done.status.code() == Some(1) && words.contains(why), "{words}");
    assert!(words.contains("job.device = \"cpu\" to run without the GPU"), "{words}");
}

#[test]
fn a_job_that_keeps_sampling_masks_is_rejected_on_a_gpu_and_runs_on_the_cpu() {
    let Some(dir) = emulated(CONFIG) else { return };
    let line = "ppo.toml job.steps=1 job.dir=masked rollout.top_k=5 rollout.keep_sampling_mask=true";
    for device in ["job.device=gpu", DEFAULTS] {
        let done = run(dir.path(), true, &format!("{line} {device}"), &[]);
        let why = "GPUs do not support rollout.keep_sampling_mask = true: no kernel masks logits yet";
        assert!(done.status.code() == Some(2) && flat(&done).contains(why), "{}", flat(&done));
    }
    ends(dir.path(), true, &format!("{line} {DEFAULTS} job.device=cpu"), &[]);
    assert_eq!(number(&metrics(dir.path(), "masked")[0], "logprob_gap_max").to_bits(), 0);
}

#[test]
fn by_default_a_job_runs_on_the_gpu_in_bf16_and_without_one_on_the_cpu_in_f32() {
    let Some(dir) = emulated(CONFIG) else { return };
    let at = dir.path();
    let job = |to: &str| format!("sft.toml job.steps=2 job.dir={to} {DEFAULTS}");
    // On a busy machine, the measured order of both GEMMs would otherwise be random.
    let words = ends(at, true, &job("gpu"), &[("EMULATED_MATMUL_DELAY_MS", "5")]);
    assert!(words.contains("kernels checked against the CPU in ") && words.contains(" bf16 "), "{words}");
    for line in ["device = \"gpu\"", "dtype = \"bf16\"", "gemm = \"cublaslt\""] {
        assert!(resolved(at, "gpu").lines().any(|l| l == line), "no {line}:\n{}", resolved(at, "gpu"));
    }
    let words = ends(at, false, &job("cpu"), &[]);
    assert!(words.contains("no GPU: ") && words.contains(" f32 "), "{words}");
    for line in ["device = \"cpu\"", "dtype = \"f32\"", "gemm = \"exact\""] {
        assert!(resolved(at, "cpu").lines().any(|l| l == line), "no {line}:\n{}", resolved(at, "cpu"));
    }
    ends(at, false, "sft.toml job.steps=2 job.device=cpu model.dtype=f32 job.dir=said", &[]);
    assert_eq!(losses(at, "cpu"), losses(at, "said"));
    // A GPU's checkpoint resumes on the CPU, which logs the changes.
    let words = ends(at, false, &format!("sft.toml job.steps=3 job.dir=gpu {DEFAULTS}"), &[]);
    for change in ["job.device = \"cpu\" (was \"gpu\")", "model.dtype = \"f32\" (was \"bf16\")"] {
        assert!(words.contains("resuming with changes: ") && words.contains(change), "{words}");
    }
    assert_eq!(metrics(at, "gpu").len(), 3);
    // No GPU supports f32.
    for device in ["auto", "gpu"] {
        let done = run(at, true, &format!("sft.toml --dry-run job.device={device} model.dtype=f32"), &[]);
        let (words, why) = (
            flat(&done),
            "error: GPUs do not support model.dtype = \"f32\": they hold weights and activations in bf16",
        );
        assert!(done.status.code() == Some(2) && words.contains(why), "{words}");
        assert!(words.contains("set model.dtype = \"bf16\", or job.device = \"cpu\""), "{words}");
    }
}

#[test]
fn an_automatic_gemm_is_the_faster_one_and_is_kept_on_resume() {
    let Some(dir) = emulated(CONFIG) else { return };
    let at = dir.path();
    // On a busy machine, the measured order would otherwise be random.
    let (slow, fast) = ([("EMULATED_CUBLASLT_DELAY_MS", "100")], [("EMULATED_MATMUL_DELAY_MS", "5")]);
    let job = |steps, to: &str| format!("sft.toml sft.loss_on=all job.gemm=auto job.steps={steps} job.dir={to}");
    let words = ends(at, true, &job(2, "exact"), &slow);
    assert!(words.contains("gemm exact measured two GEMMs, for all passes of 128 tokens in a step: "), "{words}");
    assert!(resolved(at, "exact").contains("gemm = \"exact\""));
    let words = ends(at, true, &job(2, "fast"), &fast);
    assert!(words.contains("gemm cublaslt: GEMMs of more than 64 rows by cuBLASLt 12.8.3"), "{words}");
    assert!(words.contains(" measured two GEMMs, for all passes of 128 tokens in a step: "), "{words}");
    // A resume keeps the initial choice, even if it would now measure otherwise.
    let words = ends(at, true, &job(3, "exact"), &[]);
    assert!(
        words.contains(
            "gemm exact, as at the start of the run measured two GEMMs, for all passes of 128 tokens in a step: "
        ),
        "{words}"
    );
    let words = ends(at, true, &job(3, "fast"), &slow);
    assert!(words.contains("gemm cublaslt, as at the start of the run: GEMMs of more than 64 rows"), "{words}");
    assert!(resolved(at, "exact").contains("gemm = \"exact\""));
    assert!(resolved(at, "fast").contains("gemm = \"cublaslt\""));
    // Bit-identical to an explicit value.
    let said = "sft.toml sft.loss_on=all job.gemm=exact job.steps=3 job.dir=said";
    ends(at, true, said, &[]);
    assert_eq!(losses(at, "exact"), losses(at, "said"));
}

#[test]
fn a_rank_with_a_faulty_or_missing_gpu_is_named_and_ends_all_ranks() {
    let Some(dir) = emulated(CONFIG) else { return };
    let at = dir.path();
    let ranks = |of_rank_1: &str, sets: &str| {
        let own = format!("if [ $OMPI_COMM_WORLD_RANK = 1 ]; then export {of_rank_1}; fi; exec \"$0\" \"$@\"");
        let line = format!("run sft.toml job.steps=1 {sets}");
        let mut mpirun = launched(2);
        mpirun
            .current_dir(at)
            .envs(emulation::environment_of_jobs())
            .args(["sh", "-c", &own])
            .arg(binary())
            .args(line.split(' '));
        mpirun.output().expect("mpirun starts")
    };
    let ill = format!("{}={GRADIENT}", emulation::SPOILS);
    let computes =
        "GPU 1 at 0000:af:00.0: the kernels of this GPU failed the self-test against the CPU: the gradient of";
    let nowhere = "/nowhere/libcuda.so is not on this machine";
    let retain = "GPU 1 at 0000:af:00.0: cuDevicePrimaryCtxRetain: ";
    for (of_rank_1, device, code, why) in [
        (&ill[..], "auto", 1, computes),
        ("RLHF_CUDA_LIB=/nowhere/libcuda.so", "auto", 2, nowhere),
        ("RLHF_CUDA_LIB=/nowhere/libcuda.so", "gpu", 2, nowhere),
        ("EMULATED_FAILS=cuInit:1:100", "auto", 2, "the driver shows no GPU: "),
        ("EMULATED_FAILS=cuDevicePrimaryCtxRetain:1:46", "gpu", 1, retain),
    ] {
        let done = ranks(of_rank_1, &format!("job.dir=refused {DEFAULTS} job.device={device}"));
        let (words, which) = (flat(&done), if device == "gpu" { "job.device = \"gpu\": " } else { "" });
        assert_eq!(done.status.code(), Some(code), "{of_rank_1}: {words}");
        assert!(words.contains(&format!("error: {which}rank 1 (")) && words.contains(why), "{of_rank_1}: {words}");
        assert!(words.contains("job.device = \"cpu\""), "{words}");
    }
}

/// Families and shapes of models.
#[test]
fn models_of_all_families_pass_the_self_test_with_both_gemms() {
    let Some(dir) = emulated(CONFIG) else { return };
    let at = dir.path();
    let qwen2 = json!({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_attention_heads": 7});
    let mistral = json!({
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 16, "head_dim": 128,
    });
    let scaling = json!({"rope_type": "linear", "factor": 4.0});
    let wide = json!({"hidden_size": 192, "rope_scaling": scaling, "head_dim": 80});
    for (kind, others) in [("qwen2", qwen2), ("mistral", mistral), ("wide", wide)] {
        let config = with(CONFIG, &others);
        std::fs::write(at.join("other.json"), config).expect("a file");
        crate::jobs::rlhf_hpc(at, &format!("init --config other.json --tokenizer tokenizer --out {kind}"));
        let sets = format!("model.actor={kind} job.dir=of-{kind}");
        let job = format!("ppo.toml job.check=true job.gemm=cublaslt --dry-run {sets}");
        let words = ends(at, true, &job, &[]);
        let gap = words.split("largest gap").nth(1).and_then(|words| words.split(" %").next());
        let gap = gap.and_then(|words| words.rsplit(' ').next());
        let gap: f64 = gap.and_then(|gap| gap.parse().ok()).unwrap_or_else(|| panic!("{words}"));
        let at = words.find("kernels checked").expect("a row");
        eprintln!("{kind}: {}", &words[at..(at + 200).min(words.len())]);
        assert!(gap < 2.5, "{kind}: {gap} % is near what is refused");
    }
}

/// Uses a driver that rejects the cubins of the binary, and an NVRTC that counts its calls.
#[test]
fn the_first_rank_of_a_host_compiles_for_all_and_its_error_ends_all() {
    if CUBINS.is_empty() || CUBINS.iter().any(|cubin| cubin.bytes[8] < 8) {
        return skip("no cubins of CUDA 13");
    }
    let Some(dir) = emulated(CONFIG) else { return };
    let at = dir.path();
    let (calls, cache) = (at.join("calls"), at.join("cache"));
    let run = |name: &str, cache: &Path, fails: &str| {
        let _ = std::fs::remove_file(&calls);
        let mut command = command(2, at, &format!("run sft.toml job.steps=1 job.dir={name} mesh.data=2"));
        command.env("EMULATED_CUDA", "12020").env("RLHF_NVRTC", emulation::gpu()).env("EMULATED_CALLS", &calls);
        command.env("XDG_CACHE_HOME", cache).env("TMPDIR", at).env("EMULATED_FAILS", fails).output().expect("it starts")
    };
    let compiled = |rank| jobs::calls(&calls, rank).get("nvrtcCompileProgram").copied().unwrap_or(0);
    // If the cache cannot be written, like some home directories on compute nodes, a temporary directory is used.
    for (name, cache) in [("home", &*cache), ("no-home", Path::new("/proc/none"))] {
        let done = run(name, cache, "cuInit:99:1");
        assert!(done.status.success(), "{}", flat(&done));
        assert_eq!([compiled("0"), compiled("1")], [units().count() as u64, 0], "{name}");
        let done = run(&format!("{name}-again"), cache, "cuInit:99:1");
        assert!(done.status.success() && compiled("0") + compiled("1") == 0, "{}", flat(&done));
    }
    let done = run("fails", &at.join("other"), "nvrtcCompileProgram:2:6@0");
    let words = flat(&done);
    assert!(done.status.code() == Some(2) && words.matches("error: ").count() == 1, "{words}");
    assert!(
        words.contains("error: job.device = \"gpu\": rank 0 (") && words.contains("does not compile for sm_80"),
        "{words}"
    );
}
