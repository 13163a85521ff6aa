//! `bench cuda`: the kernels on a GPU, compared with the best copy and GEMM of the same GPU, and with their targets.

mod attention;
mod bench;
mod decode;
mod head;
mod products;
mod streaming;
mod train;

use crate::cli::out::say;
use crate::comm::World;
use crate::comm::gpus;
use crate::device::cuda::{self, Gpu, Memory, devices, fast};
use crate::error::{self, Error};
use bench::Bench;
pub use bench::Options;
use std::cell::{Cell, RefCell};
use std::fs::File;

/// Random values, which larger tensors repeat.
const NOISE: usize = 1 << 22;

/// A name that `--part` takes, and what it measures.
type Part = (&'static str, fn(&Bench) -> error::Result<()>);

const PARTS: [Part; 6] = [
    ("attention", |bench| {
        attention::run(bench);
        Ok(())
    }),
    ("streaming", |bench| {
        streaming::run(bench);
        Ok(())
    }),
    ("head", |bench| {
        head::run(bench);
        Ok(())
    }),
    ("decode", decode::run),
    ("train", train::run),
    ("products", |bench| {
        products::run(bench);
        Ok(())
    }),
];

pub fn run(options: Options) -> error::Result<()> {
    let unknown = options.parts.iter().find(|part| PARTS.iter().all(|(name, _)| name != part));
    if let Some(part) = unknown {
        let names = PARTS.map(|(name, _)| name).join(", ");
        return Err(Error::usage(format!("bench cuda has no part {part}")).hint(format!("parts: {names}")));
    }
    let gpu = open()?;
    let record = match &options.record {
        None => None,
        Some(path) => Some(RefCell::new(File::create(path).map_err(|e| Error::io("write", path, &e))?)),
    };
    let noise = noise(if options.is_small { 1 << 12 } else { NOISE });
    let fast = fast::open();
    let [copy, product] = [f64::NAN; 2];
    let (has_fast, judged) = (fast.is_ok(), Cell::new([0; 2]));
    let mut bench = Bench { gpu, options, record, copy, product, has_fast, noise, judged };
    products::peaks(&mut bench, &fast);
    for (name, part) in PARTS {
        if bench.options.parts.is_empty() || bench.options.parts.iter().any(|wanted| wanted == name) {
            part(&bench)?;
        }
    }
    let [judged, reached] = bench.judged.get();
    if judged > 0 && !bench.options.json {
        say!("{reached} of {judged} targets reached");
    }
    Ok(())
}

fn open() -> error::Result<&'static Gpu> {
    let none = |why| Error::usage(format!("bench cuda: {why}")).hint("run it on a machine with a GPU");
    let (_, seen) = devices::devices().map_err(none)?;
    let index = gpus::mine(&World::start()?, &seen).ok_or_else(|| none("no GPU is seen".into()))?;
    Ok(cuda::gpu::start(Gpu::open(index)?))
}

/// Products and copies of zeros would draw less power, and clocks follow power.
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
    [Memory::of(&large), Memory::of(&values), Memory::of(&small)]
}
