//! The way to a real GPU, over a driver that is played on the CPU (`driver/played.cpp`): the same facts, in a process of their own.

use crate::jobs::{CONFIG, metrics, prepare};
use crate::run_decode::TELLING;
use crate::{carried, faults};
use rlhf_hpc::device::cuda::carried::{CUBINS, units};
use sha2::{Digest, Sha256};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A directory that holds the played libcuda.so.1, under the name of libnvidia-ml.so.1 too.
pub fn library() -> PathBuf {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernels/driver");
    let source = sources.join("played.cpp");
    let texts = ["played.cpp", "cubin.h", "streams.h", "graphs.h", "spoils.h", "../emulation/failing.h"]
        .map(|name| fs::read(sources.join(name)).expect("the played driver"));
    let key = texts.iter().fold(Sha256::new(), Sha256::chain_update).finalize();
    let key = u64::from_le_bytes(key[..8].try_into().expect("eight bytes"));
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("driver-{key:016x}"));
    let library = dir.join("libcuda.so.1");
    if !library.exists() {
        fs::create_dir_all(&dir).expect("a directory");
        let made = tempfile::NamedTempFile::new_in(&dir).expect("a file").into_temp_path();
        let mut command = Command::new("g++");
        command.args(["-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-o"]);
        let status = command.arg(&made).arg(&source).status().expect("g++ is needed");
        assert!(status.success(), "{command:?}: {status}");
        // Another fact may have been faster.
        let _ = fs::copy(&made, dir.join("libnvidia-ml.so.1"));
        made.persist(&library).expect("a library");
    }
    dir
}

/// A program where the played driver is the machine's. `cuda` is the newest that it knows: 12020 is 12.2.
pub fn command(program: &str, cuda: &str, cache: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.env("LD_LIBRARY_PATH", library()).env("PLAYED_CUDA", cuda).env("XDG_CACHE_HOME", cache);
    command.env("PLAYED_KERNELS", faults::played()).env("RLHF_HPC_KERNELS", "gpu");
    command.env("RLHF_CUBLASLT_LIB", faults::played()).args(args);
    command
}

/// What a program writes there, and whether it succeeds.
fn said(command: &mut Command) -> (bool, String) {
    let out = command.output().expect("it starts");
    let text = [out.stdout, out.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    (out.status.success(), text)
}

fn written(command: &mut Command) -> String {
    let (succeeds, text) = said(command);
    assert!(succeeds, "{command:?}\n{text}");
    text
}

fn under(program: &str, cuda: &str, cache: &Path, args: &[&str]) -> String {
    written(&mut command(program, cuda, cache, args))
}

fn this() -> String {
    std::env::current_exe().expect("a test has a program").into_os_string().into_string().expect("a path is text")
}

/// The same in a directory of its own that holds the cache, too: what the program writes, and what it asks of the driver, a word
/// and a number each.
fn observed(dir: &Path, program: &str, args: &[&str]) -> (String, Vec<(String, usize)>) {
    let asked = dir.join("asked");
    let _ = fs::remove_file(&asked);
    let mut command = command(program, "13000", &dir.join("cache"), args);
    let text = written(command.current_dir(dir).env("PLAYED_LOG", &asked));
    let line = |line: &str| {
        let (word, number) = line.split_once(' ').expect("two words");
        (word.to_owned(), number.parse().expect("a number"))
    };
    (text, fs::read_to_string(&asked).expect("what was asked for").lines().map(line).collect())
}

/// A driver takes nothing but machine code, so there must be a compiler of CUDA, now or when this was built.
pub fn is_there_machine_code() -> bool {
    !CUBINS.is_empty() || carried::nvrtc().is_some()
}

/// A directory with a cache of cubins, which spares all but one compilation.
pub fn directory() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a directory");
    let cache = dir.path().join("cache");
    fs::create_dir(&cache).expect("a directory");
    if CUBINS.is_empty() {
        let nvrtc = carried::nvrtc().expect("one of the two is there");
        carried::all_but_one(&carried::compiled(&nvrtc, "sm_80"), &cache.join("rlhf-hpc"));
    }
    dir
}

/// What a process needs to find the played driver, its kernels, and the cache in `dir`.
pub fn environment(dir: &Path) -> Vec<(String, PathBuf)> {
    let set = [
        ("LD_LIBRARY_PATH", library()),
        ("PLAYED_CUDA", "13000".into()),
        ("PLAYED_KERNELS", faults::played()),
        ("XDG_CACHE_HOME", dir.join("cache")),
    ];
    set.map(|(name, value)| (name.to_string(), value)).to_vec()
}

