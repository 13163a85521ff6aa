//! Directories that transformers saves with bitsandbytes (nf4): values are bitsandbytes's own, and damage is named.

use rlhf_hpc::model::bitsandbytes::{QuantizedFiles, is_nf4, is_part};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/nf4").join(name)
}

/// Tensors by name: dtype, shape, bytes.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn read(path: &Path) -> Tensors {
    let bytes = fs::read(path).expect("the golden is checked in");
    let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
    let owned = |(name, t): (String, TensorView)| (name, (t.dtype(), t.shape().to_vec(), t.data().to_vec()));
    tensors.tensors().into_iter().map(owned).collect()
}

fn write(path: &Path, tensors: &Tensors) {
    let views = tensors
        .iter()
        .map(|(name, (dtype, shape, bytes))| (name, TensorView::new(*dtype, shape.clone(), bytes).expect("a tensor")));
    fs::write(path, safetensors::serialize(views, None).expect("it is valid")).expect("a file");
}

#[test]
fn matrices_saved_by_transformers_have_the_values_of_bitsandbytes() {
    for name in ["plain", "nested"] {
        let (files, want) =
            (QuantizedFiles::open(&golden(name)).unwrap(), read(&golden(&format!("{name}.safetensors"))));
        assert_eq!(files.names().collect::<Vec<_>>(), want.keys().collect::<Vec<_>>(), "{name}");
        for (parameter, (_, shape, bytes)) in &want {
            let matrix = files.get(parameter).unwrap().expect("it is quantized");
            assert_eq!([matrix.n, matrix.k], shape[..], "{parameter}");
            let mut values = vec![0.0; matrix.n * matrix.k];
            matrix.read(0, &mut values);
            let bits: Vec<u8> = values.iter().flat_map(|x| ((x.to_bits() >> 16) as u16).to_le_bytes()).collect();
            assert!(bits == *bytes, "{name}: {parameter}");
        }
        for other in ["model.norm.weight", "model.layers.0.self_attn.q_proj.bias", "model.layers.9.mlp.up_proj.weight"]
        {
            assert!(files.get(other).unwrap().is_none(), "{other}");
        }
        let stored = read(&golden(name).join("model.safetensors"));
        let parts = stored.keys().filter(|name| is_part(name)).count();
        assert_eq!(parts, want.len() * if name == "nested" { 5 } else { 3 });
        let config: Map<String, Value> =
            serde_json::from_slice(&fs::read(golden(name).join("config.json")).unwrap()).unwrap();
        assert!(is_nf4(&config).unwrap());
    }
}

const NAME: &str = "model.layers.0.mlp.up_proj.weight";
const STATE: &str = "quant_state.bitsandbytes__nf4";

/// Replaces a value in the JSON of the matrix.
fn set(tensors: &mut Tensors, key: &str, value: Value) {
    let (_, shape, bytes) = tensors.get_mut(&format!("{NAME}.{STATE}")).expect("its state");
    let mut state: Map<String, Value> = serde_json::from_slice(bytes).expect("JSON");
    state.insert(key.into(), value);
    *bytes = serde_json::to_vec(&state).expect("JSON");
    *shape = vec![bytes.len()];
}

/// Keeps the first `len` bytes of a part, as a vector.
fn cut(tensors: &mut Tensors, part: &str, len: usize) {
    let (dtype, shape, bytes) = tensors.get_mut(&format!("{NAME}{part}")).expect("a part");
    bytes.truncate(len);
    *shape = vec![len * 8 / dtype.bitsize()];
}

fn part<'a>(tensors: &'a mut Tensors, name: &str) -> &'a mut (Dtype, Vec<usize>, Vec<u8>) {
    tensors.get_mut(&format!("{NAME}.{name}")).expect("a part")
}

fn rename(tensors: &mut Tensors, from: &str, to: &str) {
    let tensor = tensors.remove(&format!("{NAME}.{from}")).expect("a part");
    tensors.insert(format!("{NAME}.{to}"), tensor);
}

