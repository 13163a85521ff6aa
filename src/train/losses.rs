//! The losses of training as the head asks for them, on the host and on a GPU.

use super::batch::PolicyBatch;
use crate::config::ppo::PpoConfig;
use crate::device::cuda::token_loss::{self, PolicyInputs};
use crate::device::cuda::{Memory, View, ViewMut};
use crate::loss::policy::{PolicySums, policy_loss};
use crate::loss::token::cross_entropy;
use crate::loss::value::{ValueSums, value_loss};
use crate::ops::linear_logprob::TokenLoss;
use crate::tensor::DType::F32;
use crate::tensor::{Slice, SliceMut};
use std::ops::Range;

/// The actor's loss of a micro-batch, but for that of whole sequences.
pub(super) struct PolicyLoss<'a> {
    config: &'a PpoConfig,
    kl_beta: f32,
    batch: &'a PolicyBatch,
    sums: PolicySums,
    /// Made for the first chunk of a GPU.
    inputs: Option<PolicyInputs>,
}

impl<'a> PolicyLoss<'a> {
    pub fn new(config: &'a PpoConfig, kl_beta: f32, batch: &'a PolicyBatch) -> Self {
        Self { config, kl_beta, batch, sums: PolicySums::default(), inputs: None }
    }

    /// What the host summed up; none from a GPU, which leaves the log-probabilities for `sums_of`.
    pub fn sums(&self) -> Option<PolicySums> {
        self.inputs.is_none().then_some(self.sums)
    }
}

impl TokenLoss for PolicyLoss<'_> {
    fn on_host(&mut self, range: Range<usize>, l: &[f32], h: &[f32], dlogprobs: &mut [f32], dentropy: &mut [f32]) {
        let tokens = self.batch.tokens(range, l, h);
        self.sums += policy_loss(self.config, self.kl_beta, &tokens, dlogprobs, dentropy);
    }

    fn on_gpu(&mut self, range: Range<usize>, l: View, _: View, dlogprobs: ViewMut, dentropy: ViewMut) {
        let inputs = self.inputs.get_or_insert_with(|| {
            let all = self.batch.tokens(0..self.batch.old_logprobs.len(), &[], &[]);
            PolicyInputs::of([all.old_logprobs, all.advantages, all.weights], all.ref_logprobs, all.factors)
        });
        token_loss::policy(self.config, self.kl_beta, inputs, range, l, dlogprobs, dentropy);
    }
}

/// The sums of a micro-batch whose derivatives the GPU has made: those of the host's loss at the same log-probabilities.
pub(super) fn sums_of(config: &PpoConfig, kl_beta: f32, batch: &PolicyBatch, l: &[f32], h: &[f32]) -> PolicySums {
    let [mut dlogprobs, mut dentropy] = [(); 2].map(|()| vec![0.0; l.len()]);
    policy_loss(config, kl_beta, &batch.tokens(0..l.len(), l, h), &mut dlogprobs, &mut dentropy)
}

/// Writes the derivatives of the critic's loss by the values of tokens, where these lie; what it says about the tokens, which a GPU
/// leaves for `value_loss` at the same values.
///
/// # Panics
/// If the lengths differ, or values and derivatives lie on two devices.
pub(super) fn value_slopes(
    clip: f32,
    values: Slice,
    read @ [old, returns, weights]: [&[f32]; 3],
    dvalues: SliceMut,
) -> Option<ValueSums> {
    match values {
        Slice::Cpu(values) => Some(value_loss(clip, values, old, returns, weights, dvalues.cpu())),
        Slice::Cuda(values) => {
            token_loss::value(clip, values, read, dvalues.cuda());
            None
        }
    }
}

/// Derivatives that are known before the head is passed.
pub(super) struct Slopes {
    dlogprobs: Vec<f32>,
    dentropy: Vec<f32>,
    /// Both, one behind the other; made for the first chunk.
    on_gpu: Option<Memory>,
}

impl Slopes {
    pub fn new([dlogprobs, dentropy]: [Vec<f32>; 2]) -> Self {
        Self { dlogprobs, dentropy, on_gpu: None }
    }
}

impl TokenLoss for Slopes {
    fn on_host(&mut self, range: Range<usize>, _: &[f32], _: &[f32], dlogprobs: &mut [f32], dentropy: &mut [f32]) {
        dlogprobs.copy_from_slice(&self.dlogprobs[range.clone()]);
        dentropy.copy_from_slice(&self.dentropy[range]);
    }

    fn on_gpu(&mut self, range: Range<usize>, _: View, _: View, mut dlogprobs: ViewMut, mut dentropy: ViewMut) {
        let tokens = self.dlogprobs.len();
        let upload = || Memory::of(&[&self.dlogprobs[..], &self.dentropy].concat());
        let there = self.on_gpu.get_or_insert_with(upload).view(F32);
        dlogprobs.copy_from(there.part(range.clone()));
        dentropy.copy_from(there.part(tokens + range.start..tokens + range.end));
    }
}

/// The cross-entropy of tokens of one weight.
pub struct CrossEntropy {
    weight: f32,
    /// What the host summed up.
    pub loss: f64,
}

impl CrossEntropy {
    pub fn new(weight: f32) -> Self {
        Self { weight, loss: 0.0 }
    }

    /// The loss at these log-probabilities.
    pub fn of(&self, logprobs: &[f32]) -> f64 {
        cross_entropy(logprobs, &vec![self.weight; logprobs.len()], &mut vec![0.0; logprobs.len()])
    }
}

impl TokenLoss for CrossEntropy {
    fn on_host(&mut self, _: Range<usize>, l: &[f32], _: &[f32], dlogprobs: &mut [f32], dentropy: &mut [f32]) {
        self.loss += cross_entropy(l, &vec![self.weight; l.len()], dlogprobs);
        dentropy.fill(0.0);
    }

    fn on_gpu(&mut self, range: Range<usize>, _: View, _: View, mut dlogprobs: ViewMut, mut dentropy: ViewMut) {
        dlogprobs.write(&vec![-self.weight; range.len()]);
        dentropy.clear();
    }
}
