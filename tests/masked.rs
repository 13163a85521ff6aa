//! Environment tokens: the model reads them, but no value at them changes the loss, the weights or the metrics.

use rlhf_hpc::advantage::{self, AdvantageState};
use rlhf_hpc::comm::Axes;
use rlhf_hpc::config::Config;
use rlhf_hpc::config::job::GradientConfig;
use rlhf_hpc::config::method::ppo::{Aggregation, Correction, Estimator, KlIn, PolicyLossKind, Truncation};
use rlhf_hpc::config::optim::OptimConfig;
use rlhf_hpc::data::SftRow;
use rlhf_hpc::experience::{Experience, Finish, Greedy, Prompt, Response};
use rlhf_hpc::learn::{Learner, Role};
use rlhf_hpc::metrics::keys::Metrics;
use rlhf_hpc::model::{Arch, Head, init};
use rlhf_hpc::optim::host_state::Vector;
use rlhf_hpc::rng::{Purpose, Rng};
use rlhf_hpc::tensor::DType;
use rlhf_hpc::train::methods::update::Update;
use rlhf_hpc::train::sampling::sample_metrics::{advantage_values, sampled_values};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;

fn arch() -> Arch {
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 16,
        "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "tie_word_embeddings": false, "torch_dtype": "float32",
    });
    Arch::from_config(config.as_object().expect("an object")).expect("a model")
}

/// Two samples of each of two prompts. An environment wrote some tokens of each response, the last one of sample 3
/// included. Its tokens have other numbers if `altered`.
fn samples(altered: bool) -> Vec<Experience> {
    let rng = Rng::new(41, Purpose::Synthetic);
    let one = |i: usize| {
        let n = 7 + i;
        let is_given = |at: usize| (2..5).contains(&at) || i == 3 && at == n - 1;
        let numbers = |what: u32, low: f32, high: f32| -> Vec<f32> {
            let number = |at: usize| low + (high - low) * rng.uniform([i as u32, at as u32, what, 0]);
            (0..n).map(|at| number(at) + if altered && is_given(at) { 0.7 } else { 0.0 }).collect()
        };
        let score = rng.uniform([i as u32, 0, 9, 0]);
        Experience {
            prompt: Prompt { id: i as u64 / 2, tokens: vec![5, 6, 7], ..Prompt::default() },
            response: Response {
                prompt: i / 2,
                sample: i as u32 % 2,
                tokens: (0..n as u32).map(|at| 3 + rng.below(60, [i as u32, at, 8, 0]) as u32).collect(),
                logprobs: numbers(1, -4.5, -3.5),
                sample_logprobs: numbers(2, -4.5, -3.5),
                finish: if i.is_multiple_of(2) { Finish::Stop } else { Finish::Length },
                ..Response::default()
            },
            score,
            scores: BTreeMap::from([("a".to_string(), score)]),
            greedy: Some(Greedy { score: 0.4, tokens: 5, finish: Finish::Stop }),
            ref_logprobs: numbers(3, -4.5, -3.5),
            values: numbers(4, -1.0, 1.0),
            last_value: 0.3,
            mask: (0..n).map(|at| u8::from(!is_given(at))).collect(),
            ..Experience::default()
        }
    };
    (0..4).map(one).collect()
}

/// All numbers of a step: its metrics, the sums of its update, and the weights after it.
fn step(config: &Config, altered: bool) -> (Metrics, Vec<(String, f64)>, Vec<f32>) {
    let (mut samples, mut state) = (samples(altered), AdvantageState::new(&config.ppo));
    let stats = advantage::compute_step(&config.ppo, &BTreeMap::new(), &mut state, &mut samples).expect("finite");
    let mut metrics = advantage_values(&stats, &samples, state.kl.beta);
    metrics.extend(sampled_values(&samples));
    let axes = Axes::one();
    let learner = |head: Head| {
        let weights = init::init(&arch(), head, DType::F32, 7);
        let name = if head == Head::Value { "critic" } else { "actor" };
        let role = Role::new(name, Path::new(""), &arch(), weights, &axes);
        let (optim, gradient) = (OptimConfig::with_lr(1e-2), GradientConfig::default());
        let learner = Learner::new(role.weights.device(), role, &optim, &gradient, 10, &axes, 1);
        learner.and_then(Learner::with_masters).expect("a learner")
    };
    let mut actor = learner(Head::LanguageModel);
    let mut critic = config.ppo.advantage.has_critic().then(|| learner(Head::Value));
    let texts = [SftRow { tokens: vec![9, 8, 7, 6, 5], mask: vec![1; 5], ..SftRow::default() }];
    let texts = if config.ppo.ptx_coef > 0.0 { &texts[..] } else { &[] };
    let update = Update { config, axes: &axes, kl_beta: 0.1, texts };
    let chosen: Vec<&Experience> = samples.iter().collect();
    let sums = update.minibatch(&mut actor, critic.as_mut(), &chosen).expect("finite");
    let learners = [Some(&actor), critic.as_ref()].into_iter().flatten();
    let stretches = learners.flat_map(|learner| learner.stretches(Vector::Master));
    let weights = stretches.flat_map(|(_, values)| values.to_host());
    (metrics, sums.0.into_iter().collect(), weights.collect())
}

#[test]
fn values_at_environment_tokens_change_neither_loss_nor_weights_nor_metrics() {
    let estimators = [
        Estimator::Gae,
        Estimator::ReinforcePp,
        Estimator::ReinforcePpBaseline,
        Estimator::Rloo,
        Estimator::Grpo,
        Estimator::DrGrpo,
        Estimator::Gdpo,
        Estimator::Remax,
        Estimator::FlashReinforce,
    ];
    let losses = [
        PolicyLossKind::Clip,
        PolicyLossKind::Gspo,
        PolicyLossKind::Cispo,
        PolicyLossKind::Sapo,
        PolicyLossKind::Masked,
        PolicyLossKind::SequenceTrust,
    ];
    let corrections = [Correction::None, Correction::Tis, Correction::Icepop, Correction::SequenceMask];
    let kl = [KlIn::Reward, KlIn::Loss, KlIn::None];
    let sums = [Aggregation::Token, Aggregation::Sequence, Aggregation::SequenceSumFixed];
    for (i, estimator) in estimators.into_iter().enumerate() {
        for (j, loss) in losses.into_iter().enumerate() {
            let mut config = Config::default();
            let ppo = &mut config.ppo;
            (ppo.advantage, ppo.loss) = (estimator, loss);
            (ppo.correction, ppo.kl_in) = (corrections[(i + j) % 4], kl[(i + j) % 3]);
            ppo.aggregation = sums[(i + 2 * j) % 3];
            ppo.truncation = if i % 2 == 0 { Truncation::Bootstrap } else { Truncation::Zero };
            (ppo.entropy_coef, ppo.ptx_coef) = (0.01, if j % 2 == 0 { 0.2 } else { 0.0 });
            let what = format!("{estimator:?}, {loss:?}, {:?}", config.ppo.correction);
            let (plain, altered) = (step(&config, false), step(&config, true));
            assert_eq!(plain, altered, "{what}");
            assert!(plain.2.iter().any(|weight| *weight != 0.0), "{what}");
        }
    }
}
