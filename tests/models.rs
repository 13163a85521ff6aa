//! Tiny models and their samples, for every test program.

use rlhf_hpc::config::rollout::RolloutConfig;
use rlhf_hpc::experience::{Prompt, Response};
use rlhf_hpc::learn::packed::PackedRow;
use rlhf_hpc::model::{Arch, Transformer, Weights};
use rlhf_hpc::rng::{Purpose, Rng};
use rlhf_hpc::rollout::{Request, Stop, requests};
use serde_json::{Value, json};
use std::sync::Arc;

/// A model of a family, with the keys of `more` in its config.json. Eight query heads share two of keys and values, so
/// that every size of the tensor axis up to 8 is legal and copies heads from 4 on; neither the vocabulary nor the MLP
/// divides evenly. Initial values are so large that distributions are not flat.
pub fn arch(family: &str, more: &Value) -> Arch {
    let mut config = json!({
        "model_type": family, "hidden_size": 48, "intermediate_size": 100,
        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 6,
        "vocab_size": 97, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": family == "qwen3", "initializer_range": 0.15, "eos_token_id": 2,
    });
    let keys = config.as_object_mut().expect("an object");
    keys.extend(more.as_object().expect("an object").clone());
    Arch::from_config(keys).expect("a model that is known")
}

/// Prompts of the given lengths, with random tokens that every model knows.
pub fn prompts(lengths: &[usize]) -> Vec<Prompt> {
    let rng = Rng::new(5, Purpose::Synthetic);
    let token = |i: usize, j: usize| 3 + rng.below(94, [i as u32, j as u32, 0, 0]) as u32;
    let prompt = |(i, &n): (usize, &usize)| Prompt {
        id: 100 + i as u64,
        tokens: (0..n).map(|j| token(i, j)).collect(),
        ..Prompt::default()
    };
    lengths.iter().enumerate().map(prompt).collect()
}

/// The config's requests for the model.
pub fn requested(transformer: &Transformer, prompts: &[Prompt], config: &RolloutConfig) -> Vec<Request> {
    let stop = Arc::new(Stop::new(config, &transformer.arch.eos_tokens));
    requests(prompts, config, &stop, transformer.arch.context).expect("legal prompts")
}

/// The recorded log-probabilities of all tokens of the responses, and those of the training forward over all rows
/// packed into one batch.
pub fn recorded_and_trained(
    transformer: &Transformer,
    weights: &Weights,
    prompts: &[Prompt],
    responses: &[Response],
    temperature: f32,
) -> [Vec<f32>; 2] {
    let mut row = PackedRow::new();
    for response in responses {
        let prompt = &prompts[response.prompt].tokens;
        row.push_response(&[prompt, &response.tokens[..]].concat(), prompt.len(), &response.sampling_masks);
    }
    let hidden = transformer.forward(weights, &row.tokens, &row.positions, row.keys(), None);
    let (trained, _) = transformer.logprobs(weights, &hidden, &row.rows, row.targets(), temperature, false);
    [responses.iter().flat_map(|response| response.logprobs.clone()).collect(), trained]
}

/// ||x||
pub fn norm(x: impl Iterator<Item = f32>) -> f64 {
    x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}

/// ||got - want|| / ||want||
pub fn relative_gap(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let gap = norm(got.iter().zip(want).map(|(a, b)| a - b));
    if gap == 0.0 { 0.0 } else { gap / norm(want.iter().copied()) }
}
