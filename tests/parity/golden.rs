//! Reads the checked-in goldens: tests/golden/models.py makes those of the models in tests/golden/shapes.py.

use crate::models::relative_gap;
use rlhf_hpc::config::job::Recompute;
use rlhf_hpc::device::Device;
use rlhf_hpc::model::{Arch, Gradients, Head, Keys, Saved, Transformer, Weights, load, pack, packed_positions};
use rlhf_hpc::tensor::{DType, Tensor};
use safetensors::SafeTensors;
use std::path::{Path, PathBuf};

pub const LANGUAGE_MODELS: [&str; 5] = ["llama2", "llama3", "mistral", "qwen2", "qwen3"];
/// Families whose norms, ropes, windows, scales or files differ from those.
pub const DENSE_MODELS: [&str; 30] = [
    "phi3-short",
    "phi3-long",
    "smollm3",
    "smollm3-window",
    "olmo2",
    "olmo3",
    "ministral3",
    "seed_oss",
    "glm4",
    "granite",
    "gemma2",
    "gemma3_text",
    // Language models inside models with images.
    "gemma3",
    "gemma3-old",
    "mistral3",
    // Layers with the gated delta rule.
    "qwen3_5_text",
    "qwen3_5",
    // Mixtures of experts.
    "mixtral",
    "qwen3_moe",
    "qwen3_moe-stacked",
    "glm4_moe",
    "glm4_moe-groups",
    // Latent attention.
    "deepseek_v3",
    "deepseek_v3-plain",
    "glm4_moe_lite",
    // Both.
    "qwen3_next",
    "qwen3_5_moe_text",
    "qwen3_5_moe",
    // Sinks, biases of experts, and experts in MXFP4.
    "gpt_oss",
    "gpt_oss-mxfp4",
];
/// Language models with adapters.
pub const ADAPTED: [&str; 25] = [
    "llama2",
    "llama3",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3-short",
    "glm4",
    "gemma3_text",
    "gemma3",
    "olmo2",
    "granite",
    "qwen3_5_text",
    "deepseek_v3",
    "deepseek_v3-plain",
    "qwen3_next",
    "qwen3_5_moe_text",
    "gpt_oss",
    // With adapters of experts, routers and gates, on models without the suffix.
    "qwen3_moe-experts",
    "mixtral-experts",
    "gpt_oss-experts",
    "qwen3_next-experts",
    "deepseek_v3-experts",
    "glm4_moe-experts",
    "qwen3_5_moe_text-experts",
    "qwen3_moe-stacked-experts",
];
/// Whose adapters have tensors of each expert, as those of transformers 4.
pub const ADAPTED_BEFORE: [&str; 2] = ["qwen3_moe-old", "mixtral-old"];
/// With adapters, too.
pub const REWARD_MODELS: [&str; 2] = ["reward", "reward-qwen2"];
pub const DENSE_REWARD_MODELS: [&str; 8] = [
    "reward-gemma3_text",
    "reward-phi3",
    "reward-olmo2",
    "reward-qwen3_5_text",
    "reward-mixtral",
    "reward-qwen3_next",
    "reward-deepseek_v3",
    "reward-gpt_oss",
];
pub const TEMPERATURE: f32 = 0.7;
pub const ENTROPY_COEF: f32 = 0.05;
/// Length of the prompt that the greedy continuation starts from.
pub const PROMPT: usize = 5;

pub fn directory(name: &str) -> PathBuf {
    let is_model = ["gemma3-old"].contains(&name);
    let name = if is_model { name } else { name.trim_end_matches("-experts").trim_end_matches("-old") };
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models").join(name)
}

/// The adapter of a model.
pub fn adapter(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/adapters").join(name)
}

/// The results of transformers for a model.
pub struct Golden {
    bytes: Vec<u8>,
}

impl Golden {
    pub fn read(name: &str) -> Self {
        Self::of(&directory(name))
    }

    /// The results of PEFT for a model with an adapter.
    pub fn of_adapter(name: &str) -> Self {
        Self::of(&adapter(name))
    }

