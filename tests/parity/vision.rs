//! Models that read images against transformers: rows of the tower, log-probabilities, gradients and greedy tokens of rows
//! with text and images. `tests/golden/vision.py` makes the goldens.

use crate::parity::exported::tensors;
use crate::parity::golden::{
    ENTROPY_COEF, Golden, TEMPERATURE, adapter, check_gradients, directory, gap, weights as loss_weights,
};
use rlhf_hpc::config::job::Recompute;
use rlhf_hpc::config::rollout::RolloutConfig;
use rlhf_hpc::device::Device;
use rlhf_hpc::experience::{Image, Patches, Prompt};
use rlhf_hpc::learn::packed::PackedRow;
use rlhf_hpc::model::families::Family;
use rlhf_hpc::model::load::{self, ModelFiles};
use rlhf_hpc::model::{Arch, Gradients, Head, Pixels, Saved, Transformer, Weights, export, tiny};
use rlhf_hpc::rng::{Purpose, Rng};
use rlhf_hpc::rollout::{self, Engine, Hooks, Stop, requests};
use rlhf_hpc::tensor::DType;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

const OTHER: u64 = 1000;
pub const SEEING: [&str; 3] = ["vision-qwen2_5_vl", "vision-qwen3_vl", "vision-qwen3_5"];

/// The tokens and the images of rows.
type Rows = Vec<(Vec<u32>, Vec<Image>)>;

/// A model with the rows of its golden.
struct Seeing {
    golden: Golden,
    weights: Weights,
    transformer: Transformer,
    /// The tokens and the images of each row.
    rows: Rows,
}

impl Seeing {
    /// A model whose tower trains, or does not.
    fn load(name: &str, dtype: DType, trains: bool) -> Self {
        let (dir, golden) = (directory(name), Golden::read(name));
        let arch = Arch::load(&dir).expect("a model");
        let arch = if trains { arch.with_tower().expect("a tower") } else { arch };
        let files = ModelFiles { dir: &dir, adapter: None, arch: &arch, head: Head::LanguageModel };
        let axes = rlhf_hpc::comm::Axes::one();
        let weights = files.weights(Device::Cpu, None, dtype, 0, &axes, 0).expect("its files").0;
        Self::with(golden, &arch, weights)
    }

    /// A model with an adapter, and the golden of both.
    fn adapted(name: &str) -> (Self, Golden) {
        let (dir, from) = (directory(name), adapter(name));
        let (arch, weights) =
            load::load_with(Device::Cpu, &dir, Some(&from), Head::LanguageModel, DType::F32, 0).expect("an adapter");
        (Self::with(Golden::read(name), &arch, weights), Golden::of_adapter(name))
    }

    fn with(golden: Golden, arch: &Arch, weights: Weights) -> Self {
        let mut transformer = Transformer::new(arch, &weights.table);
        let (rows, all) = rows(&golden, arch);
        transformer.read_images_with(Pixels::new(move |image| Ok(all[&image.hash].clone())));
        Self { golden, weights, transformer, rows }
    }

    fn packed(&self) -> PackedRow {
        let mut row = PackedRow::new();
        for (tokens, images) in &self.rows {
            row.push(tokens, 1);
            row.see(images);
        }
        row
    }

    fn hidden(&self, row: &PackedRow, saved: Option<&mut Saved>) -> rlhf_hpc::tensor::Tensor {
        let PackedRow { pictures, tokens, positions, .. } = row;
        self.transformer.forward_seeing(&self.weights, pictures, tokens, positions, row.keys(), saved)
    }

    fn logprobs(&self, row: &PackedRow, temperature: f32) -> Vec<f32> {
        let hidden = self.hidden(row, None);
        self.transformer.logprobs(&self.weights, &hidden, &row.rows, row.targets(), temperature, false).0
    }

