//! The common part of all methods that sample: from prompts to scored samples.

mod async_rollout;
mod dynamic_sampling;
mod episodes;
pub(super) mod evaluate;
mod experience_maker;
mod judges;
pub(super) mod kv_divergence;
mod models_of_rank;
pub(super) mod online;
mod planned_responses;
mod recorded_step;
mod reward_models;
mod rollout;
mod rollout_banner;
pub mod rollout_weights;
pub mod sample_metrics;
mod scores;
mod shares;
mod weight_sync;

pub(super) use episodes::may_show_images;
pub(super) use models_of_rank::{Sampling, Work};
