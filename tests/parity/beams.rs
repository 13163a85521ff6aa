//! Beam search against `transformers`; `tests/golden/beams.py` makes the golden.

use super::golden::{LANGUAGE_MODELS, Model};
use rlhf_hpc::config::rollout::RolloutConfig;
use rlhf_hpc::model::Head;
use rlhf_hpc::ops::sample::SampleParams;
use rlhf_hpc::rollout::{self, Beams, EarlyStopping, Engine, Hooks, Request, Stop};
use rlhf_hpc::tensor::DType;
use serde::Deserialize;
use std::sync::Arc;

#[derive(Deserialize)]
struct Golden {
    beams: usize,
    new_tokens: usize,
    /// Tokens that end a response.
    ends: Vec<u32>,
    searches: Vec<Search>,
}

#[derive(Deserialize)]
struct Search {
    model: String,
    prompt: Vec<u32>,
    early_stopping: String,
    length_penalty: f64,
    repetition_penalty: f32,
    #[serde(flatten)]
    edits: Edits,
    best: Vec<Best>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Edits {
    bias: Vec<(u32, f32)>,
    bad_words: Vec<Vec<u32>>,
}

#[derive(Deserialize)]
struct Best {
    tokens: Vec<u32>,
    score: f32,
}

#[test]
fn beams_and_their_scores_equal_transformers_for_every_family_mode_and_penalty() {
    let golden: Golden = serde_json::from_str(include_str!("../golden/beams.json")).expect("the golden");
    let stop = Arc::new(Stop { tokens: golden.ends.clone(), strings: Vec::new(), ..Stop::default() });
    for name in LANGUAGE_MODELS {
        let Model { transformer, weights, .. } = Model::load(name, Head::LanguageModel, DType::F32);
        let model = rollout::Model { transformer: &transformer, weights: &weights, tokenizer: None };
        let mut engine = Engine::new(&RolloutConfig::default(), 1 << 30);
        for search in golden.searches.iter().filter(|search| search.model == name) {
            let Search { early_stopping, length_penalty, repetition_penalty, best, .. } = search;
            let case = format!("{name} {:?} {early_stopping} {length_penalty} {repetition_penalty}", search.prompt);
            let early_stopping = match early_stopping.as_str() {
                "true" => EarlyStopping::True,
                "false" => EarlyStopping::False,
                _ => EarlyStopping::Never,
            };
            let beams = Beams { count: golden.beams, early_stopping, length_penalty: *length_penalty };
            let Edits { bias, bad_words } = &search.edits;
            let edits = Arc::new(rollout::Edits { bias: bias.clone(), bad_words: bad_words.clone() });
            let request = |sample| Request {
                prompt: 0,
                prompt_id: 0,
                sample,
                tokens: search.prompt.as_slice().into(),
                images: Arc::default(),
                params: SampleParams { repetition_penalty: *repetition_penalty, ..SampleParams::greedy() },
                new_tokens_min: 0,
                new_tokens_max: golden.new_tokens,
                stop: stop.clone(),
                edits: edits.clone(),
                top_logprobs: 0,
                keeps_mask: false,
                rng: None,
                step: None,
                partial: None,
            };
            let requests: Vec<Request> = (0..best.len() as u32).map(request).collect();
            let mut hooks = Hooks::default();
            let outcome = engine.beam_search(model, beams, &requests, &mut hooks).expect("a search");
            for (got, want) in outcome.complete().expect("all of them").iter().zip(best) {
                assert_eq!(got.tokens, want.tokens, "{case}");
                let score = got.score.expect("a score");
                assert!((score - want.score).abs() < 1e-4, "{case}: {score} against {}", want.score);
            }
        }
    }
}
