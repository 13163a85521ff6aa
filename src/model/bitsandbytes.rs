//! Matrices that bitsandbytes has quantized to nf4, in the safetensors files of a model directory.
//!
//! | tensor | contents |
//! |---|---|
//! | X.weight | the codes, two a byte |
//! | X.weight.absmax | the scale of each 64 values, F32; U8 with double quantization |
//! | X.weight.quant_map | the 16 values of the codes |
//! | X.weight.quant_state.bitsandbytes__nf4 | JSON: shape, sizes of blocks, the offset of quantized scales |
//! | X.weight.nested_absmax | the largest magnitude of each 256 quantized scales |
//! | X.weight.nested_quant_map | the 256 values of the codes of scales |

use super::config_json::Reader;
use super::files::{Checkpoint, Stored};
use super::fp8;
use crate::error::{Error, Result};
use crate::tensor::nf4::{Absmax, BLOCK, NESTED_BLOCK, Nested, Nf4, TABLE};
use safetensors::Dtype;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::path::Path;

/// The key of config.json. An export in another type does not have it.
pub(super) const QUANTIZATION: &str = "quantization_config";
const STATE: &str = "quant_state.bitsandbytes__";
const PARTS: [&str; 4] = ["absmax", "quant_map", "nested_absmax", "nested_quant_map"];
const HINT: &str = "use a model that is not quantized, or one in nf4 (`bnb_4bit_quant_type = \"nf4\"`)";

/// Whether config.json describes weights in nf4. False if they are not quantized, or in FP8.
///
/// # Errors
/// `Data` if they are quantized in another way.
pub fn is_nf4(config: &Map<String, Value>) -> Result<bool> {
    let config = Reader::new(config);
    let Some(quantization) = config.object(QUANTIZATION)? else { return Ok(false) };
    let wrong = |key: &str, what: String| Err(quantization.wrong(key, &what).hint(HINT));
    if quantization.text("quant_method")?.as_deref() == Some("fp8") {
        return fp8::check_config(&quantization).map(|()| false);
    }
    if let Some(method) = quantization.text("quant_method")?.filter(|method| method != "bitsandbytes") {
        return wrong("quant_method", format!("must be \"bitsandbytes\" or \"fp8\" (got \"{method}\")"));
    }
    if quantization.flag("load_in_8bit")? == Some(true) {
        return wrong("load_in_8bit", "must be false: int8 weights are not supported".into());
    }
    if quantization.flag("load_in_4bit")? != Some(true) {
        return wrong("load_in_4bit", "must be true".into());
    }
    // The default of transformers is fp4.
    match quantization.text("bnb_4bit_quant_type")?.as_deref().unwrap_or("fp4") {
        "nf4" => Ok(true),
        other => wrong("bnb_4bit_quant_type", format!("must be \"nf4\" (got \"{other}\")")),
    }
}

/// Whether a tensor of this name belongs to a quantized matrix.
pub fn is_part(name: &str) -> bool {
    let suffix = name.split_once(".weight.").map(|(_, suffix)| suffix);
    suffix.is_some_and(|suffix| PARTS.contains(&suffix) || suffix.starts_with(STATE))
}

/// The quantized matrices of a model directory.
pub struct QuantizedFiles(Checkpoint);

impl QuantizedFiles {
    /// Opens the safetensors files of a directory.
    ///
    /// # Errors
    /// `Data`, naming the file, if one is damaged or missing.
    pub fn open(dir: &Path) -> Result<Self> {
        Checkpoint::open(dir).map(Self)
    }

    /// The names of the quantized parameters.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.names().filter_map(|name| Some(name.split_once(&format!(".{STATE}"))?.0))
    }

    /// The parameter `name`; `None` if it is not quantized or not in the files.
    ///
    /// # Errors
    /// Those of `Quantized::check`.
    pub fn get(&self, name: &str) -> Result<Option<Nf4<'_>>> {
        let checked = Quantized::check(&self.0, name)?;
        Ok(checked.map(|quantized| quantized.matrix(&self.0, name)))
    }
}

/// A quantized matrix whose tensors were checked.
#[derive(Clone, Copy, Debug)]
pub(super) struct Quantized {
    /// Outputs and inputs.
    pub shape: [usize; 2],
    /// With double quantization.
    nested_offset: Option<f32>,
}

