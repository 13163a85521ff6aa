//! Sending a model to the rank that writes it, and input files that one rank reads for all.

use crate::Test;
use crate::checkpoints::Shared;
use crate::models::arch;
use crate::tensor_models::{eight_experts, hybrid_experts, latent, sinks};
use crate::weights::sharded;
use rlhf_hpc::comm::{Axes, Group, World, accounting};
use rlhf_hpc::data::Hashes;
use rlhf_hpc::device::Device;
use rlhf_hpc::error::Kind;
use rlhf_hpc::learn::Role;
use rlhf_hpc::mesh::Mesh;
use rlhf_hpc::model::collect::collect;
use rlhf_hpc::model::export::{Export, export};
use rlhf_hpc::model::load::ModelFiles;
use rlhf_hpc::model::partition::Shards;
use rlhf_hpc::model::{Arch, Head, TensorPart, init};
use rlhf_hpc::tensor::DType;
use serde_json::json;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub const TESTS: &[Test] = &[
    Test {
        name: "an export of any layout equals one rank's, and is sent only to its writer",
        ranks: &[4],
        check: exports,
    },
    Test {
        name: "one rank reads and hashes each input once, and its error is an error on all ranks",
        ranks: &[3],
        check: reads,
    },
];

/// Bytes that this rank has sent in collectives so far, except for agreements on errors.
fn given() -> [u64; 2] {
    let all = accounting();
    let sum =
        |is: &dyn Fn(&str) -> bool| all.iter().filter(|((_, op), _)| is(op)).map(|(_, totals)| totals.bytes).sum();
    [sum(&|op| op.starts_with("all_gather")), sum(&|op| op.starts_with("all_to_all"))]
}

/// Models that were loaded or made for any layout.
fn exports(world: &World) {
    let (n, seed) = (world.size, 7);
    let mesh = |data, sequence, tensor| Mesh { data, pipeline: 1, sequence, tensor, expert: 1 };
    let experts = |expert, mesh| Mesh { expert, ..mesh };
    let layouts = [
        (experts(n, mesh(n, 1, 1)), 3),
        (mesh(n / 2, 1, 2), 3),
        (experts(n / 2, mesh(1, n / 2, 2)), 1),
        (experts(2, mesh(n, 1, 1)), 3),
        (mesh(1, 1, n), 0),
        (Mesh { pipeline: 2, ..mesh(n / 2, 1, 1) }, 3),
        (Mesh { pipeline: 2, ..mesh(1, n / 2, 1) }, 2),
        (Mesh { pipeline: 2, ..mesh(1, 1, n / 2) }, 0),
        (experts(2, Mesh { pipeline: 2, ..mesh(n / 2, 1, 1) }), 1),
    ];
    // Embedding and head of the first dense model are sent in several pieces. The last one gets a new head.
    for (family, tied, head, dtype, vocabulary) in [
        ("qwen3_moe", false, Head::LanguageModel, DType::Bf16, 97),
        ("qwen3_next", false, Head::LanguageModel, DType::F32, 97),
        ("deepseek_v3", false, Head::LanguageModel, DType::Bf16, 97),
        ("gpt_oss", false, Head::LanguageModel, DType::F32, 97),
        ("llama", false, Head::LanguageModel, DType::F32, 33_001),
        ("qwen3", true, Head::LanguageModel, DType::Bf16, 97),
        ("llama", false, Head::Value, DType::F32, 97),
    ] {
        let mut keys = match family {
            "qwen3_moe" => eight_experts(),
            "qwen3_next" => hybrid_experts(),
            "deepseek_v3" => latent(),
            "gpt_oss" => sinks(),
            _ => json!({}),
        };
        (keys["vocab_size"], keys["tie_word_embeddings"]) = (vocabulary.into(), tied.into());
        let arch = arch(family, &keys);
        let root = Shared::new(world);
        let written = |name: &str| std::fs::read(root.path().join(name).join("model.safetensors")).expect("an export");
        let load = |axes: &Axes, stage| {
            let files = ModelFiles { dir: &root.path().join("made"), adapter: None, arch: &arch, head };
            Role::load(Device::Cpu, "actor", &files, None, dtype, seed, axes, stage).expect("loads")
        };
        if world.rank == 0 {
            let made = init::init(&arch, Head::LanguageModel, dtype, seed);
            export(&root.path().join("made"), &arch, &made, dtype, None).expect("writes");
            export(&root.path().join("whole"), &arch, &load(&Axes::one(), 0).weights, dtype, None).expect("writes");
        }
        world.group().barrier();
        for (i, (mesh, stage)) in layouts.iter().enumerate() {
            let axes = Axes::split_mesh(&world.group(), mesh);
            let mut roles = vec![load(&axes, *stage)];
            if head == Head::LanguageModel {
                let made = init::init_on(Device::Cpu, &arch, head, dtype, seed, TensorPart::from_group(&axes.tensor));
                let shards = Shards::new(&made.table, &axes, *stage);
                roles.push(Role::new("actor", Path::new(""), &arch, sharded(&made, &shards), &axes));
            }
            for (j, role) in roles.iter().enumerate() {
                let name = format!("layout-{i}-{j}");
                export_to(world, &arch, role, &axes, dtype, &root.path().join(&name));
                let is_same = world.rank > 0 || written(&name) == written("whole");
                assert!(is_same, "{family} {head:?} {dtype:?}, {mesh} at stage {stage}");
            }
        }
    }
}

