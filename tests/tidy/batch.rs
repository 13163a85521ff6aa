//! The batch scripts of `jobs/`: each asks Slurm for the resources of the job next to it, and starts it.

use super::source::{File, files, root};
use rlhf_hpc::config::{self, job::DeviceName};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

fn scripts() -> Vec<File> {
    let scripts = files("jobs", &[".sbatch"]);
    assert!(scripts.len() >= 5, "{} scripts", scripts.len());
    scripts
}

/// The options: `--nodes=2` as ("nodes", "2"), an option without a value with "".
fn asked(script: &File) -> BTreeMap<&str, &str> {
    let lines = script.text.lines().filter_map(|line| line.strip_prefix("#SBATCH --"));
    lines.map(|line| line.split_once('=').unwrap_or((line, ""))).collect()
}

fn job_of(script: &File) -> String {
    script.name.replace(".sbatch", ".toml")
}

#[test]
fn each_batch_script_asks_for_the_ranks_and_the_devices_of_its_job() {
    for script in scripts() {
        let (name, asked) = (&script.name, asked(&script));
        let number = |option: &str| asked[option].parse::<usize>().unwrap_or_else(|_| panic!("{name}: --{option}"));
        let config = config::load(&root().join(job_of(&script)), &[]).unwrap();
        let ranks = number("nodes") * number("ntasks-per-node");
        assert_eq!(config.mesh.resolve(ranks).unwrap().ranks(), ranks, "{name}");
        assert!(number("cpus-per-task") >= 4, "{name}");
        for (option, value) in [("exclusive", ""), ("mem", "0"), ("requeue", ""), ("open-mode", "append")] {
            assert_eq!(asked.get(option), Some(&value), "{name}: --{option}");
        }
        assert!(asked["signal"].starts_with("B:USR1@"), "{name}");
        let gpus = match config.job.device {
            DeviceName::Gpu => Some(asked["ntasks-per-node"]),
            DeviceName::Cpu => None,
            DeviceName::Auto => panic!("{name}: a job for a cluster says where it computes"),
        };
        assert_eq!(asked.get("gpus-per-node").copied(), gpus, "{name}: a GPU for each rank");
        assert_eq!(asked.get("gpu-bind").copied(), gpus.map(|_| "none"), "{name}");
        assert!(!asked.contains_key("gpus-per-task"), "{name}: hides the GPUs of a node from each other");
        assert_eq!(script.text.contains("\nfor_gpus\n"), gpus.is_some(), "{name}");
    }
}

/// Runs a script as Slurm would, with launchers that say what they were asked for and end with `code`.
fn run(script: &File, folder: &Path, code: i32, environment: &[(&str, &str)]) -> Output {
    let bin = tempfile::tempdir().unwrap();
    for (tool, code) in [("mpirun", code), ("srun", code), ("scontrol", 0)] {
        let text =
            format!("#!/bin/sh\necho \"$(basename $0) $*\"\nenv | grep -E '^(UCX|OMPI|CUDA|NCCL)'\nexit {code}\n");
        let file = bin.path().join(tool);
        fs::write(&file, text).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let path = format!("{}:{}", bin.path().display(), std::env::var("PATH").unwrap());
    let mut command = Command::new("bash");
    command.arg(root().join(&script.name)).arg("job.steps=3").env("PATH", path);
    command.env("SLURM_SUBMIT_DIR", folder).env("RLHF_HPC", "/bin/true");
    command.env("SLURM_JOB_ID", "77").env("SLURM_NTASKS", "16").env("SLURM_CPUS_PER_TASK", "8");
    for variable in ["UCX_TLS", "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_MAX_P2P_NCHANNELS", "RLHF_JOB", "RLHF_LAUNCHER"] {
        command.env_remove(variable);
    }
    command.envs(environment.iter().copied()).output().unwrap()
}

#[test]
fn each_batch_script_starts_its_job_from_either_folder_and_goes_back_to_the_queue() {
    for script in scripts() {
        let text =
            |output: &Output| String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned();
        let on_gpus = asked(&script).contains_key("gpus-per-node");
        for folder in [root(), root().join("jobs")] {
            let output = run(&script, &folder, 85, &[("NCCL_MAX_P2P_NCHANNELS", "16")]);
            let said = text(&output);
            let line =
                |of: &str| said.lines().find(|line| line.starts_with(of)).unwrap_or_else(|| panic!("{of}: {said}"));
            let started = format!("/bin/true run {} job.steps=3", root().join(job_of(&script)).display());
            assert!(line("mpirun ").contains("--bind-to none -n 16") && line("mpirun ").contains(&started), "{said}");
            assert_eq!((output.status.code(), line("scontrol ")), (Some(85), "scontrol requeue 77"), "{said}");
            for variable in ["UCX_TLS=^cuda", "OMPI_MCA_opal_cuda_support=0", "CUDA_DEVICE_MAX_CONNECTIONS=32"] {
                assert_eq!(said.contains(variable), on_gpus, "{}: {variable}: {said}", script.name);
            }
            assert!(said.contains("NCCL_MAX_P2P_NCHANNELS=16"), "what the site has set stays: {said}");
        }
        let output = run(&script, &root(), 3, &[("RLHF_LAUNCHER", "srun")]);
        let said = text(&output);
        assert!(said.contains("srun --mpi=pmix --kill-on-bad-exit=1 --cpus-per-task=8 /bin/true run "), "{said}");
        assert!(output.status.code() == Some(3) && !said.contains("scontrol"), "{said}");
        assert_eq!(said.contains("NCCL_MAX_P2P_NCHANNELS=4"), on_gpus, "{said}");
    }
}
