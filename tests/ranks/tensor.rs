//! Models cut over the tensor axis against the same model on one rank: forward, losses, gradients, weights.

use crate::Test;
use crate::tensor_models::{self as models, Cut, SHAPES, Shape};
use rlhf_hpc::comm::World;
use rlhf_hpc::device::Device;
use rlhf_hpc::error::Result;
use rlhf_hpc::model::{
    Gradients, Head, Keys, ParamTable, Saved, TensorPart, Transformer, Weights, export, init, load, packed_positions,
};
use rlhf_hpc::ops::adamw;
use rlhf_hpc::tensor::DType;
use std::ops::Range;

pub const TESTS: &[Test] = &[
    Test {
        name: "an ordered sum adds every element in rank order, wherever it stands",
        ranks: &[1, 3],
        check: ordered,
    },
    Test {
        name: "a language model cut over tensor ranks is the whole one, gradients too",
        ranks: &[1, 2, 8],
        check: language_models,
    },
    Test { name: "in bf16 a cut model is the whole one to bf16's precision", ranks: &[4], check: half_precision },
    Test { name: "copies stay bitwise equal after updates", ranks: &[8], check: copies },
    Test { name: "parts loaded from disk and new parts are slices of the whole", ranks: &[4], check: loaded },
    Test { name: "a layout that cannot work is refused with those that can", ranks: &[2], check: refused },
];

fn values(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7919 + rank * 40_503) % 10_007) as f32 * 1.7e-3 - 8.0).collect()
}

fn ordered(world: &World) {
    for len in [0, 1, 7, 1000, 5000, (1 << 18) + 77] {
        let mut x = values(world.rank, len);
        world.group().all_reduce_sum_ordered(&mut x);
        let mut want = values(0, len);
        for rank in 1..world.size {
            want.iter_mut().zip(values(rank, len)).for_each(|(a, b)| *a += b);
        }
        assert!(models::bits(&x) == models::bits(&want), "len {len}");
    }
}

/// Hidden state, log-probabilities, entropies, values or nothing, and gradients.
struct Answers {
    hidden: Vec<f32>,
    logprobs: Vec<f32>,
    entropies: Vec<f32>,
    /// Flat.
    grads: Vec<f32>,
}

fn answers(model: &Transformer, weights: &Weights, shape: &Shape) -> Answers {
    let (tokens, cu_seqlens) = shape.row();
    let positions = packed_positions(&cu_seqlens);
    let mut saved = Saved::new(false);
    let keys = Keys::Packed { cu_seqlens: &cu_seqlens };
    let hidden = model.forward(weights, &tokens, &positions, keys, Some(&mut saved));
    let rows: Vec<u32> = (0..tokens.len() as u32 - 1).filter(|r| r % 5 != 3).collect();
    let targets: Vec<u32> = rows.iter().map(|&r| tokens[r as usize + 1]).collect();
    let mut grads = Gradients::new(weights.table.clone());
    // Two micro-batches: gradients are added to, not written.
    let hidden = hidden.data().to_vec();
    let mut all = Answers { hidden, logprobs: Vec::new(), entropies: Vec::new(), grads: Vec::new() };
    for pass in 0..2 {
        let mut saved = Saved::new(pass == 1);
        let keys = Keys::Packed { cu_seqlens: &cu_seqlens };
        let hidden = model.forward(weights, &tokens, &positions, keys, Some(&mut saved));
        assert_eq!(hidden.data(), all.hidden, "the same forward twice");
        let dhidden = if weights.table.head() == Head::Value {
            all.logprobs = model.values(weights, &hidden, &rows);
            let dvalues: Vec<f32> = rows.iter().map(|&r| (r as f32 * 0.7).sin()).collect();
            model.values_backward(weights, &hidden, &rows, &dvalues, &mut grads)
        } else {
            let mut loss = |range: std::ops::Range<usize>, _: &[f32], _: &[f32], dl: &mut [f32], de: &mut [f32]| {
                range.zip(dl.iter_mut().zip(de)).for_each(|(i, (dl, de))| {
                    (*dl, *de) = ((i as f32 * 1.3).cos(), 0.05 * (i as f32).sin());
                });
            };
            let (dhidden, logprobs, entropies) =
                model.logprobs_backward(weights, &hidden, &rows, &targets, 0.7, &mut loss, &mut grads);
            let (scored, scored_entropies) = model.logprobs(weights, &hidden, &rows, &targets, 0.7, true);
            assert_eq!((&scored, &scored_entropies), (&logprobs, &entropies), "scoring and training");
            (all.logprobs, all.entropies) = (logprobs, entropies);
            dhidden
        };
        model.backward(weights, saved, &cu_seqlens, dhidden, &mut grads);
    }
    all.grads = models::gradient(&grads);
    all
}

/// ||a - b|| / ||b||
fn apart(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
    let size = norm(&mut b.iter().map(|&x| f64::from(x)));
    let difference = norm(&mut a.iter().zip(b).map(|(&x, &y)| f64::from(x) - f64::from(y)));
    if difference == 0.0 { 0.0 } else { difference / size }
}