/// Runs facts of this target whose names hold one of `names`, at least `least`, over the driver, where there is machine code.
pub fn facts_over_the_driver(names: &[&str], least: usize) {
    if is_there_machine_code() {
        facts(names, least);
    }
}

/// Runs facts of this target, at least `least`, on the played driver. What they asked of it.
fn facts(names: &[&str], least: usize) -> Vec<(String, usize)> {
    let (text, asked) = observed(directory().path(), &this(), names);
    let passed = text.split(" passed").next().and_then(|before| before.split_whitespace().next_back());
    assert!(passed.and_then(|n| n.parse::<usize>().ok()).is_some_and(|n| n >= least), "{text}");
    asked
}

#[test]
fn the_facts_of_the_played_gpu_are_those_of_the_driver() {
    let decoding = ["decode::rows_go_on", "rollout::stop_texts", "rollout::steps_that_repeat"];
    // Biases lie there as close to each other as the memory's owner lets them.
    let rooms = ["graph::", "residual::", "visit::", "fast::every_product_of_the_model"];
    facts_over_the_driver(&[&rooms[..], &decoding].concat(), 18);
}

/// Of what the driver was asked for, what comes between the launches of one graph and the next, but for the last.
fn steps(asked: &[(String, usize)]) -> Vec<Vec<(&str, usize)>> {
    let after_graphs = asked.split(|(word, _)| word == "graph").skip(1);
    let mut steps: Vec<Vec<(&str, usize)>> =
        after_graphs.map(|step| step.iter().map(|(word, number)| (word.as_str(), *number)).collect()).collect();
    steps.pop();
    steps
}

#[test]
fn a_step_of_decoding_is_one_launch_and_its_draws_are_read_while_the_next_one_runs() {
    if !is_there_machine_code() {
        return;
    }
    let by_graphs = facts(&["rollout::forty_tokens_by_graphs", "--exact"], 1);
    let steps = steps(&by_graphs);
    assert_eq!(steps.len(), 38, "the first token is drawn behind the prompt");
    let mut last = None;
    for (i, step) in steps.iter().enumerate() {
        let words: Vec<&str> = step.iter().map(|(word, _)| *word).collect();
        let uploads = step.iter().filter(|(word, _)| *word == "upload").count();
        // Behind its graph: four rows of 16 bytes, and the mark behind them. Then the host waits for the mark of the step
        // before, while this one runs.
        assert_eq!(step[..1], [("download", 64)], "step {i}: {words:?}");
        let mark = step[1].1;
        assert_eq!(words[1], "record");
        match last {
            None => assert_eq!(words.len(), 2, "the first step is not waited for: {words:?}"),
            Some(last) => {
                assert_eq!(step[2], ("wait", last), "step {i}: {words:?}");
                assert_eq!(words.len(), 3 + uploads, "step {i}: {words:?}");
            }
        }
        // A page is 32 tokens: a row comes to a new one at most twice in forty.
        assert!(step.iter().all(|(word, number)| *word != "upload" || *number == 16), "step {i}: {step:?}");
        last = Some(mark);
    }
    let uploads = steps.iter().flatten().filter(|(word, _)| *word == "upload").count();
    assert!((1..=8).contains(&uploads), "{uploads} uploads in 38 steps");
    let ordinary = facts(&["rollout::forty_tokens_by_ordinary_steps", "--exact"], 1);
    let count = |asked: &[(String, usize)], word: &str| asked.iter().filter(|(of, _)| of == word).count();
    let words = ["graph", "launch", "upload", "download", "wait", "allocate"];
    let counted = |asked: &[(String, usize)]| words.map(|word| format!("{word} {}", count(asked, word))).join(", ");
    eprintln!("40 tokens of 4 rows by graphs: {}\nby ordinary steps: {}", counted(&by_graphs), counted(&ordinary));
    assert!(count(&ordinary, "launch") > 10 * count(&by_graphs, "launch"));
    assert_eq!(count(&ordinary, "graph"), 0);
}