fn export_to(world: &World, arch: &Arch, role: &Role, axes: &Axes, dtype: DType, dir: &Path) {
    let begin = || Export::begin(dir, arch, &Arc::new(role.whole()), dtype, None).expect("begins");
    let mut out = (world.rank == 0).then(begin);
    let before = given();
    collect(arch, &role.weights, axes, |parameter, rows| {
        let out = out.as_mut().expect("other ranks receive nothing");
        out.rows(parameter, rows).expect("writes");
    });
    let [gathered, sent] = [0, 1].map(|i| given()[i] - before[i]);
    assert_eq!(gathered, 0, "nothing goes to all ranks");
    // Panels of which a rank has only some rows are sent as a whole.
    let held = 2 * role.weights.bytes() as u64 + (1 << 16);
    assert!(sent <= held, "rank {}: {sent} bytes sent, about {held} held", world.rank);
    if let Some(out) = out {
        out.commit().expect("commits");
    }
}

/// Bytes that this process has asked the system to read.
fn read_so_far() -> u64 {
    let text = std::fs::read_to_string("/proc/self/io").expect("Linux has /proc/self/io");
    text.lines().find_map(|line| line.strip_prefix("rchar: ")?.parse().ok()).expect("a number")
}

fn reads(world: &World) {
    const BYTES: usize = 1 << 20;
    let (root, group) = (Shared::new(world), world.group());
    let paths: Vec<PathBuf> = (0..5).map(|i| root.path().join(format!("rows-{i}.jsonl"))).collect();
    if world.rank == 0 {
        paths.iter().zip(0u8..).for_each(|(path, i)| std::fs::write(path, vec![i; BYTES]).expect("writes"));
    }
    group.barrier();
    // Each start uses the hashes saved by the previous one.
    let cache = root.path().join("inputs.json");
    for files_read in [paths.len(), 0] {
        let (mut hashes, before) = (Hashes::read(&cache), read_so_far());
        let found = hashes.hash_files(&paths, &group).expect("they are there");
        let mut read = [(read_so_far() - before) as f64];
        group.all_reduce_sum_f64(&mut read);
        let least = files_read * BYTES;
        assert!(read[0] >= least as f64 && read[0] < (least + BYTES / 2) as f64, "{} of {least} bytes read", read[0]);
        assert_eq!(hashes.read_bytes, least as u64);
        let different: HashSet<&str> = found.values().map(|file| file.xxh3.as_str()).collect();
        assert_eq!(different.len(), paths.len(), "files of other bytes");
        let alone = Hashes::default().hash_files(&paths, &Group::one()).expect("they are there");
        assert_eq!(found, alone, "the same on any number of ranks");
        if world.rank == 0 {
            hashes.save(&cache).expect("writes");
        }
        group.barrier();
    }
    if world.rank == 0 {
        std::fs::remove_file(&paths[1]).expect("there");
    }
    group.barrier();
    // The smallest one is last.
    let reader = format!("rank {} (", (paths.len() - 1) % world.size);
    let error = Hashes::default().hash_files(&paths, &group).expect_err("a file is gone");
    assert_eq!(error.kind, Kind::Io);
    assert!(error.message.starts_with(&reader) && error.message.contains("rows-1.jsonl"), "{error}");
}