impl Quantized {
    /// The parameter `name` if the files contain it in nf4.
    ///
    /// # Errors
    /// `Data`, naming the file and tensor: another quantization, other sizes of blocks, missing or inconsistent tensors,
    /// or scales that are not finite.
    pub fn check(checkpoint: &Checkpoint, name: &str) -> Result<Option<Self>> {
        let Some(codes) = checkpoint.get(name) else { return Ok(None) };
        let path = codes.path.display();
        let refused = |what: &str| Error::data(format!("{path}: tensor {name} {what}")).hint(HINT);
        if checkpoint.get(&format!("{name}.{STATE}fp4")).is_some() {
            return Err(refused("is quantized to fp4, not nf4"));
        }
        if codes.dtype == Dtype::I8 {
            return Err(refused("is quantized to int8, not nf4"));
        }
        let Some(state) = checkpoint.get(&format!("{name}.{STATE}nf4")) else {
            let has_part = |part: &&str| checkpoint.get(&format!("{name}.{part}")).is_some();
            return if codes.dtype == Dtype::U8 || PARTS.iter().any(has_part) {
                Err(refused(&format!("is quantized, but {name}.{STATE}nf4 is missing")))
            } else {
                Ok(None)
            };
        };
        let parts = Parts { checkpoint, path: codes.path, name };
        let quantized = Self::parse(&state).map_err(|e| e.within(format_args!("{path}: {name}.{STATE}nf4")))?;
        let [n, k] = quantized.shape;
        let len = n.checked_mul(k).ok_or_else(|| refused("is too large"))?;
        if codes.bytes.len() != len.div_ceil(2) {
            let (needed, bytes) = (len.div_ceil(2), codes.bytes.len());
            return Err(damaged(
                codes.path,
                &format!("tensor {name} of shape [{n}, {k}] must have {needed} bytes (got {bytes})"),
            ));
        }
        parts.check_f32("quant_map", TABLE.len())?;
        if parts.f32("quant_map") != TABLE {
            return Err(refused("has a quant_map that is not the table of nf4"));
        }
        let blocks = len.div_ceil(BLOCK);
        if quantized.nested_offset.is_some() {
            parts.get("absmax", Dtype::U8, blocks)?;
            parts.check_f32("nested_absmax", blocks.div_ceil(NESTED_BLOCK))?;
            parts.check_f32("nested_quant_map", 256)?;
        } else {
            parts.check_f32("absmax", blocks)?;
        }
        Ok(Some(quantized))
    }

    /// The checked matrix `name`. Codes stay in the mapped file.
    pub fn matrix<'a>(&self, checkpoint: &'a Checkpoint, name: &str) -> Nf4<'a> {
        let found = |name: &str| checkpoint.get(name).expect("it was checked");
        let (parts, [n, k]) = (Parts { checkpoint, path: found(name).path, name }, self.shape);
        let scales = match self.nested_offset {
            None => Absmax::F32(parts.f32("absmax").into()),
            Some(offset) => {
                let map = Box::new(<[f32; 256]>::try_from(parts.f32("nested_quant_map")).expect("it was checked"));
                let codes = Cow::Borrowed(found(&format!("{name}.absmax")).bytes);
                Absmax::Nested(Nested::new(codes, parts.f32("nested_absmax").into(), map, offset))
            }
        };
        Nf4 { n, k, codes: Cow::Borrowed(found(name).bytes), scales }
    }

    /// Reads the JSON of a quantized matrix.
    fn parse(stored: &Stored) -> Result<Self> {
        let object = serde_json::from_slice::<Map<String, Value>>(stored.bytes);
        let object = object.map_err(|e| Error::data(format!("not a JSON object: {e}")))?;
        let must = |key: &str, wanted: &str| {
            let got = object.get(key).unwrap_or(&Value::Null);
            Error::data(format!("{key} must be {wanted} (got {got})"))
        };
        let need = |key: &str, wanted: Value| match object.get(key) {
            Some(got) if *got == wanted => Ok(()),
            _ => Err(must(key, &wanted.to_string()).hint(HINT)),
        };
        need("quant_type", "nf4".into())?;
        need("blocksize", BLOCK.into())?;
        let size = |dim: &Value| dim.as_u64().map(|dim| dim as usize).filter(|dim| *dim > 0);
        let shape: Option<Vec<usize>> =
            object.get("shape").and_then(Value::as_array).and_then(|all| all.iter().map(size).collect());
        let shape = shape.and_then(|shape| <[usize; 2]>::try_from(shape).ok());
        let shape = shape.ok_or_else(|| must("shape", "[outputs, inputs]"))?;
        if !object.contains_key("nested_blocksize") {
            return Ok(Self { shape, nested_offset: None });
        }
        need("nested_blocksize", NESTED_BLOCK.into())?;
        need("nested_dtype", "float32".into())?;
        let offset = object.get("nested_offset").and_then(Value::as_f64).map(|x| x as f32).filter(|x| x.is_finite());
        Ok(Self { shape, nested_offset: Some(offset.ok_or_else(|| must("nested_offset", "a number"))?) })
    }
}

fn damaged(path: &Path, what: &str) -> Error {
    Error::data(format!("{}: {what}", path.display())).hint("copy or download the model again")
}

/// The tensors of one matrix.
struct Parts<'a, 'n> {
    checkpoint: &'a Checkpoint,
    path: &'a Path,
    name: &'n str,
}

impl<'a> Parts<'a, '_> {
    fn get(&self, part: &str, dtype: Dtype, len: usize) -> Result<Stored<'a>> {
        let name = format!("{}.{part}", self.name);
        let found = self.checkpoint.get(&name);
        let found = found.ok_or_else(|| damaged(self.path, &format!("tensor {name} is missing")))?;
        let elements: usize = found.shape.iter().product();
        if (found.dtype, elements) != (dtype, len) {
            let got = format!("{elements} of type {:?}", found.dtype);
            let what = format!("tensor {name} must have {len} values of type {dtype:?} (got {got})");
            return Err(damaged(found.path, &what));
        }
        Ok(found)
    }

    /// Checks that a part has `len` finite values.
    fn check_f32(&self, part: &str, len: usize) -> Result<()> {
        let found = self.get(part, Dtype::F32, len)?;
        if self.f32(part).iter().all(|x| x.is_finite()) {
            return Ok(());
        }
        Err(damaged(found.path, &format!("tensor {}.{part} contains NaN or infinite values", self.name)))
    }

    /// The values of a checked part.
    fn f32(&self, part: &str) -> Vec<f32> {
        let found = self.checkpoint.get(&format!("{}.{part}", self.name)).expect("it was checked");
        let (values, _) = found.bytes.as_chunks::<4>();
        values.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }
}