#[test]
fn a_whole_ppo_job_decodes_by_graphs_and_its_log_probabilities_are_those_of_training() {
    if !is_there_machine_code() {
        return;
    }
    let dir = directory();
    let at = dir.path();
    prepare(at, CONFIG);
    let binary = env!("CARGO_BIN_EXE_rlhf-hpc");
    for (job, sets) in [("graphs", "rollout.graphs=true"), ("ordinary", "rollout.graphs=false")] {
        let args = ["run", "ppo.toml", "model.actor=model", &format!("job.dir={job}"), sets];
        let (_, asked) = observed(at, binary, &args);
        let graphs = asked.iter().filter(|(word, _)| word == "graph").count();
        assert!(if job == "graphs" { graphs >= 10 } else { graphs == 0 }, "{job}: {graphs} graphs");
    }
    let (by_graphs, ordinary) = (metrics(at, "graphs"), metrics(at, "ordinary"));
    assert_eq!((by_graphs.len(), ordinary.len()), (2, 2));
    for (a, b) in by_graphs.iter().zip(&ordinary) {
        assert_eq!(a["logprob_gap_max"].as_f64(), Some(0.0), "{a}");
        for key in TELLING {
            assert!(a[key].is_number() && a[key] == b[key], "{key}: {a} against {b}");
        }
    }
}

/// Facts about values that come and go are known to look: they fail on a GPU whose streams do not wait for each other, and
/// hold on one whose copies are early.
#[test]
fn streams_that_do_not_wait_are_noticed_and_copies_may_be_as_early_as_they_like() {
    if CUBINS.is_empty() {
        return;
    }
    let cache = tempfile::tempdir().expect("a directory");
    let facts = ["visit::"];
    let (hold, text) = said(command(&this(), "13000", cache.path(), &facts).env("PLAYED_EARLY", "1"));
    assert!(hold && text.contains(" 3 passed"), "{text}");
    for (fact, fault) in [
        ("visit::values_come_back", "PLAYED_HASTY"),
        ("visit::updates_of_state", "PLAYED_HASTY"),
        ("visit::kernels_go_on", "PLAYED_HASTY"),
        // Memory that is taken again before the copy of what it held has ended.
        ("visit::kernels_go_on", "PLAYED_FORGETS"),
    ] {
        let (holds, text) = said(command(&this(), "13000", cache.path(), &[fact]).env(fault, "1"));
        assert!(!holds && text.contains("running 1 test"), "{fact} passes with {fault}:\n{text}");
    }
}

fn line<'a>(text: &'a str, name: &str) -> &'a str {
    text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name} in\n{text}"))
}

#[test]
fn info_shows_the_gpus_and_takes_the_cubins_that_the_binary_carries() {
    if CUBINS.is_empty() {
        return;
    }
    let cache = tempfile::tempdir().expect("a directory");
    let text = under(env!("CARGO_BIN_EXE_rlhf-hpc"), "13000", cache.path(), &["info"]);
    assert_eq!(line(&text, "cuda"), "cuda       driver of CUDA 13.0, 2 GPUs");
    assert_eq!(line(&text, "loaded"), "loaded     the binary's cubins for sm_80");
    let gpu = "GPU 1 at 0000:af:00.0: Played GPU, 1.0 GiB, 108 multiprocessors, capability 8.0, NUMA node unknown";
    let lt = format!("cublaslt   12.8.3 ({})", faults::played().display());
    assert_eq!(line(&text, "cublaslt"), lt);
    assert!(text.contains(gpu) && text.contains(", GPU 0 at 0000:3b:00.0\n"), "{text}");
    assert_eq!(fs::read_dir(cache.path()).expect("a directory").count(), 0, "nothing was compiled");
}

#[test]
fn what_keeps_a_gpu_away_is_named_with_what_to_do() {
    if CUBINS.is_empty() {
        return;
    }
    let cache = tempfile::tempdir().expect("a directory");
    let played = |args: &[&str], name: &str, value: &str| {
        said(command(env!("CARGO_BIN_EXE_rlhf-hpc"), "13000", cache.path(), args).env(name, value))
    };
    // A status that is newer than what this binary was built with is told by its number.
    let (_, text) = played(&["info"], "PLAYED_STATUS", "911");
    assert!(line(&text, "cuda").contains("none: the driver does not start: cuInit: status 911;"), "{text}");
    // Calls of the stub answer with a status of which it knows no words.
    let (_, text) = played(&["info"], "PLAYED_STATUS", "34");
    let why = "cuda       none: the driver does not start: the libcuda.so that is found first is the stub";
    assert!(line(&text, "cuda").starts_with(why) && text.contains("LD_LIBRARY_PATH"), "{text}");
    let (starts, text) = played(&["bench", "cuda", "--small"], "PLAYED_MODE", "3");
    let why = "cuDevicePrimaryCtxRetain: CUDA_ERROR_DEVICE_UNAVAILABLE";
    assert!(!starts && text.contains(why) && text.contains("the compute mode of GPU 0 is exclusive"), "{text}");
}

