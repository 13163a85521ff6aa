//! The batch scripts of `jobs/`: each asks Slurm for the resources of the job next to it, and starts it.

use super::source::{File, files, root};
use rlhf_hpc::config::{self, job::DeviceName};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

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
fn each_batch_script_requests_the_ranks_and_the_devices_of_its_job() {
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
        for site in
            ["##SBATCH --partition=NAME\n", "##SBATCH --account=NAME\n", "\n# module purge && module load openmpi"]
        {
            assert!(script.text.contains(site), "{name}: {site}");
        }
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

/// The lines of each launcher's version.
const OPEN_MPI: &str = "mpirun (Open MPI) 5.0.7";
const MPICH: &str = "HYDRA build details:\n    Version: 4.0.2";
const OTHER: &str = "Intel(R) MPI Library for Linux* OS, Version 2021.10";

/// Launchers that print their arguments and environment, then `says`, and end with `code`.
struct Launchers<'a> {
    version: &'a str,
    /// The library that `ldd` finds in the binary.
    library: &'a str,
    says: &'a str,
    code: i32,
}

const LAUNCHERS: Launchers = Launchers { version: OPEN_MPI, library: "libmpi.so.40", says: "", code: 0 };

/// Runs a script as Slurm would.
fn run(script: &File, folder: &Path, launchers: &Launchers, environment: &[(&str, &str)]) -> (Option<i32>, String) {
    let bin = tempfile::tempdir().unwrap();
    let Launchers { version, library, says, code } = launchers;
    let launcher = format!(
        "[ \"$1\" != --version ] || {{ echo '{version}'; exit; }}\necho \"$(basename $0) $*\"\n\
         env | grep -E '^(UCX|OMPI|CUDA|NCCL)'\necho '{says}' >&2\nexit {code}"
    );
    let ldd = format!("echo '{library} => /usr/lib/{library}'");
    for (tool, text) in [("mpirun", &*launcher), ("srun", &launcher), ("ldd", &ldd), ("scontrol", "echo scontrol $*")] {
        let file = bin.path().join(tool);
        fs::write(&file, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let path = format!("{}:{}", bin.path().display(), std::env::var("PATH").unwrap());
    let mut command = Command::new("bash");
    command.arg(root().join(&script.name)).arg("job.steps=3").env("PATH", path);
    command.env("SLURM_SUBMIT_DIR", folder).env("RLHF_HPC", "/bin/true");
    command.env("SLURM_JOB_ID", "77").env("SLURM_NTASKS", "16").env("SLURM_CPUS_PER_TASK", "8");
    for (variable, _) in std::env::vars_os() {
        let name = variable.to_string_lossy();
        if ["UCX_", "OMPI_MCA_", "CUDA_", "NCCL_", "RLHF_JOB", "RLHF_LAUNCHER", "SLURM_MPI"]
            .iter()
            .any(|of| name.starts_with(of))
        {
            command.env_remove(variable);
        }
    }
    let output = command.envs(environment.iter().copied()).output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned())
}

fn line<'a>(text: &'a str, start: &str) -> &'a str {
    text.lines().find(|line| line.starts_with(start)).unwrap_or_else(|| panic!("{start}: {text}"))
}

#[test]
fn each_batch_script_starts_its_job_from_either_folder_and_requeues_itself() {
    for script in scripts() {
        let on_gpus = asked(&script).contains_key("gpus-per-node");
        for folder in [root(), root().join("jobs")] {
            let launchers = Launchers { code: 85, ..LAUNCHERS };
            let (code, said) = run(&script, &folder, &launchers, &[("NCCL_MAX_P2P_NCHANNELS", "16")]);
            let started = format!("/bin/true run {} job.steps=3", root().join(job_of(&script)).display());
            assert!(line(&said, "mpirun ").ends_with(&started), "{said}");
            assert_eq!((code, line(&said, "scontrol ")), (Some(85), "scontrol requeue 77"), "{said}");
            for variable in [
                "UCX_TLS=^cuda",
                "OMPI_MCA_opal_cuda_support=0",
                "OMPI_MCA_accelerator=null",
                "CUDA_DEVICE_MAX_CONNECTIONS=32",
            ] {
                assert_eq!(said.contains(variable), on_gpus, "{}: {variable}: {said}", script.name);
            }
            assert!(said.contains("NCCL_MAX_P2P_NCHANNELS=16"), "what the site has set stays: {said}");
        }
        let (code, said) = run(&script, &root(), &Launchers { code: 3, ..LAUNCHERS }, &[("RLHF_LAUNCHER", "srun")]);
        assert!(code == Some(3) && !said.contains("scontrol"), "{said}");
        assert_eq!(said.contains("NCCL_MAX_P2P_NCHANNELS=4"), on_gpus, "{said}");
    }
}

