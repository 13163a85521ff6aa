//! The verbs: their help, and the errors for unknown ones; and the libraries that the binary needs.

use super::fixture::Fixture;
use rlhf_hpc::cli::verbs;
use std::path::Path;
use std::process::Command;

fn run(arguments: &[&str]) -> crate::process::Ended {
    super::command::run(Path::new("/"), arguments)
}

#[test]
fn help_lists_every_verb_and_each_verb_explains_itself() {
    for arguments in [&["--help"][..], &["-h"], &[]] {
        let help = run(arguments).well().stdout;
        for verb in verbs() {
            assert!(help.lines().any(|line| line.trim_start().starts_with(verb)), "{verb} is not in {help}");
        }
    }
    for verb in verbs() {
        for ask in ["--help", "-h"] {
            let ended = run(&[verb, ask]).well();
            assert!(ended.stdout.starts_with(&format!("Usage: rlhf-hpc {verb}")), "{}", ended.stdout);
            assert!(ended.stdout.len() > 100 && ended.stderr.is_empty(), "{}", ended.stdout);
        }
        assert!(run(&["help", verb]).well().stdout.starts_with(&format!("Usage: rlhf-hpc {verb}")));
    }
}

#[test]
fn the_version_is_that_of_the_package() {
    for ask in ["--version", "-V"] {
        assert_eq!(run(&[ask]).well().stdout.trim(), format!("rlhf-hpc {}", env!("CARGO_PKG_VERSION")));
    }
}

/// Command lines, the exit code, and fragments of the error and of its hint.
const REFUSED: &[(&str, i32, &[&str], &str)] = &[
    ("migrate x.sh", 2, &["x.sh does not exist"], ""),
    ("genrate --model m", 2, &["`genrate` is neither a verb"], "`generate`"),
    ("exprot x", 2, &["`exprot`"], "`export`"),
    ("help troubel", 2, &["there is no page, verb or key `troubel`"], "did you mean `trouble`?"),
    ("help nothing-like-it", 2, &["no page, verb or key `nothing-like-it`"], "`rlhf-hpc help` lists the pages"),
    // Options that are missing, unknown or contradict each other.
    ("generate --model m", 2, &["--input"], ""),
    ("shard x.jsonl", 2, &["--tokenizer", "--out"], ""),
    ("run", 2, &["job"], ""),
    ("bench nonsense", 2, &["bench has no suite `nonsense`"], "kernels, rollout"),
    ("generate --model m --input f --samples many", 2, &["--samples", "many"], ""),
    ("generate --model m --input f --dtype int4", 2, &["--dtype", "int4", "bf16"], ""),
    ("generate --model m --input f --beams 0", 2, &["--beams must be at least 1", "(got 0)"], ""),
    ("generate --model m --input f --beams 2 --samples 3", 2, &["--samples must be at most --beams = 2 (got 3)"], ""),
    ("generate --model m --input f --beams 2 --early-stopping no", 2, &["--early-stopping", "never"], ""),
    (
        "generate --model m --input f --beams 2 --length-penalty inf",
        2,
        &["--length-penalty must be a finite number (got inf)"],
        "",
    ),
    (
        "generate --model m --input f --beams 2 --top-p 0.9",
        2,
        &["--top-p does not apply to a beam search"],
        "leave out",
    ),
    ("generate --model m --input f --length-penalty 2", 2, &["--length-penalty needs a beam search"], "--beams"),
    ("generate --model m --prompt a --beams 2", 2, &["--prompt prints plain text only", "--beams"], "--input"),
    ("generate --model m --prompt a --top-logprobs 2", 2, &["--prompt prints plain text only"], "--input"),
    ("generate --model m --input f --logit-bias 5", 2, &["--logit-bias", "must be a JSON object"], ""),
    (
        "generate --model model --input f --logit-bias {\"a\":\"b\"}",
        2,
        &["--logit-bias: ", "must be a finite number"],
        "",
    ),
    (
        "shard rows.jsonl --tokenizer model --out x --split-field split --split-ratio 0.1",
        2,
        &["--split-field, --split-ratio and --split-test exclude each other"],
        "",
    ),
    (
        "shard rows.jsonl --tokenizer model --out x --split-ratio 1.5",
        2,
        &["--split-ratio must be between 0 and 1", "(got 1.5)"],
        "",
    ),
    ("shard --tokenizer model --out x", 2, &["at least one input file"], ""),
    ("tokenizer rows.jsonl --vocabulary 10 --out x", 2, &["10"], ""),
    ("jobs copy grppo", 2, &["no recipe `grppo`"], "`grpo`"),
    ("jobs copy nothing-like-it", 2, &["no recipe"], "recipes: sft, "),
    ("jobs copy sft --to job.toml", 2, &["job.toml exists already"], "--to"),
    // Inputs that do not exist.
    ("generate --model model --input nosuch", 74, &["cannot", "nosuch", "No such file"], ""),
    ("logprobs --model model --input nosuch", 74, &["cannot", "nosuch", "No such file"], ""),
    ("shard nosuch --tokenizer model --out x", 74, &["cannot", "nosuch", "No such file"], ""),
    ("tokenizer nosuch --vocabulary 300 --out x", 74, &["cannot", "nosuch", "No such file"], ""),
    ("init --config nosuch --out x", 74, &["cannot", "nosuch", "No such file"], ""),
    ("export nosuch --out x", 65, &["nosuch has no checkpoint"], "manifest.json"),
    ("report nosuch --out x", 2, &["nosuch is not a directory"], "job.dir"),
    ("report model --out x", 65, &["model has no metrics.jsonl"], "run directory"),
    ("report --out x", 2, &["at least one run directory"], ""),
    ("samples nosuch", 2, &["nosuch is not a directory"], "job.dir"),
    ("samples model", 65, &["model has no recorded samples"], "metrics.rollouts_every_steps"),
    ("samples model --best 1 --worst 1", 2, &["--worst, --best and --prompt exclude each other"], ""),
];

