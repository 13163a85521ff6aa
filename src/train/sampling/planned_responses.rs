//! The responses of all ranks in a plan, which runs one rank alone.

use crate::config::Config;
use crate::config::rollout::RolloutConfig;
use crate::device::null;
use crate::experience::{Finish, Prompt, Response, SamplingMask};
use crate::model::Arch;
use crate::rollout;
use std::ops::Range;

/// Takes the place of the gathered responses: each has the maximum length.
pub struct PlannedResponses {
    /// The maximum length of the actor's rows, in tokens.
    context: usize,
    /// The largest sampling mask, if masks are kept: that of every token.
    largest_mask: Option<SamplingMask>,
}

impl PlannedResponses {
    /// The responses on a null device. `None` on a real device.
    pub fn new(config: &RolloutConfig, arch: &Arch) -> Option<Self> {
        let planned = || Self { context: arch.context, largest_mask: config.largest_mask(arch.vocabulary) };
        null::is_active().then(planned)
    }

    /// The responses to the prompts `part`.
    pub fn to(&self, config: &Config, prompts: &[Prompt], part: &Range<usize>) -> Vec<Response> {
        let answers = |prompt: usize| {
            let tokens = rollout::new_tokens_max(&config.rollout, prompts[prompt].tokens.len(), self.context);
            let sampling_masks = self.largest_mask.iter().flat_map(|mask| vec![mask.clone(); tokens]).collect();
            let (tokens, logprobs, sample_logprobs) = (vec![0; tokens], vec![0.0; tokens], vec![0.0; tokens]);
            let (finish, rest) = (Finish::Length, Response::default());
            let one = Response { prompt, tokens, logprobs, sample_logprobs, sampling_masks, finish, ..rest };
            (0..config.responses_per_prompt() as u32).map(move |sample| Response { sample, ..one.clone() })
        };
        part.clone().flat_map(answers).collect()
    }
}
