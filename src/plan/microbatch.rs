//! `microbatch_tokens_max = "auto"`: enough tokens for GEMMs of many rows, more if the chosen layout has memory for
//! them, and fewer if the job does not fit otherwise. All this is for the longest rows that the job allows.
//!
//! Recomputing a forward costs a third of training. Smaller micro-batches cost little as long as their GEMMs have many
//! rows. So a job has fewer than `ENOUGH` tokens only if it does not fit with full recomputation.

use super::choose::{Choice, candidate, choose, recount};
use super::devices::Device;
use super::job::Job;
use super::refuse;
use super::rows::Rows;
use crate::config::Config;
use crate::config::auto::AUTO;
use crate::config::job::Recompute;
use crate::error::Result;
use crate::train::{self, Archs};

/// The rows that keep a GPU busy with the GEMMs of a 7B model.
pub const ENOUGH: usize = 4096;
/// The most tokens: more do not help, even if weights are gathered for each micro-batch.
const MOST: usize = 16_384;

fn with(asked: &Config, tokens: usize, recompute: Recompute) -> Config {
    let mut config = asked.clone();
    config.set_microbatches(tokens);
    config.gradient.recompute = recompute;
    config
}

/// The job with a number for `"auto"`: `ENOUGH`, or the largest of its halves with which the job fits in some layout.
/// If it fits with none, the longest row.
pub fn resolved(asked: &Config, archs: &Archs, world: usize, device: &Device) -> Config {
    let recompute = asked.gradient.recompute;
    if !is_open(asked) {
        return with(asked, ENOUGH, recompute);
    }
    let most = if recompute == Recompute::Auto { Recompute::Block } else { recompute };
    let longest = |tokens| Job::new(&with(asked, tokens, recompute), archs, None).rows.longest_row().all();
    let fits = |tokens: usize| refuse::fits(&[], world, &Job::new(&with(asked, tokens, most), archs, None), device);
    let halves = std::iter::successors(Some(ENOUGH), |tokens| (*tokens > longest(*tokens)).then_some(tokens / 2));
    let mut tried = ENOUGH;
    for tokens in halves {
        tried = tokens;
        if fits(tokens) {
            break;
        }
    }
    with(asked, tried, recompute)
}

/// Whether the job leaves its micro-batches to the plan.
pub fn is_open(asked: &Config) -> bool {
    train::shape(asked).microbatch_tokens_max == AUTO
}

/// The job with more tokens than `resolved` set, if the chosen layout and recomputation leave memory for them. CPUs do
/// not gain from more.
///
/// # Errors
/// `Usage` if a role has no placement.
pub fn grown(
    asked: &Config,
    resolved: &Config,
    archs: &Archs,
    choice: &Choice,
    world: usize,
    device: &Device,
) -> Result<Config> {
    if !is_open(asked) || train::shape(resolved).microbatch_tokens_max < ENOUGH || device.is_cpu() {
        return Ok(resolved.clone());
    }
    let parts = Job::new(resolved, archs, None).parts(world)?;
    let fits = |tokens: &usize| {
        let config = with(asked, *tokens, choice.recompute);
        candidate(&Job::new(&config, archs, None), &parts, choice.chosen.layout(), device).fits()
    };
    let more = [MOST, MOST / 2].into_iter().find(fits);
    Ok(with(asked, more.unwrap_or(ENOUGH), asked.gradient.recompute))
}

/// The job with its micro-batches, and its layout for `rows`.
///
/// # Errors
/// The errors of `choose`.
pub fn chosen(asked: &Config, archs: &Archs, rows: &Rows, world: usize, device: &Device) -> Result<(Config, Choice)> {
    let job =
        |config: &Config| -> Result<Choice> { choose(&Job::new(config, archs, Some(rows.clone())), world, device) };
    let config = resolved(asked, archs, world, device);
    let choice = job(&config)?;
    let mut grown = grown(asked, &config, archs, &choice, world, device)?;
    if grown == config {
        return Ok((config, choice));
    }
    grown.gradient.recompute = choice.recompute;
    let choice = recount(choice, &Job::new(&grown, archs, Some(rows.clone())), world, device)?;
    Ok((grown, choice))
}