    /// The gradients of the golden's loss, and the log-probabilities.
    fn backward(&self, row: &PackedRow, recompute: Recompute) -> (Gradients, Vec<f32>) {
        let (mut grads, mut saved) = (Gradients::new(self.weights.table.clone()), Saved::new(recompute));
        let hidden = self.hidden(row, Some(&mut saved));
        let mut loss = |range: std::ops::Range<usize>, _: &[f32], _: &[f32], dl: &mut [f32], de: &mut [f32]| {
            dl.copy_from_slice(&loss_weights(range));
            de.fill(ENTROPY_COEF);
        };
        let (w, targets) = (&self.weights, row.targets());
        let (dhidden, logprobs, _) =
            self.transformer.logprobs_backward(w, &hidden, &row.rows, targets, TEMPERATURE, &mut loss, &mut grads);
        self.transformer.backward(w, saved, &row.cu_seqlens, dhidden, &mut grads);
        (grads, logprobs)
    }
}

/// The rows of a golden, and the patches of images by their hash. Those of `OTHER` + hash are negative.
fn rows(golden: &Golden, arch: &Arch) -> (Rows, HashMap<u64, Patches>) {
    let (tokens, grids, values) = (golden.integers("tokens"), golden.integers("grids"), golden.floats("patches"));
    let spec = arch.sight.as_ref().expect("a tower").spec.clone();
    let (mut values, mut all) = (values.as_slice(), HashMap::new());
    let mut images = grids.chunks_exact(3).zip(1..).map(|(grid, hash)| {
        let grid = [0, 1, 2].map(|axis| grid[axis] as usize);
        let (own, rest) = values.split_at(grid.iter().product::<usize>() * spec.patch_values());
        values = rest;
        all.insert(hash, Patches { grid, values: own.to_vec(), hash });
        all.insert(OTHER + hash, Patches { grid, values: own.iter().map(|x| -x).collect(), hash: OTHER + hash });
        Image { tokens: spec.tokens_of(grid), grid, hash, ..Image::default() }
    });
    let (ends, counts) = (golden.integers("cu_seqlens"), golden.integers("images"));
    let rows = ends.windows(2).zip(counts).map(|(ends, count)| {
        let tokens = tokens[ends[0] as usize..ends[1] as usize].to_vec();
        let mut end = 0;
        let placed = |image: Image| {
            let at = end + tokens[end..].iter().position(|token| *token == spec.image_token).expect("an image token");
            end = at + image.tokens;
            Image { at, ..image }
        };
        let images = images.by_ref().take(count as usize).map(placed).collect();
        (tokens, images)
    });
    let rows = rows.collect();
    (rows, all)
}

#[test]
fn rows_of_towers_agree_with_transformers() {
    for name in SEEING {
        let m = Seeing::load(name, DType::F32, false);
        let all: Vec<Image> = m.rows.iter().flat_map(|(_, images)| images.clone()).collect();
        let merged = m.transformer.tower_rows(&m.weights, &all).expect("a tower");
        let apart = gap(merged.rows.data(), &m.golden.floats("merged"));
        assert!(apart <= 1e-5, "{name}: {apart:e}");
        assert_eq!(m.golden.names("deep.").len(), merged.deep.len(), "{name}");
        for (i, rows) in merged.deep.iter().enumerate() {
            let apart = gap(rows.data(), &m.golden.floats(&format!("deep.{i}")));
            assert!(apart <= 1e-5, "{name}: rows {i} after a layer: {apart:e}");
        }
    }
}

#[test]
fn logprobs_of_text_and_images_agree_with_transformers_with_the_same_bits_in_any_packing() {
    for name in SEEING {
        let [frozen, trained] = [false, true].map(|trains| Seeing::load(name, DType::F32, trains));
        let row = frozen.packed();
        let logprobs = frozen.logprobs(&row, 1.0);
        let apart = gap(&logprobs, &frozen.golden.floats("logprobs"));
        assert!(apart <= 1.5e-5, "{name}: {apart:e}");
        assert!(trained.logprobs(&row, 1.0) == logprobs, "{name}: a tower in the table");
        let alone = frozen.rows.iter().flat_map(|(tokens, images)| {
            let mut row = PackedRow::new();
            row.push(tokens, 1);
            row.see(images);
            trained.logprobs(&row, 1.0)
        });
        assert!(alone.collect::<Vec<_>>() == logprobs, "{name}: each row alone");
        // A text's bits do not depend on the images around it.
        let mut text = PackedRow::new();
        text.push(&frozen.rows[1].0, 1);
        let offsets = &row.row_offsets[1..3];
        assert!(frozen.logprobs(&text, 1.0) == logprobs[offsets[0]..offsets[1]], "{name}: text alone");
    }
}

