//! Derivatives of losses that are local to a token, as `loss::policy` and `loss::value` compute them, without a word of the host.

use super::gpu::{Arg, gpu};
use super::memory::{Memory, View, ViewMut};
use crate::config::ppo::{KlEstimator, KlIn, PolicyLossKind, PpoConfig};
use crate::dtype::DType::F32;
use std::ops::Range;

/// Tokens of a block, a thread each.
const TOKENS: usize = 128;

/// What the actor's loss reads of each token besides its log-probability: uploaded once for all chunks of a micro-batch.
#[derive(Debug)]
pub struct PolicyInputs {
    /// Runs of `tokens` f32, one behind the other: old log-probabilities, advantages, weights, then the optional ones.
    numbers: Memory,
    tokens: usize,
    has_refs: bool,
    has_factors: bool,
}

impl PolicyInputs {
    /// `refs` and `factors` are empty where there are none.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn of([old, advantages, weights]: [&[f32]; 3], refs: &[f32], factors: &[f32]) -> Self {
        let tokens = old.len();
        let lens = [advantages.len(), weights.len(), refs.len(), factors.len()];
        let fit = lens[..2].iter().all(|len| *len == tokens) && lens[2..].iter().all(|len| *len == tokens || *len == 0);
        assert!(fit, "token_loss: {lens:?} numbers for {tokens} tokens");
        let numbers = Memory::of(&[old, advantages, weights, refs, factors].concat());
        Self { numbers, tokens, has_refs: !refs.is_empty(), has_factors: !factors.is_empty() }
    }

    /// The arguments of `range` of the run at `place`.
    fn run(&self, place: usize, range: &Range<usize>) -> Arg {
        let first = place * self.tokens;
        self.numbers.view(F32).part(first + range.start..first + range.end).arg(F32)
    }

    /// Old log-probabilities, advantages, weights, references where they are `asked` for, factors; null for what there is not.
    fn runs(&self, range: &Range<usize>, asked: bool) -> [Arg; 5] {
        assert!(range.end <= self.tokens, "token_loss: tokens {range:?} of {}", self.tokens);
        let optional = |there: bool, place: usize| if there { self.run(place, range) } else { Arg::Address(0) };
        let [old, advantages, weights] = [0, 1, 2].map(|place| self.run(place, range));
        let refs = optional(self.has_refs && asked, 3);
        [old, advantages, weights, refs, optional(self.has_factors, 3 + usize::from(self.has_refs))]
    }
}

fn check(lens: &[usize], tokens: usize) {
    assert!(lens.iter().all(|len| *len == tokens), "token_loss: {lens:?} numbers for {tokens} tokens");
}

fn launch(kernel: &'static str, tokens: usize, args: &[Arg]) {
    gpu().launch(kernel, [tokens.div_ceil(TOKENS), 1, 1], TOKENS, 0, args);
}

/// The derivatives of the actor's loss by the log-probabilities and entropies of tokens `range`, overwritten: those that
/// `loss::policy::policy_loss` writes.
///
/// # Panics
/// If the lengths differ, or for `gspo`: its ratio is of whole sequences.
pub fn policy(
    config: &PpoConfig,
    kl_beta: f32,
    inputs: &PolicyInputs,
    range: Range<usize>,
    logprobs: View,
    mut dlogprobs: ViewMut,
    mut dentropy: ViewMut,
) {
    let tokens = range.len();
    check(&[logprobs.len(), dlogprobs.len(), dentropy.len()], tokens);
    let beta = if config.kl_in == KlIn::Loss { kl_beta } else { 0.0 };
    let estimator = match config.kl_estimator {
        KlEstimator::K1 => 0,
        KlEstimator::K2 => 1,
        KlEstimator::K3 => 2,
    };
    let mut args = vec![logprobs.arg(F32)];
    args.extend(inputs.runs(&range, beta != 0.0));
    args.push(tokens.into());
    let kernel = match config.loss {
        PolicyLossKind::Clip => {
            args.extend([config.clip_low, config.clip_high, config.dual_clip].map(Arg::F32));
            "token_loss_clip"
        }
        PolicyLossKind::Cispo => {
            args.push(Arg::F32(config.clip_high));
            "token_loss_cispo"
        }
        PolicyLossKind::Gspo => panic!("token_loss: the ratio of gspo is of whole sequences"),
    };
    args.extend([Arg::F32(beta), Arg::I32(estimator), Arg::F32(config.entropy_coef)]);
    args.extend([dlogprobs.arg(F32), dentropy.arg(F32)]);
    launch(kernel, tokens, &args);
}

/// The derivatives of the critic's loss by the values, overwritten: those that `loss::value::value_loss` writes. The rest is the
/// host's.
///
/// # Panics
/// If the lengths differ.
pub fn value(clip: f32, values: View, [old, returns, weights]: [&[f32]; 3], mut dvalues: ViewMut) {
    let tokens = values.len();
    check(&[old.len(), returns.len(), weights.len(), dvalues.len()], tokens);
    let numbers = Memory::of(&[old, returns, weights].concat());
    let run = |i: usize| numbers.view(F32).part(i * tokens..(i + 1) * tokens).arg(F32);
    let args = [values.arg(F32), run(0), run(1), run(2), tokens.into(), Arg::F32(clip), dvalues.arg(F32)];
    launch("token_loss_value", tokens, &args);
}
