//! Every loss and estimator against OpenRLHF's numbers, values and gradients, to 1e-5.

use rlhf_hpc::advantage::{gae, kl::KlController, scores, whitening};
use rlhf_hpc::config::method::ppo::{Aggregation, Correction, Estimator, KlEstimator, PolicyLossKind, PpoConfig};
use rlhf_hpc::experience::{Experience, Finish, Prompt, Response};
use rlhf_hpc::loss::aggregation::{Totals, weights};
use rlhf_hpc::loss::policy::{PolicySums, PolicyTokens, policy_loss};
use rlhf_hpc::loss::value::value_loss;
use rlhf_hpc::loss::{correction, token};
use rlhf_hpc::ops::linear_divergence::{Divergence, Teacher, Teachers, forward_backward};
use rlhf_hpc::ops::linear_logprob::HeadPart;
use rlhf_hpc::tensor::{Layout, Tensor, WeightMut};

use crate::formulas::golden::{Case, cases, close, close_rows, mask, read, rows};
use crate::ops::probe::Matrix;

fn aggregation(case: &Case) -> Aggregation {
    let sequence = case.args["token_level_loss"] == false || case.args["policy_loss_type"] == "gspo";
    if sequence { Aggregation::Sequence } else { Aggregation::Token }
}

/// Their global normalisers count all ranks and multiply by dp_size, because their gradients are then averaged; ours
/// are sums.
fn row_weights(case: &Case, masks: &[Vec<u8>]) -> Vec<Vec<f32>> {
    let mut totals = Totals::default();
    for mask in masks {
        totals.add_mask(mask);
    }
    if let (Some(tokens), Some(ranks)) = (case.arg("batch_num_tokens"), case.arg("dp_size")) {
        totals.tokens = (tokens / ranks) as u64;
        totals.sequences = (case.arg("global_batch_size").unwrap() / ranks) as u64;
    }
    let row = |m: &Vec<u8>| {
        let mut row = Vec::new();
        weights(aggregation(case), m, totals, 12, &mut row);
        row
    };
    masks.iter().map(row).collect()
}

fn policy_config(case: &Case) -> PpoConfig {
    let mut config = PpoConfig::default();
    config.clip_low = case.arg("clip_eps_low").map_or(config.clip_low, |x| x as f32);
    config.clip_high = case.arg("clip_eps_high").map_or(config.clip_high, |x| x as f32);
    config.dual_clip = case.arg("dual_clip").unwrap_or(0.0) as f32;
    config.aggregation = aggregation(case);
    if case.args["policy_loss_type"] == "gspo" {
        config.loss = PolicyLossKind::Gspo;
    }
    if let Some([low, high]) = read::<Option<[f32; 2]>>(&case.args["vllm_is_truncated_threshold"]) {
        (config.correction_low, config.correction_high) = (low, high);
        config.correction = match case.args["vllm_is_correction_type"].as_str() {
            None => Correction::Tis,
            Some("icepop") => Correction::Icepop,
            Some("seq-mask-tis") => Correction::SequenceMask,
            Some(other) => panic!("unknown correction {other}"),
        };
    }
    config.check_keys().unwrap();
    config
}

/// The factors of one row. Where a sequence is kept, OpenRLHF's seq-mask-tis leaves the token weights unclamped
/// although its own comment says clamped; ours are clamped. Here the unclamped weight is put back, so that the rest
/// compares.
fn their_factors(config: &PpoConfig, old: &[f32], sample: &[f32], mask: &[u8]) -> Vec<f32> {
    let mut factors = Vec::new();
    let range = [config.correction_low, config.correction_high];
    correction::factors(config.correction, range, old, sample, mask, &mut factors);
    if config.correction == Correction::SequenceMask {
        for t in 0..mask.len() {
            if factors[t] != 0.0 {
                let unclamped = (old[t] - sample[t]).exp();
                assert_eq!(factors[t], unclamped.clamp(range[0], range[1]), "ours is their weight, clamped");
                factors[t] = unclamped;
            }
        }
    }
    factors
}

