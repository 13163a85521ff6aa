//! Tiny models that are awkward to cut, whole and cut.

use rlhf_hpc::comm::{Axes, World};
use rlhf_hpc::mesh::Mesh;
use rlhf_hpc::model::pack::{held_at, pack_f32, unpack};
use rlhf_hpc::model::{Arch, Gradients, Head, ParamId, ParamSpec, ParamTable, TensorPart, Transformer, Weights, init};
use rlhf_hpc::tensor::DType;
use std::path::PathBuf;
use std::sync::Arc;

/// What of an architecture matters to a cut.
pub struct Shape {
    pub name: &'static str,
    pub family: &'static str,
    pub heads: usize,
    pub kv_heads: usize,
    pub vocabulary: usize,
    pub mlp: usize,
    pub tied: bool,
    pub bias: bool,
    pub window: Option<usize>,
}

const PLAIN: Shape = Shape {
    name: "llama",
    family: "llama",
    heads: 8,
    kv_heads: 2,
    vocabulary: 97,
    mlp: 100,
    tied: false,
    bias: false,
    window: None,
};

pub const SHAPES: &[Shape] = &[
    PLAIN,
    Shape { name: "llama-tied", kv_heads: 1, vocabulary: 301, mlp: 37, tied: true, bias: true, ..PLAIN },
    Shape { name: "mistral", family: "mistral", kv_heads: 8, window: Some(7), ..PLAIN },
    Shape { name: "mistral-grouped", family: "mistral", kv_heads: 4, window: Some(3), mlp: 130, ..PLAIN },
    Shape { name: "qwen2", family: "qwen2", kv_heads: 2, tied: true, ..PLAIN },
    Shape { name: "qwen3", family: "qwen3", kv_heads: 1, mlp: 259, ..PLAIN },
    Shape { name: "qwen3-tied", family: "qwen3", kv_heads: 2, vocabulary: 515, tied: true, bias: true, ..PLAIN },
    Shape { name: "irregular", family: "qwen3", heads: 12, kv_heads: 3, vocabulary: 101, mlp: 51, ..PLAIN },
];

const WIDTH: usize = 48;
pub const CONTEXT: usize = 128;

impl Shape {
    pub fn arch(&self) -> Arch {
        let class = match self.family {
            "mistral" => "MistralForCausalLM",
            "qwen2" => "Qwen2ForCausalLM",
            "qwen3" => "Qwen3ForCausalLM",
            _ => "LlamaForCausalLM",
        };
        let config = serde_json::json!({
            "model_type": self.family, "architectures": [class], "hidden_size": WIDTH, "intermediate_size": self.mlp,
            "num_hidden_layers": 2, "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "head_dim": 6, "vocab_size": self.vocabulary, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": self.tied, "initializer_range": 0.15,
            "attention_bias": self.bias, "mlp_bias": self.bias, "sliding_window": self.window, "eos_token_id": 2
        });
        Arch::from_config(config.as_object().expect("an object")).expect("a model that is known")
    }

    pub fn fits(&self, tensor: usize) -> bool {
        self.arch().check_tensor(tensor).is_ok()
    }

    /// Three sequences in one row: (tokens, cu_seqlens).
    pub fn row(&self) -> (Vec<u32>, Vec<usize>) {
        let tokens = (0..61).map(|i| ((i * i * 13 + 5 * i) % self.vocabulary) as u32).collect();
        (tokens, vec![0, 20, 21, 61])
    }
}

/// A model on one rank, and this rank's part of it.
pub struct Cut {
    pub whole: (Transformer, Weights),
    pub part: (Transformer, Weights),
}

impl Cut {
    /// Random weights, biases and norms too.
    pub fn new(world: &World, shape: &Shape, head: Head, dtype: DType) -> Self {
        let arch = shape.arch();
        let mut whole = init::init(&arch, head, dtype, 7);
        let mut master = whole.to_master(0..whole.table.len());
        for spec in whole.table.specs().iter().filter(|s| s.shape.len() == 1) {
            let vector = &mut master[spec.offset..spec.offset + spec.elements()];
            vector.iter_mut().enumerate().for_each(|(i, x)| *x += 0.2 * (i as f32 * 1.7).sin());
        }
        whole.store_master(0..whole.table.len(), &master);
        let master = whole.to_master(0..whole.table.len());
        let axes = axes(world);
        let table = Arc::new(ParamTable::part(&arch, head, TensorPart::of(&axes.tensor)));
        let mut part = Weights::zeros(table.clone(), dtype);
        let mut flat = vec![0.0; table.len()];
        for (spec, of) in table.specs().iter().zip(whole.table.specs()) {
            shard(of, &master[of.range()], spec, &mut flat[spec.range()]);
        }
        part.store_master(0..table.len(), &flat);
        let models = (Transformer::new(&arch, &whole.table), Transformer::over(&arch, &table, &axes));
        Self { whole: (models.0, whole), part: (models.1, part) }
    }

    fn parts(&self, size: usize) -> Vec<ParamTable> {
        let (arch, head) = (&self.whole.0.arch, self.whole.1.table.head());
        (0..size).map(|rank| ParamTable::part(arch, head, TensorPart { rank, size })).collect()
    }

