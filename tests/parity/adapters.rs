//! Models with adapters against PEFT, and frozen bases in nf4.

use crate::models::{norm, relative_gap};
use crate::parity::exported::tensors;
use crate::parity::golden::{
    ADAPTED, ADAPTED_BEFORE, DENSE_MODELS, ENTROPY_COEF, Model, REWARD_MODELS, adapter, check_gradients, directory,
    gap, weights,
};
use crate::parity::vision::SEEING;
use rlhf_hpc::comm::Axes;
use rlhf_hpc::config::job::Recompute;
use rlhf_hpc::device::Device;
use rlhf_hpc::model::adapter_files::AdapterFiles;
use rlhf_hpc::model::export::Export;
use rlhf_hpc::model::load::{ModelFiles, adapted, load_base, load_with};
use rlhf_hpc::model::{AdapterNorms, Arch, Head, ParamId, Weights, pack};
use rlhf_hpc::tensor::nf4::Nf4;
use rlhf_hpc::tensor::{DType, Slice};
use std::path::Path;
use std::sync::Arc;

#[test]
fn logprobs_and_gradients_of_adapters_agree_with_peft_for_every_family() {
    for name in ADAPTED.into_iter().chain(ADAPTED_BEFORE) {
        let m = Model::adapted(name, Head::LanguageModel, DType::F32);
        let (grads, logprobs, entropy) = m.language_model_backward();
        for (got, key) in [(&logprobs, "logprobs_t"), (&entropy, "entropy")] {
            let apart = gap(got, &m.golden.floats(key));
            assert!(apart <= 5e-5, "{name}: {key}: {apart:e}");
        }
        let sum = |factors: Vec<f32>, values: &[f32]| -> f64 {
            factors.iter().zip(values).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
        };
        let loss = sum(weights(0..logprobs.len()), &logprobs) + sum(vec![ENTROPY_COEF; entropy.len()], &entropy);
        let want = f64::from(m.golden.floats("loss")[0]);
        assert!((loss - want).abs() <= 1e-5 * want.abs().max(1.0), "{name}: the loss is {loss}, of PEFT {want}");
        check_gradients(name, &m.golden, &grads, 1e-4);
    }
}

#[test]
fn scores_and_gradients_of_reward_models_with_adapters_agree_with_peft() {
    for name in REWARD_MODELS {
        let m = Model::adapted(name, Head::Value, DType::F32);
        let (grads, values) = m.values_backward();
        let apart = gap(&values, &m.golden.floats("values"));
        assert!(apart <= 1e-5, "{name}: {apart:e}");
        check_gradients(name, &m.golden, &grads, 1e-4);
    }
}

#[test]
fn recomputation_does_not_change_the_gradients_of_models_and_adapters() {
    let load = |name: &&str, dtype| Model::load(name, Head::LanguageModel, dtype);
    let adapted = ADAPTED.map(|name| (name, Model::adapted(name, Head::LanguageModel, DType::F32)));
    let dense = DENSE_MODELS.iter().flat_map(|name| [DType::F32, DType::Bf16].map(|dtype| (*name, load(name, dtype))));
    for (name, m) in dense.chain(adapted) {
        let (kept, ..) = m.language_model_backward();
        for recompute in [Recompute::Attention, Recompute::Block] {
            let (again, ..) = m.backward_with(recompute);
            assert_eq!(kept.to_vec(), again.to_vec(), "{name}, {recompute:?}");
        }
    }
}

/// Parts of one tensor in the files, reordered heads and the names inside another model included.
#[test]
fn an_adapter_that_is_loaded_and_written_again_has_the_tensors_that_peft_wrote() {
    let scratch = tempfile::tempdir().expect("a directory");
    for name in ADAPTED.into_iter().chain(SEEING) {
        let (dir, from, head, out) = (directory(name), adapter(name), Head::LanguageModel, scratch.path().join(name));
        let (arch, weights) = load_with(Device::Cpu, &dir, Some(&from), head, DType::F32, 0).expect("an adapter");
        let params = ModelFiles { dir: &dir, adapter: Some(&from), arch: &arch, head }.whole().shapes();
        let AdapterFiles { config, tuning, .. } = AdapterFiles::open(&from, &params).expect("an adapter");
        let is_wrapped = arch.wrapper.is_some();
        let table = &weights.table;
        Export::begin_adapter(&out, &config, &tuning, &params, table, DType::F32, is_wrapped)
            .and_then(|export| export.write(&weights))
            .expect("it is written");
        assert!(tensors(&out) == tensors(&from), "{name}");
        assert_eq!(AdapterFiles::open(&out, &params).expect("an adapter").tuning, tuning, "{name}");
    }
}

