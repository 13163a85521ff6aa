//! The models that are measured: a directory, or a built-in shape with random weights.

use crate::comm::Axes;
use crate::device::Device;
use crate::error::Result;
use crate::learn::Role;
use crate::model::{Arch, Head, init};
use crate::rng::{Purpose, Rng};
use crate::tensor::DType;
use std::path::{Path, PathBuf};

const SEED: u64 = 0;

pub enum Source {
    Dir(PathBuf),
    New(&'static str, Box<Arch>),
}

impl Source {
    pub fn name(&self) -> String {
        match self {
            Self::Dir(dir) => {
                dir.file_name().map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned())
            }
            Self::New(name, _) => (*name).to_string(),
        }
    }

    pub fn arch(&self) -> Result<Arch> {
        match self {
            Self::Dir(dir) => Arch::load(dir),
            Self::New(_, arch) => Ok(Arch::clone(arch)),
        }
    }

    /// The model in a role; a language model gets a new value head where one is asked for.
    pub fn role(&self, name: &'static str, head: Head, dtype: DType) -> Result<Role> {
        match self {
            Self::Dir(dir) => Role::load(Device::Cpu, name, dir, head, dtype, SEED, &Axes::one(), 1),
            Self::New(_, arch) => {
                let weights = init::init(arch, head, dtype, SEED);
                Ok(Role::new(name, Path::new(""), arch, weights, &Axes::one()))
            }
        }
    }
}

/// The built-in shapes: hidden 256, 4 layers, MLP 688, vocabulary 2048; and 512, 8, 1408, 8192; both 8 heads over 4.
fn built_in(name: &'static str) -> Source {
    let small = name == "small";
    let pick = |tiny: usize, other: usize| if small { other } else { tiny };
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": pick(2048, 8192),
        "hidden_size": pick(256, 512),
        "intermediate_size": pick(688, 1408),
        "num_hidden_layers": pick(4, 8),
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": false,
    });
    let arch =
        Arch::from_config(config.as_object().expect("an object was written")).expect("a built-in shape is a model");
    Source::New(name, Box::new(arch))
}

/// The models that `--model` names.
pub fn sources(given: Option<&Path>) -> Vec<Source> {
    match given {
        None => vec![built_in("tiny"), built_in("small")],
        Some(path) if path == Path::new("tiny") => vec![built_in("tiny")],
        Some(path) if path == Path::new("small") => vec![built_in("small")],
        Some(path) => vec![Source::Dir(path.to_path_buf())],
    }
}

/// `n` random tokens of row `row`, none of the first three (special ones).
pub fn tokens(n: usize, row: usize, vocabulary: usize) -> Vec<u32> {
    let rng = Rng::new(SEED, Purpose::Corpus);
    let first = 3.min(vocabulary - 1);
    (0..n)
        .map(|i| (first as u64 + rng.below((vocabulary - first) as u64, [i as u32, row as u32, 0, 0])) as u32)
        .collect()
}
