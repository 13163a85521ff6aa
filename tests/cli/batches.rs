//! `replay --batch`: batches that other systems made (`tests/golden/batches.py`) are equal, and planted differences have
//! their names.

use super::command::run;
use super::fixture::Fixture;
use crate::process::Ended;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use std::path::{Path, PathBuf};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/batches")
}

/// Batches without a difference, and the quantities that are computed.
const EQUAL: &[(&str, &str)] = &[
    ("trl-grpo", "logprobs advantages loss grad_norm"),
    ("trl-bnpo", "logprobs advantages loss"),
    ("trl-dapo", "logprobs advantages loss grad_norm"),
    ("trl-gspo", "logprobs advantages loss grad_norm"),
    ("openrlhf-ppo-rollout", "kl rewards returns advantages"),
    ("openrlhf-ppo-actor", "logprobs policy_loss loss grad_norm"),
    ("openrlhf-ppo-critic", "value_loss critic_grad_norm"),
    ("openrlhf-grpo-rollout", "rewards returns advantages"),
    ("openrlhf-grpo-actor", "logprobs policy_loss loss grad_norm"),
    ("verl-grpo-rollout", "advantages"),
    ("verl-grpo-actor", "logprobs policy_loss grad_norm"),
    ("verl-ppo-rollout", "returns advantages"),
];

/// Planted differences: the first quantity that differs, and its cause.
const PLANTED: &[(&str, &str, &str)] = &[
    ("trl-token-mean", "loss", "token mean"),
    ("trl-constant-length", "loss", "sum over a constant length"),
    ("trl-group-std", "advantages", "standard deviation of the group not divided by"),
    ("trl-clip", "loss", "clipping range of the ratio 0.1 instead of 0.2"),
    ("trl-temperature", "logprobs", "log-probabilities at temperature 1 instead of 0.9"),
    ("trl-masked-end", "loss", "the end token (EOS) is masked"),
    ("trl-sequence-ratio", "loss", "one ratio for each sequence"),
    ("trl-kl-weight", "loss", "KL in the loss not weighted by the ratio"),
    ("trl-kl-coef", "loss", "KL coefficient 0.01 instead of 0.05"),
    ("openrlhf-rollout-k1", "kl", "KL estimator k1 instead of k3"),
    ("openrlhf-rollout-no-division", "advantages", "whitening without the division"),
    ("openrlhf-rollout-lambda", "returns", "lambda 0.8 instead of 0.95"),
    ("openrlhf-actor-dual-clip", "policy_loss", "dual clip 1.1 instead of 0"),
    ("openrlhf-actor-mask-left", "policy_loss", "mask shifted by one token to the left"),
    ("openrlhf-actor-mask-right", "policy_loss", "mask shifted by one token to the right"),
    ("openrlhf-critic-value-clip", "value_loss", "value clip off"),
    ("verl-sum-norm", "policy_loss", "divided by a constant length and not by the sequences"),
    ("verl-clip-high", "policy_loss", "upper clipping range of the ratio 0.2 instead of 0.28"),
];

#[test]
fn batches_of_trl_openrlhf_and_verl_are_computed_again_within_a_millionth() {
    for (name, quantities) in EQUAL {
        let found = run(&golden(), &["replay", "--batch", &format!("{name}.safetensors")]).well();
        assert!(found.stdout.contains("Equal within 1e-6"), "{name}: {}", found.stdout);
        for quantity in quantities.split(' ') {
            let line = found.stdout.lines().find(|line| line.split(' ').next() == Some(quantity));
            assert!(line.is_some_and(|line| line.ends_with("equal")), "{name}, {quantity}: {}", found.stdout);
        }
    }
}

