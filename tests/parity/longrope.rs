//! The frequencies of LongRoPE, which the limit on rows decides.

use crate::parity::golden::directory;
use rlhf_hpc::model::Arch;
use serde_json::{Map, Value};

#[test]
fn rows_that_may_be_longer_than_the_original_length_get_the_long_factors_and_others_the_short_ones() {
    let arch = Arch::load(&directory("phi3-long")).expect("a model");
    let first = |arch: &Arch| arch.rotations().expect("a rope")[0].inverse_frequencies.clone();
    let (short, long) = (arch.clone().for_rows(16), arch.clone().for_rows(17));
    assert_eq!((arch.context, short.context, long.context), (16, 16, 128));
    assert_eq!(first(&arch), first(&short));
    assert!(first(&short).iter().zip(&first(&long)).filter(|(short, long)| short != long).count() > 3);
    let other = Arch::load(&directory("llama2")).expect("a model");
    assert_eq!(other.clone().for_rows(16), other, "without LongRoPE, nothing changes");
}

/// Transformers reads the key of the model, and replaces that of the scaling by it.
#[test]
fn the_original_length_is_a_key_of_the_model_with_a_default() {
    let mut config = Arch::load(&directory("phi3-long")).expect("a model").source;
    let original = |config: &Map<String, Value>| Arch::from_config(config).expect("a model").for_rows(0).context;
    config.insert("max_position_embeddings".into(), 8192.into());
    assert_eq!(original(&config), 16);
    config.remove("original_max_position_embeddings");
    assert!(config["rope_parameters"].get("original_max_position_embeddings").is_some());
    assert_eq!(original(&config), 4096);
}