#[test]
fn policy_loss_and_gradient_agree() {
    for case in cases("policy_loss") {
        let config = policy_config(&case);
        let (logprobs, old) = (case.rows("log_probs"), case.rows("old_log_probs"));
        let (advantages, sample) = (case.rows("advantages"), case.rows("rollout_log_probs"));
        let masks = case.masks("action_mask");
        let weights = row_weights(&case, &masks);
        let mut sums = PolicySums::default();
        let mut grads = Vec::new();
        for i in 0..masks.len() {
            let factors = their_factors(&config, &old[i], &sample[i], &masks[i]);
            let n = masks[i].len();
            let mut dlogprobs = vec![f32::NAN; n];
            // A loss that is local to a token is computed in two ranges: the sums add up.
            let cut = if config.loss == PolicyLossKind::Gspo { 0 } else { 5 };
            for range in [0..cut, cut..n] {
                let tokens = PolicyTokens {
                    logprobs: &logprobs[i][range.clone()],
                    old_logprobs: &old[i][range.clone()],
                    advantages: &advantages[i][range.clone()],
                    factors: &factors[range.clone()],
                    weights: &weights[i][range.clone()],
                    ..PolicyTokens::default()
                };
                sums += policy_loss(&config, 0.0, &tokens, &mut dlogprobs[range], &mut []);
            }
            grads.push(dlogprobs);
        }
        let (what, out) = (&case.args, &case.out);
        close(sums.loss, out["loss"].as_f64().unwrap(), what);
        close(sums.clipped as f64 / sums.tokens as f64, out["clip_ratio"].as_f64().unwrap(), what);
        close(sums.policy_kl / sums.tokens as f64, out["ppo_kl"].as_f64().unwrap(), what);
        close_rows(&grads, &rows(&case.grad["log_probs"]), what);
    }
}

#[test]
fn value_loss_and_gradient_agree() {
    for case in cases("value_loss") {
        let (values, old, returns) = (case.rows("values"), case.rows("old_values"), case.rows("returns"));
        let masks = case.masks("action_mask");
        let weights = row_weights(&case, &masks);
        let mut loss = 0.0;
        let mut grads = Vec::new();
        for i in 0..masks.len() {
            let mut dvalues = vec![f32::NAN; masks[i].len()];
            let clip = case.arg("clip_eps").unwrap_or(0.0) as f32;
            loss += value_loss(clip, &values[i], &old[i], &returns[i], &weights[i], &mut dvalues).loss;
            grads.push(dvalues);
        }
        close(loss, case.out["loss"].as_f64().unwrap(), &case.args);
        close_rows(&grads, &rows(&case.grad["values"]), &case.args);
    }
}

#[test]
fn aggregation_and_cross_entropy_agree() {
    for (name, tokens, mask_name, sign) in [
        ("aggregate_loss", "loss", "loss_mask", -1.0),
        ("aggregate_loss_empty_seq", "loss", "loss_mask", -1.0),
        ("sft_loss", "lp", "m", 1.0),
    ] {
        for case in cases(name) {
            // Our cross-entropy aggregates the negative log-probability, OpenRLHF's function any loss.
            let numbers: Vec<Vec<f32>> =
                case.rows(tokens).iter().map(|row| row.iter().map(|x| sign * x).collect()).collect();
            let masks = case.masks(mask_name);
            let weights = row_weights(&case, &masks);
            let mut loss = 0.0;
            let mut grads = Vec::new();
            for (row, weights) in numbers.iter().zip(&weights) {
                let mut d = vec![f32::NAN; row.len()];
                loss += token::cross_entropy(row, weights, &mut d);
                grads.push(d.iter().map(|x| sign * x).collect::<Vec<_>>());
            }
            close(loss, case.out["loss"].as_f64().unwrap(), &name);
            close_rows(&grads, &rows(&case.grad[tokens]), &name);
        }
    }
}

#[test]
fn kl_estimators_and_their_gradients_agree() {
    for name in ["approx_kl", "approx_kl_clamp"] {
        for case in cases(name) {
            let estimator = match case.args["kl_estimator"].as_str() {
                Some("k1") => KlEstimator::K1,
                Some("k2") => KlEstimator::K2,
                _ => KlEstimator::K3,
            };
            let pairs = case.rows("log_probs").into_iter().zip(case.rows("log_probs_base"));
            let (kl, slope): (Vec<Vec<f32>>, Vec<Vec<f32>>) = pairs
                .map(|(l, base)| {
                    let pair = |(l, base): (&f32, &f32)| estimator.estimate(f64::from(*l) - f64::from(*base));
                    l.iter().zip(&base).map(pair).map(|(kl, slope)| (kl as f32, slope as f32)).unzip()
                })
                .unzip();
            close_rows(&kl, &rows(&case.out["kl"]), &case.args);
            close_rows(&slope, &rows(&case.grad["log_probs"]), &case.args);
        }
    }
}

