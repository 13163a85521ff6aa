//! How a run starts on a GPU: its kernels are compared with the CPU, and what is `auto` becomes what is best.

use crate::emulation;
use crate::faults::{OF_STARTS, of_start};
use crate::jobs::{CONFIG, SOUND, binary, command_on, emulated, flat, launched, metrics, number};
use std::path::Path;
use std::process::Output;

/// The keys that `jobs` sets for other tests, as they are by default.
const DEFAULTS: [&str; 4] = ["job.device=auto", "model.dtype=auto", "job.gemm=auto", "job.check=true"];

/// Runs a job on a GPU with the fault of this number, or on none.
fn run(dir: &Path, gpu: Option<usize>, args: &[&str], env: &[(&str, &str)]) -> Output {
    let mut command = command_on(gpu, dir, &[&["run"], args].concat());
    command.envs(env.iter().copied()).output().expect("the binary starts")
}

/// `run` of a job that must come to its end.
fn ends(dir: &Path, gpu: Option<usize>, args: &[&str], env: &[(&str, &str)]) -> String {
    let done = run(dir, gpu, args, env);
    assert!(done.status.success(), "{args:?}: {}\n{}", done.status, flat(&done));
    flat(&done)
}

fn resolved(dir: &Path, job: &str) -> String {
    std::fs::read_to_string(dir.join(job).join("config.resolved.toml")).expect("a configuration")
}

fn losses(dir: &Path, job: &str) -> Vec<u64> {
    metrics(dir, job).iter().map(|step| number(step, "loss").to_bits()).collect()
}

#[test]
fn a_gpu_that_computes_other_things_is_refused_with_the_first_of_them_or_not_taken() {
    let Some(dir) = emulated(CONFIG) else { return };
    let at = dir.path();
    for (i, (fault, what)) in OF_STARTS.into_iter().enumerate() {
        let to = format!("job.dir=refused-{i}");
        let done = run(at, Some(of_start(i)), &["sft.toml", "job.check=true", "job.steps=1", &to], &[]);
        let words = flat(&done);
        eprintln!("{}: {words}", fault.0);
        assert_eq!(done.status.code(), Some(1), "{fault:?}: {words}");
        assert!(words.contains("the kernels of this GPU do not pass beside the CPU: "), "{fault:?}: {words}");
        assert!(words.contains(what), "{fault:?}: {words}");
        assert!(!at.join(format!("refused-{i}/metrics.jsonl")).exists(), "{fault:?}: something was trained");
    }
    // Without the look nobody sees it.
    let ill = Some(of_start(1));
    ends(at, ill, &["sft.toml", "job.check=false", "job.steps=1", "job.dir=unseen"], &[]);
    // What is free to choose takes the CPU.
    let words = ends(at, ill, &[&["sft.toml", "job.dir=chosen"], &DEFAULTS[..]].concat(), &[]);
    assert!(words.contains("no GPU: the kernels of this GPU do not pass beside the CPU: the gradient of"), "{words}");
    ends(at, None, &[&["sft.toml", "job.dir=cpu"], &DEFAULTS[..]].concat(), &[]);
    assert_eq!(losses(at, "chosen"), losses(at, "cpu"));
}

#[test]
fn by_default_a_job_runs_on_the_gpu_in_bf16_and_without_one_on_the_cpu_in_f32() {
    let Some(dir) = emulated(CONFIG) else { return };
    let at = dir.path();
    let job = |to: &'static str| [&["sft.toml", "job.steps=2", to], &DEFAULTS[..]].concat();
    let words = ends(at, Some(SOUND), &job("job.dir=gpu"), &[]);
    assert!(words.contains("kernels checked against the CPU in ") && words.contains(" bf16 "), "{words}");
    for line in ["device = \"gpu\"", "dtype = \"bf16\"", "gemm = \"cublaslt\""] {
        assert!(resolved(at, "gpu").lines().any(|l| l == line), "no {line}:\n{}", resolved(at, "gpu"));
    }
    let words = ends(at, None, &job("job.dir=cpu"), &[]);
    assert!(words.contains("no GPU: ") && words.contains(" f32 "), "{words}");
    for line in ["device = \"cpu\"", "dtype = \"f32\"", "gemm = \"exact\""] {
        assert!(resolved(at, "cpu").lines().any(|l| l == line), "no {line}:\n{}", resolved(at, "cpu"));
    }
    ends(at, None, &["sft.toml", "job.steps=2", "job.device=cpu", "model.dtype=f32", "job.dir=said"], &[]);
    assert_eq!(losses(at, "cpu"), losses(at, "said"));
    // What the GPU saved goes on without one, and says what is other.
    let words = ends(at, None, &[&["sft.toml", "job.steps=3", "job.dir=gpu"], &DEFAULTS[..]].concat(), &[]);
    for change in ["job.device = \"cpu\" (was \"gpu\")", "model.dtype = \"f32\" (was \"bf16\")"] {
        assert!(words.contains("goes on with changes: ") && words.contains(change), "{words}");
    }
    assert_eq!(metrics(at, "gpu").len(), 3);
    // What no GPU holds.
    let words = ends(at, Some(SOUND), &["sft.toml", "--dry-run", "job.device=auto", "model.dtype=f32"], &[]);
    assert!(words.contains("no GPU: model.dtype = \"f32\", and GPUs hold"), "{words}");
    let done = run(at, Some(SOUND), &["sft.toml", "--dry-run", "model.dtype=f32"], &[]);
    assert!(done.status.code() == Some(2) && flat(&done).contains("set model.dtype = \"bf16\""), "{}", flat(&done));
}