#[test]
fn damaged_or_otherwise_quantized_matrices_are_rejected_with_their_names() {
    type Edit = fn(&mut Tensors);
    let cases: [(&str, Edit, &str); 21] = [
        ("plain", |t| rename(t, STATE, "quant_state.bitsandbytes__fp4"), "up_proj.weight is quantized to fp4, not nf4"),
        ("plain", |t| t.get_mut(NAME).unwrap().0 = Dtype::I8, "up_proj.weight is quantized to int8, not nf4"),
        ("plain", |t| drop(t.remove(&format!("{NAME}.{STATE}"))), "bitsandbytes__nf4 is missing"),
        (
            "plain",
            |t| set(t, "quant_type", json!("fp4")),
            "bitsandbytes__nf4: quant_type must be \"nf4\" (got \"fp4\")",
        ),
        ("plain", |t| set(t, "blocksize", json!(128)), "bitsandbytes__nf4: blocksize must be 64 (got 128)"),
        ("plain", |t| set(t, "shape", json!([6144])), "shape must be [outputs, inputs] (got [6144])"),
        ("plain", |t| set(t, "shape", json!([96, 65])), "of shape [96, 65] must have 3120 bytes (got 3072)"),
        ("plain", |t| set(t, "shape", json!([1u64 << 40, 1u64 << 40])), "up_proj.weight is too large"),
        ("plain", |t| cut(t, &format!(".{STATE}"), 20), "bitsandbytes__nf4: not a JSON object: EOF"),
        ("plain", |t| cut(t, "", 3071), "of shape [96, 64] must have 3072 bytes (got 3071)"),
        ("plain", |t| cut(t, ".absmax", 4 * 95), "absmax must have 96 values of type F32 (got 95 of type F32)"),
        ("plain", |t| drop(t.remove(&format!("{NAME}.absmax"))), "up_proj.weight.absmax is missing"),
        ("plain", |t| part(t, "absmax").2[..4].fill(0xff), "absmax contains NaN or infinite values"),
        ("plain", |t| part(t, "quant_map").2[4] ^= 1, "up_proj.weight has a quant_map that is not the table of nf4"),
        ("nested", |t| set(t, "nested_blocksize", json!(64)), "nested_blocksize must be 256 (got 64)"),
        ("nested", |t| set(t, "nested_dtype", json!("float16")), "nested_dtype must be \"float32\" (got \"float16\")"),
        ("nested", |t| set(t, "nested_offset", Value::Null), "nested_offset must be a number (got null)"),
        ("nested", |t| cut(t, ".absmax", 95), "absmax must have 96 values of type U8 (got 95 of type U8)"),
        ("nested", |t| cut(t, ".nested_absmax", 0), "nested_absmax must have 1 values of type F32 (got 0 of type F32)"),
        ("nested", |t| cut(t, ".nested_quant_map", 1020), "nested_quant_map must have 256 values of type F32 (got 255"),
        ("nested", |t| rename(t, "nested_absmax", "other"), "up_proj.weight.nested_absmax is missing"),
    ];
    for (name, edit, wanted) in cases {
        let dir = tempfile::tempdir().expect("a directory");
        let mut tensors = read(&golden(name).join("model.safetensors"));
        edit(&mut tensors);
        write(&dir.path().join("model.safetensors"), &tensors);
        let files = QuantizedFiles::open(dir.path()).expect("safetensors");
        let error = files.get(NAME).expect_err(wanted);
        assert!(error.message.contains(wanted) && error.message.contains("model.safetensors: "), "{}", error.message);
        assert_eq!(error.exit_code(), 65);
        // The other matrices are intact.
        assert!(files.get("model.layers.0.mlp.down_proj.weight").expect("intact").is_some());
    }
    let dir = tempfile::tempdir().expect("a directory");
    let bytes = fs::read(golden("plain").join("model.safetensors")).expect("the golden");
    fs::write(dir.path().join("model.safetensors"), &bytes[..bytes.len() - 9]).expect("a file");
    let error = QuantizedFiles::open(dir.path()).err().expect("a truncated file");
    assert!(error.message.contains("model.safetensors: the file is truncated: needs "), "{}", error.message);
}

#[test]
fn other_quantizations_are_rejected_by_the_key_of_config_json() {
    let nf4 = json!({"load_in_4bit": true, "bnb_4bit_quant_type": "nf4", "quant_method": "bitsandbytes"});
    let cases = [
        (
            json!({"quant_method": "gptq"}),
            "quantization_config.quant_method must be \"bitsandbytes\" or \"fp8\" (got \"gptq\")",
        ),
        (json!({"load_in_8bit": true}), "quantization_config.load_in_8bit must be false"),
        (json!({"load_in_4bit": false}), "quantization_config.load_in_4bit must be true"),
        (json!({"load_in_4bit": "yes"}), "quantization_config.load_in_4bit must be true or false, got \"yes\""),
        (json!({"bnb_4bit_quant_type": "fp4"}), "bnb_4bit_quant_type must be \"nf4\" (got \"fp4\")"),
        (json!({"bnb_4bit_quant_type": null}), "bnb_4bit_quant_type must be \"nf4\" (got \"fp4\")"),
    ];
    for (change, wanted) in cases {
        let mut quantization = nf4.as_object().expect("an object").clone();
        quantization.extend(change.as_object().expect("an object").clone());
        let config = Map::from_iter([("quantization_config".to_owned(), Value::Object(quantization))]);
        let error = is_nf4(&config).expect_err(wanted);
        assert!(error.message.contains(wanted), "{}", error.message);
    }
    assert!(is_nf4(&Map::from_iter([("quantization_config".to_owned(), nf4)])).expect("nf4"));
    assert!(!is_nf4(&Map::new()).expect("not quantized"));
}