    /// The whole flat buffer from everyone's.
    pub fn joined(&self, world: &World, flat: &[f32]) -> Vec<f32> {
        let all = world.group().all_gather_bytes(bytemuck::cast_slice(flat));
        let all: Vec<Vec<f32>> = all.iter().map(|bytes| numbers(bytes)).collect();
        let tables = self.parts(world.size);
        let mut whole = vec![f32::NAN; self.whole.1.table.len()];
        for (i, of) in self.whole.1.table.specs().iter().enumerate() {
            let parts: Vec<_> =
                tables.iter().zip(&all).map(|(t, flat)| (&t.specs()[i], &flat[t.specs()[i].range()])).collect();
            gather(&parts, of, &mut whole[of.range()]);
        }
        whole
    }

    /// This rank's part of a whole flat buffer.
    pub fn cut(&self, whole: &[f32]) -> Vec<f32> {
        let table = &self.part.1.table;
        let mut flat = vec![f32::NAN; table.len()];
        for (spec, of) in table.specs().iter().zip(self.whole.1.table.specs()) {
            shard(of, &whole[of.range()], spec, &mut flat[spec.range()]);
        }
        flat
    }
}

/// The flat bf16 values.
pub fn halves(weights: &Weights) -> Vec<u16> {
    (0..weights.table.units().len()).flat_map(|unit| weights.local(unit).slice().bf16().to_vec()).collect()
}

/// The flat f32 values.
pub fn floats(weights: &Weights) -> Vec<f32> {
    weights.to_master(0..weights.table.len()).to_vec()
}

/// The flat gradient.
pub fn gradient(grads: &Gradients) -> Vec<f32> {
    (0..grads.table.specs().len()).flat_map(|i| grads.of(ParamId(i)).to_vec()).collect()
}

/// All ranks along the tensor axis.
pub fn axes(world: &World) -> Axes {
    world.axes(&Mesh { data: 1, pipeline: 1, sequence: 1, tensor: world.size }).expect("all ranks")
}

fn numbers(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_ne_bytes(b.try_into().expect("4 bytes"))).collect()
}

pub fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// `out`, the values of a part, from those of the whole parameter.
pub fn shard(whole: &ParamSpec, from: &[f32], part: &ParamSpec, out: &mut [f32]) {
    let rows = unpack(whole, from);
    pack_f32(part, &|at, to| to.copy_from_slice(&rows[at..at + to.len()]), 0..part.len, out);
}

/// `out`, the values of the whole parameter, from those of its parts; of copies the last.
pub fn gather(parts: &[(&ParamSpec, &[f32])], whole: &ParamSpec, out: &mut [f32]) {
    let value = |i: usize| {
        let held = parts.iter().rev().find_map(|(spec, values)| Some(values[held_at(spec, i)?.0 - spec.offset]));
        held.expect("a part holds each element")
    };
    let rows: Vec<f32> = (0..whole.elements()).map(value).collect();
    pack_f32(whole, &|at, to| to.copy_from_slice(&rows[at..at + to.len()]), 0..whole.len, out);
}

/// An element of a flat buffer: f32, or a bf16 in its u16.
pub trait Element: Copy + Default + PartialEq {
    /// Neighbouring columns that interleave in a panel.
    const INTERLEAVED: usize;
}

impl Element for f32 {
    const INTERLEAVED: usize = 1;
}

impl Element for u16 {
    const INTERLEAVED: usize = 2;
}

/// Element by element, by the layout's own words: `part` holds what its spec says of the whole, and zeros.
pub fn is_slice<T: Element>(spec: &ParamSpec, part: &[T], of: &ParamSpec, whole: &[T]) {
    use rlhf_hpc::tensor::{Layout, PANEL};
    let width = |spec: &ParamSpec| if spec.shape.len() == 1 { 1 } else { spec.shape[1] };
    let at = |spec: &ParamSpec, row: usize, column: usize| {
        let k = width(spec);
        if spec.layout == Layout::Row || T::INTERLEAVED == 1 {
            return spec.layout.index(k, row, column);
        }
        row / PANEL * PANEL * k.next_multiple_of(2) + column / 2 * 2 * PANEL + row % PANEL * 2 + column % 2
    };
    let mut expected = vec![T::default(); spec.len];
    for (local, row) in spec.rows.iter().cloned().flatten().enumerate() {
        for (c, column) in spec.columns.clone().enumerate() {
            expected[at(spec, local, c)] = whole[at(of, row, column)];
        }
    }
    assert!(part == expected, "{}: rows {:?}, columns {:?}", spec.name, spec.rows, spec.columns);
}

/// A directory of this test that all ranks see; it stays until the system clears it.
pub fn shared_directory(world: &World) -> PathBuf {
    let mut path = Vec::new();
    if world.rank == 0 {
        let dir = tempfile::tempdir().expect("a temporary directory").keep();
        path = dir.to_str().expect("a plain path").as_bytes().to_vec();
    }
    world.group().broadcast_bytes(0, &mut path);
    PathBuf::from(String::from_utf8(path).expect("a plain path"))
}