#[test]
fn adaptive_kl_controller_agrees() {
    for case in cases("adaptive_kl") {
        let mut config = PpoConfig { kl_coef: case.arg("init").unwrap() as f32, ..PpoConfig::default() };
        config.kl_target = case.arg("target").unwrap() as f32;
        config.kl_horizon = case.arg("horizon").unwrap() as f32;
        let mut controller = KlController::new(&config);
        let [measured, betas]: [Vec<f64>; 2] = [&case.args["current"], &case.out].map(read);
        for (kl, want) in measured.into_iter().zip(betas) {
            controller.update(kl, case.arg("n_steps").unwrap() as usize);
            close(f64::from(controller.beta), want, &case.args);
        }
    }
}

/// Keeps masked tokens only: if the mask is 0, OpenRLHF's value is the whitened zero, ours is 0.
fn only_masked(rows: &[Vec<f32>], masks: &[Vec<u8>]) -> Vec<Vec<f32>> {
    let pick = |(row, mask): (&Vec<f32>, &Vec<u8>)| row.iter().zip(mask).map(|(x, &m)| x * f32::from(m)).collect();
    rows.iter().zip(masks).map(pick).collect()
}

#[test]
fn gae_returns_and_rewards_per_token_agree() {
    for case in cases("gae") {
        let (values, rewards, masks) = (case.rows("values"), case.rows("rewards"), case.masks("action_mask"));
        let (gamma, lambda) = (case.arg("gamma").unwrap(), case.arg("lambd").unwrap());
        let (advantages, returns): (Vec<_>, Vec<_>) =
            (0..masks.len()).map(|i| gae::gae(gamma, lambda, &rewards[i], &values[i], 0.0, &masks[i])).unzip();
        close_rows(&advantages, &rows(&case.out["advantages"]), &case.args);
        close_rows(&returns, &rows(&case.out["returns"]), &case.args);
    }
    for case in cases("reinforce_returns") {
        let pairs = case.rows("rewards").into_iter().zip(case.masks("action_mask"));
        let got: Vec<_> =
            pairs.map(|(r, m)| gae::gae(case.arg("gamma").unwrap(), 1.0, &r, &vec![0.0; r.len()], 0.0, &m).1).collect();
        close_rows(&got, &rows(&case.out["returns"]), &case.args);
    }
    for case in cases("compute_reward") {
        let masks = case.masks("action_mask");
        let [low, high] = read::<Option<[f64; 2]>>(&case.args["clip"]).unwrap_or([f64::MIN, f64::MAX]);
        let numbers: Vec<f64> = read::<Vec<f64>>(&case.inputs["r"]).iter().map(|x| x.clamp(low, high)).collect();
        let place = |i: usize| {
            let kl = case.rows("kl")[i].clone();
            let mut sample = Experience { kl, mask: masks[i].clone(), ..Experience::default() };
            // OpenRLHF ignores a negative coefficient. PpoConfig::check rejects it.
            scores::place(case.arg("kl_coef").unwrap().max(0.0), numbers[i], &mut sample);
            sample.rewards
        };
        let got: Vec<_> = (0..masks.len()).map(place).collect();
        // At masked tokens OpenRLHF's value is -beta * kl, ours is 0.
        close_rows(&got, &only_masked(&rows(&case.out["reward"]), &masks), &case.args);
    }
}