#[test]
fn a_planted_difference_of_a_batch_is_named_with_the_first_quantity_that_it_changes() {
    for (name, quantity, cause) in PLANTED {
        let found = run(&golden(), &["replay", "--batch", &format!("planted-{name}.safetensors")]);
        assert_eq!(found.code, Some(1), "{name}: {}{}", found.stdout, found.stderr);
        let first = found.stdout.lines().find_map(|line| line.strip_prefix("First difference: "));
        assert!(first.is_some_and(|first| first.split(' ').next() == Some(quantity)), "{name}: {}", found.stdout);
        let likely = found.stdout.lines().find_map(|line| line.strip_prefix("Likely cause: "));
        assert!(likely.is_some_and(|likely| likely.contains(cause)), "{name}: {}", found.stdout);
    }
}

/// A copy of a golden batch with a changed tensor or setting: a name, its new content, `None` to remove it.
fn changed(fixture: &Fixture, tensor: Option<(&str, Option<Vec<i64>>)>, setting: Option<(&str, &str)>) -> Ended {
    let bytes = std::fs::read(golden().join("trl-grpo.safetensors")).expect("a golden");
    let (_, header) = SafeTensors::read_metadata(&bytes).expect("a header");
    let mut settings = header.metadata().clone().expect("settings");
    settings.remove("model");
    if let Some((key, value)) = setting {
        settings.insert(key.to_owned(), value.to_owned());
    }
    let read = SafeTensors::deserialize(&bytes).expect("tensors");
    let mut views: Vec<(String, TensorView)> = read.tensors();
    let bytes: Vec<u8>;
    if let Some((name, values)) = tensor {
        views.retain(|(known, _)| known != name);
        if let Some(values) = values {
            bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            let shape = if values.len() == 80 { vec![8, 10] } else { vec![values.len()] };
            views.push((name.to_owned(), TensorView::new(Dtype::I64, shape, &bytes).expect("a tensor")));
        }
    }
    let file = safetensors::serialize(views, Some(settings)).expect("a file");
    fixture.write("batch.safetensors", file);
    fixture.run(&["replay", "--batch", "batch.safetensors"])
}

#[test]
fn a_file_that_is_not_a_batch_is_rejected_and_the_error_names_the_mistake() {
    let fixture = Fixture::new();
    fixture.run(&["replay", "--batch", "none.safetensors"]).refused(74, &["none.safetensors"]);
    fixture.write("text.safetensors", "not a header");
    fixture.run(&["replay", "--batch", "text.safetensors"]).refused(65, &["not a safetensors file"]);
    fixture.run(&["replay", "--model", "base"]).refused(2, &["--model is an option of --batch"]);
    fixture.run(&["replay", "run", "--batch", "text.safetensors"]).refused(2, &["--batch replaces the run"]);
    changed(&fixture, None, None).well();
    let tensors = [
        (("logprob", Some(vec![0; 80])), &["no tensor logprob", "did you mean logprobs?"][..]),
        (("response_mask", None), &["needs a tensor response_mask"]),
        (("response_mask", Some(vec![1; 80])), &["learned token is padding, or the masks are shifted"]),
        (("old_logprobs", Some(vec![0; 7])), &["old_logprobs must have shape [8]"]),
        (("attention_mask", None), &["input_ids needs a tensor attention_mask"]),
    ];
    for (tensor, words) in tensors {
        changed(&fixture, Some(tensor), None).refused(65, words);
    }
    let settings = [
        ("rlhf_hpc_batch", "2", 65, "only 1 is known"),
        ("batch.group_mean", "1", 65, "unknown key batch.group_mean"),
        ("batch.whitening", "some", 65, "batch.whitening = \"some\""),
        ("batch.loss_tokens", "many", 65, "batch.loss_tokens = \"many\""),
        ("ppo.clip_hi", "0.2", 2, "clip_hi"),
        ("ppo.kl_estimator", "k4", 2, "ppo.kl_estimator"),
    ];
    for (key, value, code, words) in settings {
        changed(&fixture, None, Some((key, value))).refused(code, &[words]);
    }
}