#[test]
fn gradients_of_towers_and_language_models_agree_with_transformers() {
    for name in SEEING {
        let m = Seeing::load(name, DType::F32, true);
        let row = m.packed();
        let (grads, logprobs) = m.backward(&row, Recompute::None);
        let apart = gap(&logprobs, &m.golden.floats("logprobs_t"));
        assert!(apart <= 1.5e-5 / TEMPERATURE, "{name}: {apart:e}");
        check_gradients(name, &m.golden, &grads, 1e-4);
        for recompute in [Recompute::Attention, Recompute::Block] {
            let (again, _) = m.backward(&row, recompute);
            assert!(again.to_vec() == grads.to_vec(), "{name}: {recompute:?}");
        }
        // A frozen tower changes nothing of the rest.
        let frozen = Seeing::load(name, DType::F32, false);
        let (of_rest, _) = frozen.backward(&row, Recompute::Block);
        let (whole, first) = (grads.to_vec(), m.weights.table.units()[m.weights.table.embedding_unit()].start);
        assert!(of_rest.to_vec() == whole[first..], "{name}: a frozen tower");
    }
}

/// Targets of the language model and of the tower: some, and "all-linear" of PEFT, which means both.
#[test]
fn adapters_of_towers_agree_with_peft() {
    for name in SEEING {
        let (m, golden) = Seeing::adapted(name);
        let (grads, logprobs) = m.backward(&m.packed(), Recompute::Block);
        let apart = gap(&logprobs, &golden.floats("logprobs_t"));
        assert!(apart <= 5e-5, "{name}: {apart:e}");
        check_gradients(name, &golden, &grads, 1e-4);
    }
}

/// Chunks that cut images, samples that share prompts, and prompts that differ in their images alone.
#[test]
fn rollouts_with_images_are_greedy_as_transformers_and_record_what_training_computes() {
    for (name, dtype) in SEEING.into_iter().flat_map(|name| [DType::F32, DType::Bf16].map(|dtype| (name, dtype))) {
        let m = Seeing::load(name, dtype, true);
        let (greedy, length) = (m.golden.integers("greedy"), m.golden.prompt());
        let images = &m.rows[3].1;
        let other = images.iter().map(|image| Image { hash: OTHER + image.hash, ..image.clone() });
        let prompts = [images.clone(), other.collect()].map(|images| Prompt {
            tokens: greedy[..length].to_vec(),
            images,
            ..Prompt::default()
        });
        let new = greedy.len() - length;
        for prefill in [7, 1000] {
            let config = RolloutConfig {
                response_tokens_max: new,
                samples_per_prompt: 2,
                temperature: 0.0,
                prefill_tokens_max: prefill,
                ignore_eos: true,
                ..RolloutConfig::default()
            };
            let stop = Arc::new(Stop::new(&config, &[]));
            let requests = requests(&prompts, &config, &stop, m.transformer.arch.context).expect("legal prompts");
            let model = rollout::Model { transformer: &m.transformer, weights: &m.weights, tokenizer: None };
            let mut engine = Engine::new(&config, 1 << 26);
            let rng = Rng::new(1, Purpose::Synthetic);
            let outcome = engine.generate(model, rng, 0, &requests, &mut Hooks::default()).expect("a rollout");
            let responses = outcome.complete().expect("all of them");
            if dtype == DType::F32 {
                assert_eq!(responses[0].tokens, greedy[length..], "{name}");
                assert_ne!(responses[2].logprobs, responses[0].logprobs, "{name}: other images");
            }
            for response in &responses {
                let prompt = &prompts[response.prompt];
                let mut row = PackedRow::new();
                row.push(&[&prompt.tokens[..], &response.tokens].concat(), length);
                row.see(&prompt.images);
                assert!(m.logprobs(&row, 1.0) == response.logprobs, "{name} {dtype:?}: sampler and trainer");
            }
        }
    }
}