#[test]
fn whitening_agrees() {
    for case in cases("masked_normalize") {
        let (tensor, masks) = (case.rows("tensor"), case.masks("mask"));
        // OpenRLHF normalises each row here, ours the batch, so each batch has one row.
        for i in 0..tensor.len() {
            let mut one =
                [Experience { advantages: tensor[i].clone(), mask: masks[i].clone(), ..Experience::default() }];
            let learned = tensor[i].iter().zip(&masks[i]).filter(|&(_, &m)| m != 0).map(|(&x, _)| f64::from(x));
            let (mean, std) = whitening::moments(learned);
            whitening::whiten(true, mean, std, &mut one);
            let want = only_masked(&rows(&case.out["out"])[i..=i], &masks[i..=i]);
            let got = only_masked(&[one[0].advantages.clone()], &masks[i..=i]);
            close_rows(&got, &want, &case.args);
        }
    }
}

#[test]
fn length_penalties_agree() {
    for case in cases("overlong_penalty") {
        let config = PpoConfig {
            overlong_buffer_tokens: case.arg("overlong_buffer_len").unwrap() as usize,
            overlong_tokens_max: case.arg("max_new_tokens").unwrap() as usize,
            overlong_penalty: case.arg("overlong_penalty_factor").unwrap() as f32,
            ..PpoConfig::default()
        };
        let sample = |len: &f32| {
            let response = Response { tokens: vec![0; *len as usize], ..Response::default() };
            Experience { response, ..Experience::default() }
        };
        let samples: Vec<_> = read::<Vec<f32>>(&case.inputs["response_length"]).iter().map(sample).collect();
        let mut numbers: Vec<f64> = read(&case.inputs["rewards"]);
        scores::penalize_overlong(&config, &mut numbers, &samples);
        let want: Vec<f64> = read(&case.out["rewards"]);
        numbers.iter().zip(want).for_each(|(&a, b)| close(a, b, &case.args));
    }
    for case in cases("stop_properly") {
        let coef = case.arg("coef").unwrap() as f32;
        let config = PpoConfig { truncated_score_coef: coef, ..PpoConfig::default() };
        let sample = |cut: &u8| {
            let finish = if *cut == 1 { Finish::Length } else { Finish::Stop };
            Experience { response: Response { finish, ..Response::default() }, ..Experience::default() }
        };
        let samples: Vec<_> = mask(&case.inputs["truncated"]).iter().map(sample).collect();
        let mut numbers: Vec<f64> = read(&case.inputs["rewards"]);
        scores::shape_truncated(&config, &mut numbers, &samples);
        let want: Vec<f64> = read(&case.out["rewards"]);
        numbers.iter().zip(want).for_each(|(&a, b)| close(a, b, &case.args));
    }
}

/// Their ragged micro-batches as one batch in global order, with the rows of their answer.
fn whole_batch(case: &Case, has_critic: bool) -> Vec<(Experience, Vec<f32>, Vec<f32>)> {
    let group_size = case.arg("n_samples_per_prompt").unwrap() as usize;
    let mut all = Vec::new();
    for (batch, out) in case.inputs.as_array().unwrap().iter().zip(case.out.as_array().unwrap()) {
        let [kl, values] = ["kl", "values"].map(|name| rows(&batch[name]));
        let [advantages, returns] = ["advantages", "returns"].map(|name| rows(&out[name]));
        for (i, index) in batch["index"].as_array().unwrap().iter().enumerate() {
            let (index, n) = (index.as_u64().unwrap() as usize, kl[i].len());
            let sample = Experience {
                prompt: Prompt { id: (index / group_size) as u64, ..Prompt::default() },
                response: Response {
                    prompt: index / group_size,
                    sample: (index % group_size) as u32,
                    tokens: vec![0; n],
                    // k1 against a reference of log-probability 0 is their kl itself.
                    logprobs: kl[i].clone(),
                    ..Response::default()
                },
                score: read::<Vec<f32>>(&batch["rewards"])[i],
                ref_logprobs: vec![0.0; n],
                values: if has_critic { values[i].clone() } else { Vec::new() },
                mask: mask(&batch["action_mask"][i]),
                ..Experience::default()
            };
            all.push((index, sample, advantages[i].clone(), returns[i].clone()));
        }
    }
    all.sort_by_key(|entry| entry.0);
    all.into_iter().map(|(_, sample, advantages, returns)| (sample, advantages, returns)).collect()
}

