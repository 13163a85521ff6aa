//! `bench cuda`: the kernels on a GPU, compared with the best copy and GEMM of the same GPU, and with their targets.

mod attention;
mod bench;
mod decode;
mod products;
mod streaming;
mod train;

use super::args::Args;
use crate::cli::out::say;
use crate::comm::World;
use crate::comm::gpus;
use crate::device::cuda::{self, Gpu, Memory, devices, fast};
use crate::error::{self, Error};
use crate::plan;
use bench::Bench;
use std::cell::{Cell, RefCell};
use std::fs::File;
use std::path::PathBuf;

/// The number of random values; larger tensors repeat them.
const NOISE: usize = 1 << 22;

/// The values that `--part` accepts.
const PARTS: [&str; 6] = ["attention", "streaming", "head", "decode", "train", "products"];

pub fn run(args: &Args) -> error::Result<()> {
    if let Some(part) = args.part.iter().find(|part| !PARTS.contains(&part.as_str())) {
        let hint = format!("choose one of {}", PARTS.join(", "));
        return Err(Error::usage(format!("bench cuda has no part `{part}`")).hint(hint));
    }
    let gpu = open()?;
    let create = |path: &PathBuf| File::create(path).map(RefCell::new).map_err(|e| Error::io("write", path, &e));
    let record = args.record.as_ref().map(create).transpose()?;
    let noise = noise(if args.small { 1 << 12 } else { NOISE });
    let fast = fast::open();
    let [copy, product] = [f64::NAN; 2];
    let (has_fast, judged) = (fast.is_ok(), Cell::new([0; 2]));
    let p = gpu.properties();
    let declared = plan::Device::declared(&p.name, p.memory_bytes as u64).map(|device| [device.memory, device.flops]);
    let mut bench = Bench { gpu, args, record, copy, product, declared, has_fast, noise, judged };
    products::peaks(&mut bench, &fast);
    for part in PARTS.into_iter().filter(|part| args.part.is_empty() || args.part.iter().any(|wanted| wanted == part)) {
        match part {
            "attention" => attention::run(&bench),
            "streaming" => streaming::run(&bench),
            "head" => streaming::head(&bench),
            "decode" => decode::run(&bench)?,
            "train" => train::run(&bench)?,
            _ => products::run(&bench),
        }
    }
    let [judged, reached] = bench.judged.get();
    if judged > 0 && !args.json {
        say!("{reached} of {judged} targets reached");
    }
    Ok(())
}

fn open() -> error::Result<&'static Gpu> {
    let none = |why: String| Error::usage(format!("bench cuda: {why}")).hint("run it on a machine with a GPU");
    let (_, seen) = devices::devices().map_err(|why| none(why.to_string()))?;
    let index = gpus::mine(&World::start()?, &seen).ok_or_else(|| none("this process sees no GPU".into()))?;
    Ok(cuda::gpu::start(Gpu::open(index)?))
}

/// Random values for all inputs. GEMMs and copies of zeros would use less power, and the clocks depend on power.
fn noise(len: usize) -> [Memory; 3] {
    let mut state = 1u32;
    let values: Vec<f32> = (0..len)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32
        })
        .collect();
    let narrow = |size: f32| values.iter().map(|x| half::bf16::from_f32(size * (2.0 * x - 1.0)).to_bits()).collect();
    let [large, small]: [Vec<u16>; 2] = [1.0, 0.04].map(narrow);
    [Memory::from_values(&large), Memory::from_values(&values), Memory::from_values(&small)]
}
