//! The models that are measured: a directory, or a built-in shape with random weights.

use crate::comm::Axes;
use crate::device::Device;
use crate::error::Result;
use crate::learn::Role;
use crate::model::load::ModelFiles;
use crate::model::{Arch, Head, init};
use crate::rng::{Purpose, Rng};
use crate::tensor::DType;
use std::path::{Path, PathBuf};

const SEED: u64 = 0;

pub struct Source {
    pub name: String,
    pub arch: Arch,
    /// The model directory; random weights if none.
    dir: Option<PathBuf>,
}

impl Source {
    /// The model in a role; a language model gets a new value head if `head` requires one.
    pub fn role(&self, name: &'static str, head: Head, dtype: DType) -> Result<Role> {
        if let Some(dir) = &self.dir {
            let files = ModelFiles { dir, adapter: None, arch: &self.arch, head };
            return Role::load(Device::Cpu, name, &files, None, dtype, SEED, &Axes::one(), 1);
        }
        let weights = init::init(&self.arch, head, dtype, SEED);
        Ok(Role::new(name, Path::new(""), &self.arch, weights, &Axes::one()))
    }
}

/// A Llama of `layers` blocks, with the widths of the hidden state and the MLP, and the query and key/value heads.
pub fn llama(
    vocabulary: usize,
    [hidden, mlp]: [usize; 2],
    layers: usize,
    [heads, kv_heads]: [usize; 2],
    context: usize,
) -> Arch {
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocabulary, "hidden_size": hidden,
        "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "max_position_embeddings": context, "tie_word_embeddings": false,
    });
    Arch::from_config(config.as_object().expect("an object was written")).expect("a built-in shape is a model")
}

/// The models that `--model` selects.
pub fn sources(given: Option<&Path>) -> Result<Vec<Source>> {
    let tiny = llama(2048, [256, 688], 4, [8, 4], 1024);
    let small = llama(8192, [512, 1408], 8, [8, 4], 1024);
    let built_in = [("tiny", tiny), ("small", small)].map(|(name, arch)| Source { name: name.into(), arch, dir: None });
    let Some(dir) = given else { return Ok(built_in.into()) };
    if let Some(source) = built_in.into_iter().find(|source| dir == Path::new(&source.name)) {
        return Ok(vec![source]);
    }
    let name = dir.file_name().map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned());
    Ok(vec![Source { name, arch: Arch::load(dir)?, dir: Some(dir.to_path_buf()) }])
}

/// `n` random tokens of row `row`, without the first three (special ones).
pub fn tokens(n: usize, row: usize, vocabulary: usize) -> Vec<u32> {
    let rng = Rng::new(SEED, Purpose::Synthetic);
    let first = 3.min(vocabulary - 1);
    (0..n)
        .map(|i| (first as u64 + rng.below((vocabulary - first) as u64, [i as u32, row as u32, 0, 0])) as u32)
        .collect()
}