#[test]
fn a_batch_script_passes_only_options_that_the_launcher_of_its_mpi_knows() {
    let script = scripts().swap_remove(0);
    let mpirun = |version| run(&script, &root(), &Launchers { version, ..LAUNCHERS }, &[]).1;
    for version in [OPEN_MPI, "mpirun (Open MPI) 4.1.4"] {
        let said = mpirun(version);
        let options = line(&said, "mpirun -n 16 --bind-to none ");
        assert!(!options.contains(" -q "), "Open MPI 5 rejects it, and 4 then hides why a rank died: {said}");
    }
    for version in [MPICH, OTHER] {
        line(&mpirun(version), "mpirun -n 16 /bin/true run ");
    }
    for (library, environment, option) in [
        ("libmpi.so.40", None, "--mpi=pmix "),
        ("libmpich.so.12", None, "--mpi=pmi2 "),
        ("libmpi.so.12", None, "--mpi=pmi2 "),
        ("libmpi_cray.so.12", None, ""),
        ("libmpi.so.40", Some(("SLURM_MPI_TYPE", "pmix_v4")), ""),
    ] {
        let environment: Vec<(&str, &str)> = environment.into_iter().chain([("RLHF_LAUNCHER", "srun")]).collect();
        let (_, said) = run(&script, &root(), &Launchers { library, ..LAUNCHERS }, &environment);
        line(&said, &format!("srun --kill-on-bad-exit=1 --cpus-per-task=8 {option}/bin/true run "));
    }
    let (code, said) = run(&script, &root(), &LAUNCHERS, &[("RLHF_LAUNCHER", "mpiexec")]);
    assert!(code == Some(2) && said.contains("RLHF_LAUNCHER must be mpirun or srun (got mpiexec)"), "{said}");
}

/// What a launcher reports of a dead rank, its exit code, and the last line of the log with the script's exit code.
const DEATHS: [(&str, i32, &str, i32); 10] = [
    (
        "mpirun noticed that process rank 1 with PID 0 on node n7 exited on signal 9 (Killed).\n-----",
        137,
        "error: rank 1 (n7) was killed by signal 9 (SIGKILL), exit code 137; often the memory limit of the job",
        137,
    ),
    (
        "prterun noticed that process rank 12 with PID 5030 on node n7 exited on\nsignal 11 (Segmentation fault).\n-----",
        139,
        "error: rank 12 (n7) was killed by signal 11 (SIGSEGV), exit code 139",
        139,
    ),
    (
        "=   PID 52 RUNNING AT n7\n=   EXIT CODE: 9\n=====\nYOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\nThis",
        9,
        "error: a rank (process 52 on n7) was killed by signal 9 (SIGKILL), exit code 137; often the memory limit",
        137,
    ),
    (
        "=   RANK 3 PID 52 RUNNING AT n7\n=   KILLED BY SIGNAL: 11 (Segmentation fault)\n====",
        11,
        "error: rank 3 (n7) was killed by signal 11 (SIGSEGV), exit code 139",
        139,
    ),
    (
        "srun: error: n2: task 5: Killed\nsrun: error: n1: tasks 0-4: Terminated",
        143,
        "error: rank 5 (n2) was killed by signal 9 (SIGKILL), exit code 137; often the memory limit of the job",
        137,
    ),
    (
        "srun: error: n2: task 5: Segmentation fault (core dumped)",
        139,
        "error: rank 5 (n2) was killed by signal 11 (SIGSEGV), exit code 139",
        139,
    ),
    ("", 143, "error: a rank was killed by signal 15 (SIGTERM), exit code 143", 143),
    // Not every exit code above 128 comes from a signal.
    ("mpiexec: no proxy", 255, "error: the run ended with exit code 255; its own message is above", 255),
    ("error: row 7 is empty", 65, "error: the run ended with exit code 65; its own message is above", 65),
    ("step 3", 0, "step 3", 0),
];

#[test]
fn the_last_line_of_a_batch_log_names_the_rank_that_a_signal_killed() {
    let script = scripts().swap_remove(0);
    for (says, code, last, ends) in DEATHS {
        let (got, said) = run(&script, &root(), &Launchers { says, code, ..LAUNCHERS }, &[]);
        assert!(got == Some(ends) && said.contains(last), "{got:?}: {said}");
        assert!(says.lines().all(|line| said.contains(line)), "all output of the launcher passes: {said}");
    }
}