/// As the real ones are where no kernel module is loaded (535), too old (450), or not for this machine.
#[test]
fn a_driver_without_a_gpu_without_a_function_or_of_another_machine_leaves_the_cpu() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = dir.path();
    let cuda = |libraries: &Path, status: &str| {
        let mut info = command(env!("CARGO_BIN_EXE_rlhf-hpc"), "13000", at, &["info"]);
        let text = written(info.env("LD_LIBRARY_PATH", libraries).env("PLAYED_STATUS", status));
        line(&text, "cuda").strip_prefix("cuda       none: ").unwrap_or_else(|| panic!("{text}")).to_owned()
    };
    let why = cuda(&library(), "100");
    assert!(why.starts_with("the driver shows no GPU: ") && why.ends_with("; computing on the CPU"), "{why}");
    let old = at.join("libcuda.so.1");
    fs::write(at.join("old.c"), "int cuInit(unsigned flags) { return flags; }\n").expect("a source");
    let mut compiler = Command::new("gcc");
    let status =
        compiler.args(["-shared", "-fPIC", "-o"]).arg(&old).arg(at.join("old.c")).status().expect("gcc is needed");
    assert!(status.success(), "{compiler:?}: {status}");
    let why = cuda(at, "0");
    assert!(
        why.starts_with("the driver is older than that of CUDA 11.4 (470), it lacks cuDriverGetVersion, "),
        "{why}"
    );
    assert!(why.contains("cuGraphUpload") && !why.contains("cuInit"), "{why}");
    fs::write(&old, "no library").expect("a file");
    let why = cuda(at, "0");
    assert!(why.starts_with("libcuda.so.1 is no driver for this machine: ") && why.contains("too short"), "{why}");
}

#[test]
fn a_cublaslt_of_a_later_cuda_than_the_driver_is_not_taken() {
    let cache = tempfile::tempdir().expect("a directory");
    let lt = |cuda| {
        let mut info = command(env!("CARGO_BIN_EXE_rlhf-hpc"), cuda, cache.path(), &["info"]);
        let text = written(info.env("RLHF_NVRTC", "/nowhere/libnvrtc.so"));
        line(&text, "cublaslt").strip_prefix("cublaslt   ").expect("its name").to_owned()
    };
    let path = faults::played().display().to_string();
    assert_eq!(lt("12000"), format!("12.8.3 ({path})"));
    let why = format!("none: {path}: it is 12.8.3, and the driver of CUDA 11.8; products on a GPU are exact");
    assert_eq!(lt("11080"), why);
}

#[test]
fn a_driver_that_refuses_the_cubins_gets_those_of_nvrtc_and_the_next_start_finds_them() {
    let Some(nvrtc) = carried::nvrtc() else { return };
    let (major, minor) = nvrtc.version;
    // Cubins of CUDA 13 are of ABI 8, and no driver of CUDA 12 takes them.
    let carried_fits = CUBINS.iter().all(|cubin| cubin.bytes[8] < 8) && !CUBINS.is_empty();
    if carried_fits || major > 12 {
        return;
    }
    let (cache, all) = (tempfile::tempdir().expect("a directory"), units().count());
    carried::all_but_one(&carried::compiled(&nvrtc, "sm_80"), &cache.path().join("rlhf-hpc"));
    for compiled in [1, 0] {
        let text = under(env!("CARGO_BIN_EXE_rlhf-hpc"), "12020", cache.path(), &["info"]);
        let (loaded, kept) = (line(&text, "loaded"), all - compiled);
        let counts = format!("for sm_80: {compiled} sources compiled now, {kept} taken from the disk");
        assert!(
            loaded.starts_with(&format!("loaded     NVRTC {major}.{minor}")) && loaded.contains(&counts),
            "{loaded}"
        );
        let lt = format!("cublaslt   12.8.3 ({})", faults::played().display());
        assert_eq!(line(&text, "cublaslt"), lt);
        let why = if CUBINS.is_empty() { "carries no cubins" } else { "CUDA_ERROR_INVALID_IMAGE" };
        assert!(loaded.contains(why), "{loaded}");
    }
}
