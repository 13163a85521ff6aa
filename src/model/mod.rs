//! Models: architecture, parameters, forward and backward, loading and export.
//!
//! Families are data (`families`, `Arch`). One transformer serves training, scoring and rollout, which differ only in
//! the source of attention's keys (`Keys`).

pub mod adapter_config;
pub mod adapter_files;
mod adapter_norms;
pub mod arch;
pub mod bitsandbytes;
mod block_spec;
mod blocks;
pub mod corrections;
pub mod cost;
pub mod export;
pub mod families;
mod family_keys;
mod family_list;
mod identify;
pub mod init;
pub mod load;
pub mod merge;
mod naming;
pub mod non_finite;
pub mod params;
pub mod rope;
pub mod small_files;
pub mod tiny;
pub mod transformer;
pub mod tuning;
mod weights;

mod attention;
mod block;
mod branch;
mod choice;
mod config_json;
mod context;
mod decode;
mod delta;
mod delta_files;
mod expert_adapters;
mod expert_axis;
mod expert_biases;
mod expert_files;
mod experts;
mod feed_forward;
mod feeds;
mod file_form;
mod file_rows;
mod files;
mod fp8;
mod head_linear;
mod head_norm;
mod heads;
mod kv_copies;
mod latent;
mod layer_cache;
mod layer_units;
mod layers;
mod linear;
mod mixer;
mod mlp;
mod mxfp4;
mod names;
mod norm;
mod old_adapters;
mod on_disk;
mod part;
mod peft_patterns;
mod ring;
mod routers;
mod shared_expert;
mod stages;
mod states;
mod targets;
mod tensor_axis;
mod tensor_file;
mod tensor_files;
mod unsupported;
mod vocabulary;
mod wrapper;

pub use adapter_norms::AdapterNorms;
pub use arch::{Arch, Head};
pub use block_spec::{
    AttentionSpec, BlockSpec, DeltaSpec, DenseSpec, ExpertsSpec, Feed, LatentSpec, Mixer, NormSpec, Norms, QkNorm,
    Scoring, SharedName, SharedSpec, Sinks,
};
pub use config_json::unapplied_sampling;
pub use files::{other_kind, weight_files};
pub use heads::{DistillTargets, Teacher};
pub use layer_cache::{CacheGroup, Kept, LayerCache};
pub use on_disk::{OnDisk, Tensors};
pub use params::{ParamId, ParamSpec, ParamTable};
pub use part::{Cut, TensorPart};
pub use routers::{RouterSums, Routers};
pub use stages::Place;
pub use states::HiddenStates;
pub use tensor_file::TensorFile;
pub use transformer::{Keys, Saved, Transformer, packed_positions};
pub use weights::partition::Shards;
pub use weights::reshard::Reshard;
pub use weights::{Gradients, UnitValues, Weights, collect, pack, partition};
