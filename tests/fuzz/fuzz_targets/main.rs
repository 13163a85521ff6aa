//! Fuzz targets for every parser of files that come from elsewhere. `TARGET` selects one of `TARGETS`:
//!
//! ```text
//! TARGET=parquet cargo +nightly fuzz run --fuzz-dir tests/fuzz foreign
//! ```
//!
//! `tests/fuzz/run.sh TARGET INPUTS` does the same without cargo-fuzz on a stable toolchain, and needs a C++ compiler.
//! Seeds are part of each target; files with new coverage are kept in `corpus/TARGET`, failing inputs in `artifacts`.
//!
//! A target fails if it panics, crashes, or exceeds libFuzzer's limits of time and memory. A panic that the program
//! itself turns into an error of the file is none. No target is part of CI.

#![no_main]

mod checkpoint;
mod image;
mod job;
mod model;
mod place;
mod recorded;
mod rows;
mod shard;
mod template;
mod tokenizer;

use libfuzzer_sys::fuzz_target;
use rlhf_hpc::comm::abort;
use std::sync::OnceLock;

/// A parser and some good inputs of it.
struct Target {
    name: &'static str,
    run: fn(&[u8]),
    seeds: fn() -> Vec<Vec<u8>>,
}

const TARGETS: &[Target] = &[
    Target { name: "arrow", run: rows::arrow, seeds: rows::arrow_seeds },
    Target { name: "checkpoint", run: checkpoint::run, seeds: checkpoint::seeds },
    Target { name: "image", run: image::run, seeds: image::seeds },
    Target { name: "job", run: job::run, seeds: job::seeds },
    Target { name: "json", run: rows::json, seeds: rows::json_seeds },
    Target { name: "jsonl", run: rows::jsonl, seeds: rows::jsonl_seeds },
    Target { name: "metrics", run: recorded::metrics, seeds: recorded::metrics_seeds },
    Target { name: "model", run: model::config, seeds: model::config_seeds },
    Target { name: "parquet", run: rows::parquet, seeds: rows::parquet_seeds },
    Target { name: "recorded", run: recorded::run, seeds: recorded::seeds },
    Target { name: "safetensors", run: model::tensors, seeds: model::tensors_seeds },
    Target { name: "shard", run: shard::run, seeds: shard::seeds },
    Target { name: "template", run: template::run, seeds: template::seeds },
    Target { name: "tokenizer", run: tokenizer::run, seeds: tokenizer::seeds },
];

static TARGET: OnceLock<&Target> = OnceLock::new();

/// Finds the target. With `SEEDS`, writes its seeds to that directory and ends.
fn start() {
    let name = std::env::var("TARGET").unwrap_or_default();
    let Some(target) = TARGETS.iter().find(|target| target.name == name) else {
        let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
        eprintln!("TARGET must be one of {}", names.join(" "));
        std::process::exit(2);
    };
    if let Some(folder) = std::env::var_os("SEEDS") {
        std::fs::create_dir_all(&folder).expect("a directory of seeds");
        for (i, seed) in (target.seeds)().iter().enumerate() {
            std::fs::write(std::path::Path::new(&folder).join(format!("seed-{i}")), seed).expect("a seed");
        }
        std::process::exit(0);
    }
    // A panic that the program catches is an error of the file. libFuzzer's hook, which ends the process, gets others.
    abort::install_errors();
    assert!(TARGET.set(target).is_ok(), "it starts once");
}

fuzz_target!(init: start(), |data: &[u8]| (TARGET.get().expect("the target is known").run)(data));