    fn of(path: &Path) -> Self {
        Self { bytes: std::fs::read(path.with_extension("safetensors")).expect("the golden is checked in") }
    }

    pub fn floats(&self, name: &str) -> Vec<f32> {
        let tensors = SafeTensors::deserialize(&self.bytes).unwrap();
        let data = tensors.tensor(name).unwrap_or_else(|_| panic!("no golden {name}")).data();
        data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    pub fn integers(&self, name: &str) -> Vec<u32> {
        self.floats(name).into_iter().map(f32::to_bits).collect()
    }

    /// The length of the prompt that the greedy continuation starts from.
    pub fn prompt(&self) -> usize {
        let tensors = SafeTensors::deserialize(&self.bytes).expect("a golden");
        tensors.tensor("prompt").map_or(PROMPT, |prompt| prompt.data()[0].into())
    }

    /// The names of tensors that begin with `prefix`, without it.
    pub fn names(&self, prefix: &str) -> Vec<String> {
        let tensors = SafeTensors::deserialize(&self.bytes).expect("a golden");
        tensors.names().iter().filter_map(|n| n.strip_prefix(prefix)).map(str::to_owned).collect()
    }

    pub fn gradients(&self) -> Vec<String> {
        self.names("grad.")
    }
}

/// A loaded model with the packed rows of its golden.
pub struct Model {
    pub golden: Golden,
    pub weights: Weights,
    pub transformer: Transformer,
    pub tokens: Vec<u32>,
    pub positions: Vec<u32>,
    pub cu_seqlens: Vec<usize>,
}

impl Model {
    pub fn load(name: &str, head: Head, dtype: DType) -> Self {
        let (arch, weights) = load::load(Device::Cpu, &directory(name), head, dtype, 0).unwrap();
        Self::new(name, &arch, weights)
    }

    pub fn new(name: &str, arch: &Arch, weights: Weights) -> Self {
        Self::with_golden(Golden::read(name), arch, weights)
    }

    /// A model with its adapter, of which `weights` are what trains.
    pub fn of_adapter(name: &str, arch: &Arch, weights: Weights) -> Self {
        Self::with_golden(Golden::of_adapter(name), arch, weights)
    }

    /// A model with its adapter.
    pub fn adapted(name: &str, head: Head, dtype: DType) -> Self {
        let adapter = adapter(name);
        let (arch, weights) =
            load::load_with(Device::Cpu, &directory(name), Some(&adapter), head, dtype, 0).expect("an adapter");
        Self::of_adapter(name, &arch, weights)
    }

    fn with_golden(golden: Golden, arch: &Arch, weights: Weights) -> Self {
        let tokens = golden.integers("tokens");
        let cu_seqlens: Vec<usize> = golden.integers("cu_seqlens").into_iter().map(|n| n as usize).collect();
        let longest = cu_seqlens.windows(2).map(|ends| ends[1] - ends[0]).max().expect("a row");
        let transformer = Transformer::new(&arch.clone().for_rows(longest), &weights.table);
        let positions = packed_positions(&cu_seqlens);
        Self { golden, weights, transformer, tokens, positions, cu_seqlens }
    }

    pub fn hidden(&self, saved: Option<&mut Saved>) -> Tensor {
        let keys = Keys::Packed(self.cu_seqlens.as_slice().into());
        self.transformer.forward(&self.weights, &self.tokens, &self.positions, keys, saved)
    }

    /// Every row that has a next token, and that token.
    pub fn rows(&self) -> (Vec<u32>, Vec<u32>) {
        let sequences = self.cu_seqlens.windows(2);
        let rows: Vec<u32> = sequences.flat_map(|w| w[0] as u32..w[1] as u32 - 1).collect();
        let targets = rows.iter().map(|&r| self.tokens[r as usize + 1]).collect();
        (rows, targets)
    }