/// A base directory with the values that a base in nf4 has, in f32.
fn dequantized(files: &ModelFiles, out: &Path) {
    let (source, whole) = (files.source().expect("a model"), Arc::new(files.whole()));
    let arch = Arch { tuning: None, ..files.arch.clone() };
    let mut export = Export::begin(out, &arch, &whole, DType::F32, None).expect("it begins");
    for (index, spec) in whole.specs().iter().enumerate() {
        let mut values = vec![0.0; spec.elements()];
        match source.nf4(&spec.name).expect("it can be quantized") {
            Some(nf4) => nf4.read(0, &mut values),
            None => source.read(&spec.name, 0, &mut values).expect("finite values"),
        }
        export.rows(index, &values).expect("rows");
    }
    export.commit().expect("it is written");
}

/// With joined and reordered matrices, in f32 and bf16.
#[test]
fn a_model_on_a_base_in_nf4_computes_bitwise_as_on_the_dequantized_base() {
    let scratch = tempfile::tempdir().expect("a directory");
    for name in ["llama3", "phi3-short", "glm4", "qwen3_next", "qwen3_moe-experts"] {
        let (dir, from, head, out) = (directory(name), adapter(name), Head::LanguageModel, scratch.path().join(name));
        let arch = adapted(&dir, Some(&from), head).expect("an adapter");
        let files = |dir| ModelFiles { dir, adapter: Some(&from), arch: &arch, head };
        dequantized(&files(&dir), &out);
        for dtype in [DType::F32, DType::Bf16] {
            let [got, want] = [(&dir, true), (&out, false)].map(|(dir, quantize)| {
                let (files, axes) = (files(dir), Axes::one());
                let kept = files.frozen();
                let base = load_base(Device::Cpu, &files, &kept, dtype, &axes, 0, true, quantize).expect("a base");
                let weights = files.weights(Device::Cpu, Some(base), dtype, 0, &axes, 0).expect("weights").0;
                let (grads, logprobs, _) = Model::of_adapter(name, &arch, weights).language_model_backward();
                (grads.to_vec(), logprobs)
            });
            assert!(got == want, "{name} {dtype:?}");
        }
    }
}

/// The values of a parameter in memory order.
fn matrix(weights: &Weights, id: ParamId) -> Vec<f32> {
    match weights.unit(weights.table.unit_of(id)).weight(id).values {
        Slice::F32(values) => values.to_vec(),
        Slice::Bf16(values) => values.iter().map(|x| f32::from_bits(u32::from(*x) << 16)).collect(),
        Slice::Cuda(_) => unreachable!("a model on the CPU"),
    }
}

/// The matrices of what has an adapter, and the modules of their A and B.
fn parts_of(base: &Weights, name: &str) -> Vec<[String; 3]> {
    let matrix = name.trim_end_matches(".weight");
    let Some((layer, last)) = matrix.split_once(".experts.") else {
        return vec![[matrix.replace(".mlp.router", ".mlp.gate"), matrix.to_owned(), matrix.to_owned()]];
    };
    let parts = if last == "down_proj" { &["down_proj"][..] } else { &["gate_proj", "up_proj"] };
    let is_down =
        |name: &str| name.starts_with(layer) && name.ends_with(".down_proj.weight") && name.contains(".experts.");
    let count = base.table.specs().iter().filter(|spec| is_down(&spec.name)).count();
    let of = |e: usize| parts.iter().map(move |part| [part, last, part].map(|p| format!("{layer}.experts.{e}.{p}")));
    (0..count).flat_map(of).collect()
}

/// ||s B A||_F of one adapter, from every element of the product.
fn product_norm(weights: &Weights, modules: [&str; 2], scale: f64) -> f64 {
    let [(a, [rank, width]), (b, [n, _])] = [("A", modules[0]), ("B", modules[1])].map(|(part, module)| {
        let id = weights.table.find(&format!("{module}.lora_{part}.weight")).expect("it is there");
        let spec = weights.table.spec(id);
        let (rows, columns) = spec.dims();
        (pack::unpack(spec, &weights.to_master(spec.range())), [rows, columns])
    });
    let element = |i: usize, j: usize| -> f64 {
        (0..rank).map(|r| f64::from(b[i * rank + r]) * f64::from(a[r * width + j])).sum::<f64>() * scale
    };
    (0..n).flat_map(|i| (0..width).map(move |j| (i, j))).map(|(i, j)| element(i, j).powi(2)).sum::<f64>().sqrt()
}