#[test]
fn an_invalid_command_line_is_rejected_with_the_cause() {
    let fixture = Fixture::new();
    for (line, code, words, hint) in REFUSED {
        fixture.run(&line.split(' ').collect::<Vec<_>>()).refused(*code, words).hinted(hint);
    }
    for verb in verbs() {
        run(&[verb, "--nonsense"]).refused(2, &["--nonsense"]).hinted("rlhf-hpc VERB --help");
    }
    assert!(!fixture.path("x").exists());
}

#[test]
fn info_describes_this_machine_and_this_binary() {
    let info = run(&["info"]).well().stdout;
    let libraries = ["rlhf-hpc", "mpi", "cuda", "carried", "nvrtc", "cublaslt", "nccl"];
    let machine = ["kernels", "cpu", "memory", "world      1 rank", "threads"];
    for word in libraries.iter().chain(&machine) {
        assert!(info.contains(word), "{word} is not in\n{info}");
    }
}

#[test]
fn without_a_driver_info_reports_why_the_cpu_is_used() {
    // SAFETY: the driver's initialisers have no requirements for the process that opens it.
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
fn info_shows_the_resources_of_kernels_if_nvcc_reported_them() {
    match rlhf_hpc::device::cuda::embedded::resources() {
        Ok(table) => assert_eq!(run(&["info", "--kernels"]).well().stdout, table),
        Err(why) => drop(run(&["info", "--kernels"]).refused(2, &[&why, "RLHF_NVCC"])),
    }
}

/// Shared libraries that the binary itself needs. `ldd` would also list the dependencies of the site's libmpi, which
/// differ between sites.
fn needed() -> Vec<String> {
    let binary = env!("CARGO_BIN_EXE_rlhf-hpc");
    let out = Command::new("readelf").args(["-d", "--wide", binary]).output().expect("readelf (Debian: binutils)");
    let text = String::from_utf8(out.stdout).expect("text");
    let names = text.lines().filter(|line| line.contains("(NEEDED)"));
    names.map(|line| line.split(['[', ']']).nth(1).expect("a name in brackets").to_owned()).collect()
}

#[test]
fn the_binary_links_only_to_mpi_and_the_libc_libraries() {
    let libc = ["libc.so.", "libm.so.", "libgcc_s.so.", "libpthread.so.", "libdl.so.", "librt.so.", "ld-linux"];
    let needed = needed();
    let (mpi, others): (Vec<_>, Vec<_>) = needed.iter().partition(|name| name.starts_with("libmpi.so."));
    assert_eq!(mpi.len(), 1, "{needed:?}");
    assert!(!others.is_empty(), "{needed:?}");
    for name in others {
        assert!(libc.iter().any(|stem| name.starts_with(stem)), "{name} is needed, besides {needed:?}");
    }
}
