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

/// A Llama of `layers` blocks: widths of hidden and MLP; heads over heads of keys and values.
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

fn tiny() -> Source {
    Source::New("tiny", Box::new(llama(2048, [256, 688], 4, [8, 4], 1024)))
}

fn small() -> Source {
    Source::New("small", Box::new(llama(8192, [512, 1408], 8, [8, 4], 1024)))
}

/// The models that `--model` names.
pub fn sources(given: Option<&Path>) -> Vec<Source> {
    match given {
        None => vec![tiny(), small()],
        Some(path) if path == Path::new("tiny") => vec![tiny()],
        Some(path) if path == Path::new("small") => vec![small()],
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