#[test]
fn automatic_products_are_those_with_which_a_step_is_faster_and_stay_so() {
    let Some(dir) = emulated(CONFIG) else { return };
    let at = dir.path();
    let slow = [("EMULATED_CUBLASLT_DELAY_MS", "100")];
    let job = |steps: &'static str, to: &'static str| ["sft.toml", "sft.loss_on=all", "job.gemm=auto", steps, to];
    let words = ends(at, Some(SOUND), &job("job.steps=2", "job.dir=exact"), &slow);
    assert!(words.contains("gemm exact measured a step's passes of 128 tokens through two matrices: "), "{words}");
    assert!(resolved(at, "exact").contains("gemm = \"exact\""));
    let words = ends(at, Some(SOUND), &job("job.steps=2", "job.dir=fast"), &[]);
    assert!(words.contains("gemm cublaslt: those of more than 64 rows by cuBLASLt 12.8.3"), "{words}");
    assert!(words.contains(" measured a step's passes of 128 tokens through two matrices: "), "{words}");
    // A resume goes on with what the run began with, whatever it would measure now.
    let words = ends(at, Some(SOUND), &job("job.steps=3", "job.dir=exact"), &[]);
    assert!(
        words.contains("gemm exact, as the run began measured a step's passes of 128 tokens through two matrices: "),
        "{words}"
    );
    let words = ends(at, Some(SOUND), &job("job.steps=3", "job.dir=fast"), &slow);
    assert!(words.contains("gemm cublaslt, as the run began: those of more than 64 rows"), "{words}");
    assert!(resolved(at, "exact").contains("gemm = \"exact\""));
    assert!(resolved(at, "fast").contains("gemm = \"cublaslt\""));
    // Bit for bit, as if it had been said.
    let said = ["sft.toml", "sft.loss_on=all", "job.gemm=exact", "job.steps=3", "job.dir=said"];
    ends(at, Some(SOUND), &said, &[]);
    assert_eq!(losses(at, "exact"), losses(at, "said"));
}

#[test]
fn all_ranks_leave_their_gpus_where_one_computes_other_things() {
    let Some(dir) = emulated(CONFIG) else { return };
    let at = dir.path();
    let own = format!(
        "if [ $OMPI_COMM_WORLD_RANK = 1 ]; then export {}={}; fi; exec \"$0\" \"$@\"",
        emulation::FAULT,
        of_start(1)
    );
    let ranks = |args: &[&str]| {
        let mut mpirun = launched(2);
        mpirun.current_dir(at).envs(emulation::environment()).args(["sh", "-c", &own]).arg(binary()).args(args);
        mpirun.output().expect("mpirun starts")
    };
    let job = ["run", "sft.toml", "job.steps=1"];
    let done = ranks(&[&job[..], &["job.dir=chosen"], &DEFAULTS[..]].concat());
    let words = flat(&done);
    assert!(done.status.success(), "{words}");
    assert!(words.contains("no GPU: rank 1 (") && words.contains("the gradient of"), "{words}");
    let done = ranks(&[&job[..], &["job.dir=refused", "job.check=true"]].concat());
    let words = flat(&done);
    assert!(!done.status.success() && words.contains("error: rank 1 ("), "{words}");
    assert!(words.contains("do not pass beside the CPU: the gradient of"), "{words}");
}

/// Families and shapes that models come in, by what is other in their config.json than in `CONFIG`.
const KINDS: [(&str, &[(&str, &str)]); 3] = [
    ("qwen2", &[("LlamaForCausalLM", "Qwen2ForCausalLM"), ("\"llama\"", "\"qwen2\""), ("heads\": 2", "heads\": 7")]),
    (
        "mistral",
        &[
            ("LlamaForCausalLM", "MistralForCausalLM"),
            ("\"llama\"", "\"mistral\", \"sliding_window\": 16"),
            ("head_dim\": 64", "head_dim\": 128"),
        ],
    ),
    (
        "wide",
        &[
            ("hidden_size\": 64", "hidden_size\": 192"),
            ("\"torch_dtype\"", "\"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 4.0}, \"torch_dtype\""),
            ("head_dim\": 64", "head_dim\": 80"),
        ],
    ),
];

#[test]
fn models_of_all_kinds_pass_with_both_products() {
    let Some(dir) = emulated(CONFIG) else { return };
    let at = dir.path();
    for (kind, others) in KINDS {
        let config = others.iter().fold(CONFIG.to_string(), |config, (from, to)| {
            assert!(config.contains(from), "{from}");
            config.replace(from, to)
        });
        std::fs::write(at.join("other.json"), config).expect("a file");
        crate::jobs::rlhf_hpc(at, &["init", "--config", "other.json", "--tokenizer", "tokenizer", "--out", kind]);
        let (actor, to) = (format!("model.actor={kind}"), format!("job.dir=of-{kind}"));
        let job = ["ppo.toml", "job.check=true", "job.gemm=cublaslt", "--dry-run", &actor, &to];
        let words = ends(at, Some(SOUND), &job, &[]);
        let gap = words.split("largest gap").nth(1).and_then(|words| words.split(" %").next());
        let gap = gap.and_then(|words| words.rsplit(' ').next());
        let gap: f64 = gap.and_then(|gap| gap.parse().ok()).unwrap_or_else(|| panic!("{words}"));
        let at = words.find("kernels checked").expect("a row");
        eprintln!("{kind}: {}", &words[at..(at + 200).min(words.len())]);
        assert!(gap < 2.5, "{kind}: {gap} % is near what is refused");
    }
}