/// Plain adapters and rslora (llama3, reward-qwen2), on bases in both dtypes and in nf4.
#[test]
fn the_sizes_of_adapters_relative_to_their_matrices_are_those_of_the_whole_product() {
    for (name, head, dtype, quantize) in [
        ("llama2", Head::LanguageModel, DType::F32, false),
        ("llama3", Head::LanguageModel, DType::F32, false),
        ("llama3", Head::LanguageModel, DType::Bf16, true),
        ("mistral", Head::LanguageModel, DType::Bf16, false),
        ("qwen2", Head::LanguageModel, DType::F32, true),
        ("reward-qwen2", Head::Value, DType::F32, false),
        ("qwen3_moe-experts", Head::LanguageModel, DType::F32, false),
        ("gpt_oss-experts", Head::LanguageModel, DType::Bf16, false),
    ] {
        let (dir, from, axes) = (directory(name), adapter(name), Axes::one());
        let arch = adapted(&dir, Some(&from), head).expect("an adapter");
        let files = ModelFiles { dir: &dir, adapter: Some(&from), arch: &arch, head };
        let base = load_base(Device::Cpu, &files, &files.frozen(), dtype, &axes, 0, true, quantize).expect("a base");
        let mut weights = files.weights(Device::Cpu, Some(base.clone()), dtype, 0, &axes, 0).expect("weights").0;
        let (norms, adapters) = (AdapterNorms::new(&arch, &weights, &axes), &arch.tuning.as_ref().unwrap().adapters);
        let ratios = norms.ratios(&weights, &axes);
        assert_eq!(ratios.len(), adapters.len(), "{name}");
        for (matrix_name, ratio) in &ratios {
            let module = matrix_name.trim_end_matches(".weight");
            let scale = f64::from(adapters[module].scale);
            // A parameter of all experts has the matrices of each.
            let all = parts_of(&base, matrix_name);
            let id = |name: &str| base.table.find(&format!("{name}.weight")).expect("it is frozen");
            let products = all.iter().map(|[_, a, b]| product_norm(&weights, [a, b], scale));
            let frozen = all.iter().map(|[frozen, ..]| norm(matrix(&base, id(frozen)).into_iter()));
            let sum = |norms: Vec<f64>| norms.into_iter().map(|x| x * x).sum::<f64>().sqrt();
            let want = sum(products.collect()) / sum(frozen.collect());
            let apart = (ratio - want).abs() / want;
            assert!(want > 1e-3 && apart < 1e-12, "{name}: {matrix_name} has {ratio}, of the product {want}");
        }
        // A new adapter has B = 0.
        for spec in weights.table.clone().specs().iter().filter(|spec| spec.name.contains("lora_B")) {
            weights.store_master(spec.range(), &vec![0.0; spec.len]);
        }
        assert!(norms.ratios(&weights, &axes).iter().all(|(_, ratio)| *ratio == 0.0), "{name}");
    }
}

/// The bits of a matrix in nf4 are those of its dequantized values, rounded to bf16 once.
#[test]
fn layers_of_a_base_in_nf4_have_the_dequantized_values() {
    for (name, dtype) in
        [("llama3", DType::F32), ("qwen2", DType::Bf16), ("phi3-short", DType::F32), ("glm4", DType::F32)]
    {
        let arch = Arch::load(&directory(name)).expect("a model");
        let files = ModelFiles { dir: &directory(name), adapter: None, arch: &arch, head: Head::LanguageModel };
        let names = files.whole().specs().iter().map(|spec| spec.name.clone()).collect();
        let base =
            |quantize| load_base(Device::Cpu, &files, &names, dtype, &Axes::one(), 0, true, quantize).expect("a base");
        let [exact, quantized] = [base(false), base(true)];
        assert!(quantized.is_quantized() && 2 * quantized.bytes() < 3 * exact.bytes() / 2 + exact.bytes());
        for (index, spec) in exact.table.specs().iter().enumerate() {
            let id = ParamId::own(index);
            let unit = exact.table.unit_of(id);
            let [exact_values, got] = [&exact, &quantized].map(|weights| matrix(weights, id));
            if !exact.table.is_quantized(unit) || spec.shape.len() < 2 {
                assert_eq!(got, exact_values, "{name}: {}", spec.name);
                continue;
            }
            let apart = relative_gap(&got, &exact_values);
            assert!((0.01..0.15).contains(&apart), "{name}: {} parts by {apart}", spec.name);
            if dtype == DType::F32 {
                let (n, k) = spec.dims();
                let whole = pack::unpack(spec, &exact_values);
                let source = |start: usize, to: &mut [f32]| to.copy_from_slice(&whole[start..start + to.len()]);
                let nf4 = Nf4::quantize(n, k, &source).expect("finite values").double_quantized();
                let mut want = vec![0.0; n * k];
                nf4.read(0, &mut want);
                assert_eq!(pack::unpack(spec, &got), want, "{name}: {}", spec.name);
            }
        }
    }
}