#[test]
fn every_estimator_agrees_on_a_ragged_batch() {
    for case in cases("advantages") {
        let advantage = match case.args["estimator"].as_str().unwrap() {
            "gae" => Estimator::Gae,
            "reinforce" => Estimator::ReinforcePp,
            "reinforce_baseline" => Estimator::ReinforcePpBaseline,
            "rloo" => Estimator::Rloo,
            "group_norm" => Estimator::Grpo,
            "dr_grpo" => Estimator::DrGrpo,
            other => panic!("unknown estimator {other}"),
        };
        let config = PpoConfig {
            advantage,
            gamma: case.arg("gamma").unwrap() as f32,
            lambda: case.arg("lambd").unwrap() as f32,
            advantage_std: case.args["no_std_norm"] == false,
            reward_clip: read::<Option<_>>(&case.args["reward_clip_range"]).unwrap_or([f32::MIN, f32::MAX]),
            ..PpoConfig::default()
        };
        let batch = whole_batch(&case, advantage.has_critic());
        let mut samples: Vec<Experience> = batch.iter().map(|entry| entry.0.clone()).collect();
        let beta = case.arg("kl_coef").unwrap() as f32;
        super::compute(&config, beta, &mut samples).unwrap();
        let masks: Vec<_> = samples.iter().map(|s| s.mask.clone()).collect();
        let want: Vec<_> = batch.iter().map(|entry| entry.1.clone()).collect();
        let got: Vec<_> = samples.iter().map(|s| s.advantages.clone()).collect();
        // OpenRLHF's whitening writes values at masked tokens, which its losses then mask. Ours writes none.
        close_rows(&got, &only_masked(&want, &masks), &case.args);
        let want: Vec<_> = batch.iter().map(|entry| entry.2.clone()).collect();
        let got: Vec<_> = samples.iter().map(|s| s.returns.clone()).collect();
        close_rows(&got, &only_masked(&want, &masks), &case.args);
    }
}

/// OpenRLHF's logits correspond to a head that is the unit matrix.
#[test]
fn distillation_loss_and_gradient_agree() {
    for case in cases("kd_loss") {
        let [student, teacher] = ["s", "t"].map(|name| read::<Vec<Vec<Vec<f32>>>>(&case.inputs[name]).concat());
        let labels = read::<Vec<Vec<i64>>>(&case.args["label"]).concat();
        let learned: Vec<usize> = (0..labels.len()).filter(|&i| labels[i] >= 0).collect();
        let targets: Vec<u32> = learned.iter().map(|&i| labels[i] as u32).collect();
        let (t, v) = (learned.len(), student[0].len());
        let of = |all: &[Vec<f32>]| {
            Tensor::from_slice(t, v, &learned.iter().map(|&i| &all[i][..]).collect::<Vec<_>>().concat())
        };
        let (h, of_teacher) = (of(&student), of(&teacher));
        let unit: Vec<f32> = (0..v * v).map(|i| if i % (v + 1) == 0 { 1.0 } else { 0.0 }).collect();
        let unit = Matrix::from_rows(v, v, unit);
        let teachers = [Teacher { h: &of_teacher, w: unit.f32(), softcap: None, weight: 1.0 }];
        let teachers = Teachers { all: &teachers, divergence: Divergence::ForwardKl, temperature: 1.0 };
        let (mut logprobs, mut dh, mut dw) = (vec![0.0; t], Tensor::scratch(t, v), vec![0.0; unit.panels.len()]);
        let gradient = WeightMut { n: v, k: v, layout: Layout::Panel, values: (&mut dw).into() };
        let (part, weights) = (HeadPart::whole(&unit.f32()), [0.0, 1.0 / t as f32]);
        let found =
            forward_backward(&h, unit.f32(), part, &targets, teachers, weights, &mut logprobs, &mut dh, Some(gradient));
        let loss = found.losses.iter().map(|x| f64::from(*x)).sum::<f64>() / t as f64;
        close(loss, case.out["loss"].as_f64().unwrap(), &"the loss");
        let want = read::<Vec<Vec<Vec<f32>>>>(&case.grad["s"]).concat();
        let got: Vec<Vec<f32>> = dh.data().chunks(v).map(<[f32]>::to_vec).collect();
        let want: Vec<Vec<f32>> = learned.iter().map(|&i| want[i].clone()).collect();
        close_rows(&got, &want, &"the gradient");
    }
}