/// Old and new names, a config.json whose keys are side by side, and joined matrices, with the tower copied or written.
#[test]
fn exports_have_the_tensors_and_the_keys_of_their_source() {
    let scratch = tempfile::tempdir().expect("a directory");
    for (name, trains) in SEEING.into_iter().flat_map(|name| [(name, false), (name, true)]) {
        let (m, out) = (Seeing::load(name, DType::F32, trains), scratch.path().join(name));
        export::export(&out, &m.transformer.arch, &m.weights, DType::F32, None).expect("it is written");
        assert!(tensors(&out) == tensors(&directory(name)), "{name}");
        let [got, want] = [&out, &directory(name)].map(|dir| {
            let text = std::fs::read(dir.join("config.json")).expect("a file");
            serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>(&text).expect("an object")
        });
        let differs = want.iter().find(|(key, value)| *key != "text_config" && got.get(*key) != Some(value));
        assert_eq!(differs, None, "{name}");
        let arch = Arch::load(&out).expect("a model");
        assert!(arch.computes_as(&m.transformer.arch) && arch.sight.is_some(), "{name}");
    }
}

/// Transformers has no class for them. One of Qwen3.5 may also read text alone.
#[test]
fn reward_models_that_read_images_keep_their_tower() {
    let scratch = tempfile::tempdir().expect("a directory");
    for name in SEEING {
        let (from, out) = (directory(name), scratch.path().join(name));
        let load =
            |dir: &Path, seed| load::load(Device::Cpu, dir, Head::Value, DType::F32, seed).expect("a value model");
        let (mut arch, weights) = load(&from, 3);
        arch.use_tower();
        export::export(&out, &arch, &weights, DType::F32, None).expect("it is written");
        let (again, same) = load(&out, 4);
        assert_eq!((again.head, again.sight.is_some()), (Head::Value, true), "{name}");
        assert!(same.to_master(0..same.table.len())[..] == weights.to_master(0..weights.table.len())[..], "{name}");
        let tower = |dir: &Path| {
            let mut all = tensors(dir);
            all.retain(|tensor, _| tensor.contains("visual."));
            all
        };
        assert!(tower(&out) == tower(&from) && !tower(&out).is_empty(), "{name}");
    }
}

#[test]
fn tiny_models_that_read_images_are_complete() {
    let scratch = tempfile::tempdir().expect("a directory");
    for name in ["qwen2_5_vl", "qwen3_vl"] {
        let family = Family::named_or_inside(name).expect("a family");
        let mut last = 300;
        let token = |_: &str| {
            last -= 1;
            Ok(last)
        };
        let config = tiny::seeing(family, tiny::of_family(family, 300), token).expect("a config");
        let arch = Arch::from_config(&config).and_then(Arch::with_tower).expect("a model");
        let out = scratch.path().join(name);
        rlhf_hpc::cli::init::write(&arch, DType::F32, 1, None, &out).expect("it is written");
        let arch = Arch::load(&out).expect("a model");
        let files = ModelFiles { dir: &out, adapter: None, arch: &arch, head: Head::LanguageModel };
        let weights =
            files.weights(Device::Cpu, None, DType::F32, 0, &rlhf_hpc::comm::Axes::one(), 0).expect("weights").0;
        let mut transformer = Transformer::new(&arch, &weights.table);
        transformer.read_images_with(Pixels::new(|image| {
            Ok(Patches { grid: image.grid, values: vec![0.5; 16 * 3 * 2 * 64], hash: image.hash })
        }));
        let image = Image { at: 1, tokens: 4, grid: [1, 4, 4], ..Image::default() };
        let rows = transformer.tower_rows(&weights, &[image]).expect("a tower");
        assert_eq!((rows.rows.rows(), rows.deep.len()), (4, usize::from(name == "qwen3_vl")), "{name}");
    }
}
