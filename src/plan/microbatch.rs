//! `microbatch_tokens_max = "auto"`: enough tokens for products of many rows, and more where the layout that is chosen has room for
//! them; fewer where a job does not fit otherwise. All of it for the longest rows that the job allows.
//!
//! Computing a forward again costs a third of training, smaller micro-batches little while their products have many rows: so a job
//! has less than `ENOUGH` tokens only where it does not fit with everything computed again.

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

/// Rows that keep a GPU busy with the products of a 7B model.
pub const ENOUGH: usize = 4096;
/// More gain nothing, also where weights are gathered for each micro-batch.
const MOST: usize = 16_384;

fn with(asked: &Config, tokens: usize, recompute: Recompute) -> Config {
    let mut config = asked.clone();
    config.set_microbatches(tokens);
    config.gradient.recompute = recompute;
    config
}

/// The job with a number for `"auto"`: `ENOUGH`, or the most of its halves with which it fits in some layout; the longest row, where
/// it fits with none.
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

/// The job with more tokens than `resolved` gave it, where the layout and recomputation that were chosen for these leave room. CPUs
/// gain nothing by more.
///
/// # Errors
/// `Usage` where a role has no placement.
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

/// The job with its micro-batches, and the layout of it for `rows`.
///
/// # Errors
/// As `choose`.
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