    /// The gradients of the golden's loss, and (logprobs, entropies).
    pub fn language_model_backward(&self) -> (Gradients, Vec<f32>, Vec<f32>) {
        self.backward_with(Recompute::None)
    }

    /// The same with recomputation.
    pub fn backward_with(&self, recompute: Recompute) -> (Gradients, Vec<f32>, Vec<f32>) {
        let mut grads = Gradients::new(self.weights.table.clone());
        let mut saved = Saved::new(recompute);
        let hidden = self.hidden(Some(&mut saved));
        let (rows, targets) = self.rows();
        let mut loss = |range: std::ops::Range<usize>, _: &[f32], _: &[f32], dl: &mut [f32], de: &mut [f32]| {
            dl.copy_from_slice(&weights(range));
            de.fill(ENTROPY_COEF);
        };
        let (dhidden, logprobs, entropy) = self.transformer.logprobs_backward(
            &self.weights,
            &hidden,
            &rows,
            &targets,
            TEMPERATURE,
            &mut loss,
            &mut grads,
        );
        self.transformer.backward(&self.weights, saved, &self.cu_seqlens, dhidden, &mut grads);
        (grads, logprobs, entropy)
    }
}

impl Model {
    /// The gradients of the golden's loss of a model with a value head, and the values.
    pub fn values_backward(&self) -> (Gradients, Vec<f32>) {
        let mut saved = Saved::new(false);
        let hidden = self.hidden(Some(&mut saved));
        let rows: Vec<u32> = (0..self.tokens.len() as u32).collect();
        let values = self.transformer.values(&self.weights, &hidden, &rows);
        let mut grads = Gradients::new(self.weights.table.clone());
        let dvalues = weights(0..rows.len());
        let dhidden = self.transformer.values_backward(&self.weights, &hidden, &rows, &dvalues, &mut grads);
        self.transformer.backward(&self.weights, saved, &self.cu_seqlens, dhidden, &mut grads);
        (grads, values)
    }
}

/// The loss weight of each number, as in models.py.
pub fn weights(range: std::ops::Range<usize>) -> Vec<f32> {
    range.map(|i| ((i * 7 % 11) as f32 - 3.0) / 10.0).collect()
}

pub fn gap(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    assert!(!a.is_empty());
    a.iter().zip(b).map(|(x, y)| (x - y).abs()).fold(0.0, |m, d| if d > m || d.is_nan() { d } else { m })
}

/// Asserts that every parameter's gradient lies within `tolerance` of the golden one's norm.
pub fn check_gradients(name: &str, golden: &Golden, grads: &Gradients, tolerance: f64) -> f64 {
    let names = golden.gradients();
    let params = grads.table.shapes();
    assert_eq!(names.len(), params.len(), "{name}: as many gradients as parameters");
    compare_gradients(name, golden, "grad.", grads, tolerance)
}

/// Asserts that the gradients of the golden whose names begin with `prefix` are those of `grads`.
pub fn compare_gradients(name: &str, golden: &Golden, prefix: &str, grads: &Gradients, tolerance: f64) -> f64 {
    let names = golden.names(prefix);
    let flat = grads.to_vec();
    let mut largest = 0.0f64;
    for in_file in names {
        let theirs = golden.floats(&format!("{prefix}{in_file}"));
        let parameter = in_file.replace("model.language_model.", "model.").replace("language_model.", "");
        let mut ours = vec![f32::NAN; theirs.len()];
        for spec in grads.table.specs().iter().filter(|spec| spec.file_name() == parameter) {
            let (rows, width) = (pack::unpack(spec, &flat[spec.range()]), spec.file_width());
            spec.file_rows().write(width, 0, &rows, &mut ours);
        }
        let is_still = name == "smollm3-window" && parameter.ends_with("k_proj.bias");
        assert!(is_still || theirs.iter().any(|x| *x != 0.0), "{name}: {parameter} has a gradient");
        let apart = relative_gap(&ours, &theirs);
        assert!(apart <= tolerance, "{name}: {parameter}: {apart:e}");
        largest = largest.max(apart);
    }
    largest
}
