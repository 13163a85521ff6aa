//! A dump of another program's computation, as `jobs/tools/dump_model.py` writes it with transformers.
//!
//! | tensor | shape | |
//! |---|---|---|
//! | `ids` | (t) | tokens of one sequence |
//! | `hidden.0` ... `hidden.L` | (t, d) | the embedding, the output of every layer but the last, the final norm's output |
//! | `logits` | (t, v) | after each token |
//! | `greedy` | (n) | the likeliest token after `ids`, after that one, and so on; may be absent |
//!
//! Metadata: `dtype` of the computation, `text` that `ids` encode (may be absent), `model` and `program`.

use super::computation::Computation;
use crate::error::{Error, Result};
use crate::model::TensorFile;
use crate::tensor::DType;
use std::path::Path;

/// A read dump.
#[derive(Debug)]
pub struct Dump {
    pub computation: Computation,
    /// The text that the ids encode.
    pub text: Option<String>,
    /// The program that wrote it.
    pub program: String,
    /// Whether all of its hidden states are numbers of bf16.
    pub has_bf16_values: bool,
}

impl Dump {
    /// Reads a dump.
    ///
    /// # Errors
    /// `Data` if the file is damaged, a tensor is missing or unknown, or shapes do not match.
    pub fn read(path: &Path) -> Result<Self> {
        let file = TensorFile::open(path)?;
        let wrong = |what: String| {
            Error::data(format!("{}: {what}", path.display())).hint("write it with jobs/tools/dump_model.py")
        };
        let missing = |name: &str| wrong(format!("tensor {name} is missing"));
        let floats = |name: &str, rows: usize| {
            let (shape, values) = file.floats(name)?.ok_or_else(|| missing(name))?;
            match shape[..] {
                [n, width] if n == rows && width > 0 => Ok((width, values)),
                _ => Err(wrong(format!("tensor {name} must have a row for each of {rows} tokens (got {shape:?})"))),
            }
        };
        let states = file.names().filter(|name| name.starts_with("hidden.")).count();
        let known = |name: &str| {
            ["ids", "logits", "greedy"].contains(&name) || (0..states).any(|i| name == format!("hidden.{i}"))
        };
        if let Some(name) = file.names().find(|name| !known(name)) {
            return Err(wrong(format!("tensor {name} is unknown; hidden states are hidden.0 and on")));
        }
        let ids = file.ids("ids")?.ok_or_else(|| missing("ids"))?;
        if ids.is_empty() || states < 2 {
            return Err(wrong("it must have at least 1 token and 2 hidden states".into()));
        }
        let mut hidden = Vec::with_capacity(states);
        let mut width = 0;
        for i in 0..states {
            let (columns, values) = floats(&format!("hidden.{i}"), ids.len())?;
            if i > 0 && columns != width {
                return Err(wrong(format!("hidden.{i} has {columns} columns, but hidden.0 has {width}")));
            }
            width = columns;
            hidden.push(values);
        }
        let dtype = match file.metadata("dtype").map(|name| name.trim_start_matches("torch.")) {
            Some("float32" | "float64") => DType::F32,
            Some("bfloat16" | "float16") => DType::Bf16,
            None => return Err(wrong("its metadata lacks dtype".into())),
            Some(other) => return Err(wrong(format!("dtype must be float32 or bfloat16 (got {other})"))),
        };
        let is_bf16 = |x: &f32| half::bf16::from_f32(*x).to_f32().to_bits() == x.to_bits();
        let has_bf16_values = hidden.iter().flatten().all(is_bf16);
        let computation = Computation {
            name: path.display().to_string(),
            dtype,
            width,
            hidden,
            logits: floats("logits", ids.len())?.1,
            greedy: file.ids("greedy")?.unwrap_or_default(),
            greedy_logprobs: Vec::new(),
            ids,
        };
        let text = |key: &str| file.metadata(key).map(str::to_owned);
        let program = text("program").unwrap_or_else(|| "unknown program".into());
        Ok(Self { computation, text: text("text"), program, has_bf16_values })
    }
}