fn compare(world: &World, shape: &Shape, head: Head, dtype: DType, tolerance: f64) {
    let cut = Cut::new(world, shape, head, dtype);
    let want = answers(&cut.whole.0, &cut.whole.1, shape);
    let got = answers(&cut.part.0, &cut.part.1, shape);
    let near = |what: &str, a: &[f32], b: &[f32]| {
        let apart = apart(a, b);
        assert!(apart <= tolerance, "{} {head:?} {dtype:?}: {what} part by {apart:e}", shape.name);
    };
    near("hidden states", &got.hidden, &want.hidden);
    near("log-probabilities", &got.logprobs, &want.logprobs);
    near("entropies", &got.entropies, &want.entropies);
    let equal = world.group().all_gather_bytes(bytemuck::cast_slice(&got.logprobs));
    assert!(equal.iter().all(|other| *other == equal[0]), "{}: all ranks record the same", shape.name);
    let joined = cut.joined(world, &got.grads);
    for spec in cut.whole.1.table.specs() {
        assert!(want.grads[spec.range()].iter().any(|g| *g != 0.0), "{} has a gradient", spec.name);
        near(&spec.name, &joined[spec.range()], &want.grads[spec.range()]);
    }
    if world.size == 1 {
        assert_eq!(models::bits(&joined), models::bits(&want.grads), "one rank is what it was");
    }
}

fn language_models(world: &World) {
    for shape in SHAPES.iter().filter(|shape| shape.fits(world.size)) {
        compare(world, shape, Head::LanguageModel, DType::F32, 1e-5);
    }
}

fn half_precision(world: &World) {
    for shape in SHAPES.iter().filter(|shape| shape.fits(world.size)) {
        // Sums of other lengths are rounded to 8 bits before the next product.
        compare(world, shape, Head::LanguageModel, DType::Bf16, 3e-2);
    }
}

fn copies(world: &World) {
    for shape in SHAPES.iter().filter(|shape| shape.fits(world.size)) {
        let mut cut = Cut::new(world, shape, Head::LanguageModel, DType::F32);
        let len = cut.part.1.table.len();
        let (mut m, mut v) = (vec![0.0; len], vec![0.0; len]);
        let hyper = adamw::Hyper {
            lr: 1e-2,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.01,
            bias1: 0.1,
            bias2: 0.05,
            grad_scale: 1.0,
        };
        let mut flat = models::floats(&cut.part.1);
        let begun = flat.clone();
        for _ in 0..3 {
            let grads = answers(&cut.part.0, &cut.part.1, shape).grads;
            adamw::step(&mut flat, &grads, &mut m, &mut v, &hyper);
            cut.part.1.store_master(0..len, &flat);
        }
        assert_ne!(flat, begun);
        let own = cut.cut(&cut.joined(world, &flat));
        assert_eq!(models::bits(&own), models::bits(&flat), "{}", shape.name);
    }
}

fn loaded(world: &World) {
    let place = models::shared_directory(world);
    for shape in SHAPES.iter().filter(|shape| shape.fits(world.size)) {
        let arch = shape.arch();
        let dir = place.join(shape.name);
        if world.rank == 0 {
            let whole = init::init(&arch, Head::LanguageModel, DType::F32, 9);
            export::export(&dir, &arch, &whole, DType::F32, None).expect("an export");
        }
        world.group().barrier();
        for head in [Head::LanguageModel, Head::Value] {
            let part = TensorPart { rank: world.rank, size: world.size };
            let source = load::open(Device::Cpu, &dir, head, 77, part).expect("a model that can be cut");
            for dtype in [DType::F32, DType::Bf16] {
                let (_, whole) = load::load(Device::Cpu, &dir, head, dtype, 77).expect("a model");
                let (new, all_new) =
                    (init::init_on(Device::Cpu, &arch, head, dtype, 9, part), init::init(&arch, head, dtype, 9));
                match dtype {
                    DType::F32 => {
                        let flat = by_unit(&source, f32::NAN, |range, out| source.fill_f32(range, out));
                        slices(&source.table, &flat, &whole.table, &models::floats(&whole));
                        slices(&source.table, &models::floats(&new), &whole.table, &models::floats(&all_new));
                    }
                    DType::Bf16 => {
                        let part = |range: &Range<usize>| source.part(range.clone(), dtype).expect("finite values");
                        let units = source.table.units().iter();
                        let flat: Vec<u16> = units.flat_map(|range| part(range).slice().bf16().to_vec()).collect();
                        slices(&source.table, &flat, &whole.table, &models::halves(&whole));
                        slices(&source.table, &models::halves(&new), &whole.table, &models::halves(&all_new));
                    }
                }
            }
        }
    }
}

/// All units of a source, one behind the other, in memory that held something else before.
fn by_unit<T: Copy>(source: &load::Source, before: T, fill: impl Fn(Range<usize>, &mut [T]) -> Result<()>) -> Vec<T> {
    let mut flat = vec![before; source.table.len()];
    for range in source.table.units() {
        fill(range.clone(), &mut flat[range.clone()]).expect("finite values");
    }
    flat
}

/// Every parameter of a part is the slice of the whole that its spec names.
fn slices<T: models::Element>(table: &ParamTable, flat: &[T], whole: &ParamTable, of: &[T]) {
    for (spec, whole) in table.specs().iter().zip(whole.specs()) {
        models::is_slice(spec, &flat[spec.range()], whole, &of[whole.range()]);
    }
}

fn refused(world: &World) {
    let place = models::shared_directory(world);
    let shape = SHAPES.iter().find(|s| s.name == "irregular").expect("a shape of 12 heads");
    let arch = shape.arch();
    let dir = place.join("model");
    if world.rank == 0 {
        export::export(&dir, &arch, &init::init(&arch, Head::LanguageModel, DType::F32, 1), DType::F32, None)
            .expect("an export");
    }
    world.group().barrier();
    let error = load::open(Device::Cpu, &dir, Head::LanguageModel, 0, TensorPart { rank: 0, size: 8 })
        .err()
        .expect("8 does not divide 12");
    assert!(error.message.contains("tensor = 8") && error.message.contains("12 attention heads"), "{error}");
    assert_eq!(error.hint.as_deref(), Some("tensor can be 1, 2, 3, 4, 6, 12"));
}
