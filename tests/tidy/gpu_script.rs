//! `tests/gpu.sh`, which runs on machines with a GPU: the most informative parts come first.

use super::source::root;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

/// The log lines of the scripts that replace its programs: their names and arguments.
const LOGGED: &str = "#!/bin/bash\necho \"$(basename \"$0\") $*\" >>\"$LOGGED\"\n";

/// Calls in their order, each by words of its line.
const ORDER: [&str; 13] = [
    "rlhf-hpc info --kernels",
    "kernels matmul:: ",
    "rlhf-hpc ppo.toml",
    "rlhf-hpc bench cuda --part products",
    "rlhf-hpc bench cuda --part attention",
    "rlhf-hpc bench cuda --part decode",
    "rlhf-hpc bench cuda --part train",
    "ncu ",
    "mpirun ",
    "compute-sanitizer --tool=racecheck",
    "compute-sanitizer --tool=synccheck",
    "kernels rope:: ",
    "kernels far:: ",
];

#[test]
fn gpu_sh_measures_gemm_rates_first_and_tests_far_tensors_last() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let write = |name: &str, text: &str| {
        fs::create_dir_all(at(name).parent().unwrap()).unwrap();
        fs::write(at(name), text).unwrap();
        fs::set_permissions(at(name), fs::Permissions::from_mode(0o755)).unwrap();
    };
    let info = "[ \"$*\" != info ] || echo 'cuda       driver of CUDA 13.0, 1 GPUs'\n";
    let list = "[ \"$1\" != --list ] || printf '%s::a: test\\n' far rope matmul run_loss\n";
    for (name, more) in [
        ("rlhf-hpc", info),
        ("bin/kernels", list),
        ("mpirun", ""),
        ("bin/rlhf-hpc", ""),
        ("tools/ncu", ""),
        ("tools/compute-sanitizer", ""),
        ("tools/python3", "exit 1\n"),
    ] {
        write(name, &format!("{LOGGED}{more}"));
    }
    write("quickstart/ppo.toml", "");
    write("environment.sh", "");
    for script in ["gpu.sh", "gpu_verbs.sh"] {
        fs::copy(root().join("tests").join(script), at(script)).unwrap();
    }
    let path = format!("{}:{}", at("tools").display(), std::env::var("PATH").unwrap());
    let mut command = Command::new("bash");
    command.arg(at("gpu.sh")).arg(at("report.md")).env("PATH", path).env("LOGGED", at("logged"));
    let output = command.output().unwrap();
    let (logged, said) = (fs::read_to_string(at("logged")).unwrap(), String::from_utf8_lossy(&output.stdout));
    let place = |words: &&str| logged.lines().position(|line| line.starts_with(*words));
    let places: Vec<Option<usize>> = ORDER.iter().map(place).collect();
    assert!(places.iter().all(Option::is_some) && places.is_sorted(), "{places:?} in\n{logged}\n{said}");
    let kernels: Vec<&str> = logged.lines().filter(|line| line.starts_with("ncu ")).collect();
    assert_eq!(kernels.len(), 6, "{kernels:?}");
    assert!(fs::read_to_string(at("report.md")).unwrap().contains("## Tensors beyond 2^32 values"), "{said}");
}
