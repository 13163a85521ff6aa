//! `[distill]`: a student that learns the distributions of its teachers.

use super::interface::{MethodConfig, Need, RowKind, Shared, Uses};
use crate::config::limits::{FINITE, SAMPLES, TOKENS, check_weights};
use crate::config::metric::{Key, Unit};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// The divergence between a student's distribution q and its teacher's p, for each token over the whole vocabulary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Divergence {
    /// KL(p || q): the student covers all modes of the teacher.
    #[default]
    ForwardKl,
    /// KL(q || p): the student concentrates on modes of the teacher.
    ReverseKl,
    /// The mean of KL(p || m) and KL(q || m), m = (p + q) / 2 (Jensen-Shannon).
    Jsd,
}

table! {
    /// `[distill]`
    pub struct DistillConfig {
        pub on_policy: bool = false,
        pub divergence: Divergence = Divergence::ForwardKl,
        pub full_vocabulary: bool = true,
        pub ce_coef: f64 = 0.6 => 0.0..=1.0,
        pub temperature: f32 = 1.0 => 1e-3..=FINITE,
        pub epochs: f64 = 1.0 => 0.0..=1e6,
        pub minibatch_samples: usize = 64 => 1.0..=SAMPLES,
        #[serde(with = "crate::config::auto")]
        #[schemars(with = "crate::config::mesh::Auto")]
        pub microbatch_tokens_max: usize = 8192 => 1.0..=TOKENS,
    }
}

impl DistillConfig {
    /// The weights of the tokens' cross-entropy and of the divergence in the loss. A student's own samples have no
    /// cross-entropy, because they are not demonstrations.
    pub fn coefs(&self) -> [f64; 2] {
        let ce = if self.on_policy { 0.0 } else { self.ce_coef };
        [ce, 1.0 - ce]
    }

    /// Rejects teachers and sampled tokens that the divergence cannot be computed from.
    fn check_teachers(&self, Shared { model, rollout, .. }: &Shared) -> Result<()> {
        let (teachers, weights) = (&model.teachers, &model.teacher_weights);
        if teachers.is_empty() {
            return Err(Error::usage(
                "model.teachers must name at least one teacher in a distill job (got an empty list)",
            )
            .hint("set model.teachers = [\"DIR\"], a model with the vocabulary of model.actor"));
        }
        Error::need(
            teachers.iter().all(|dir| !dir.as_os_str().is_empty()),
            "model.teachers must contain directories (got an empty string)",
        )?;
        check_weights("model.teacher_weights", weights, "model.teachers", teachers.len())?;
        if self.full_vocabulary {
            return Ok(());
        }
        if !self.on_policy {
            return Err(Error::usage(
                "distill.full_vocabulary = false needs sampled tokens, but the rows are not sampled",
            )
            .hint("set distill.on_policy = true, or leave distill.full_vocabulary out"));
        }
        if self.divergence != Divergence::ReverseKl {
            let message = "distill.full_vocabulary = false uses only the student's samples, which can only estimate the reverse KL";
            return Err(Error::usage(message)
                .hint("set distill.divergence = \"reverse_kl\", or distill.full_vocabulary = true"));
        }
        let (sampled, compared) = (rollout.temperature, self.temperature);
        Error::need(
            sampled == compared,
            format!(
                "distill.full_vocabulary = false needs equal temperatures, as samples estimate the distribution that they come \
                 from (got rollout.temperature = {sampled} and distill.temperature = {compared})"
            ),
        )
    }
}

/// Rejects keys of a rollout that distillation does not support.
fn check_rollout(Shared { rollout, reward, .. }: &Shared) -> Result<()> {
    if rollout.keep_sampling_mask {
        return Err(Error::usage(
            "rollout.keep_sampling_mask does not support distill jobs, which compare whole distributions",
        )
        .hint("remove rollout.keep_sampling_mask, which is for ppo jobs"));
    }
    rollout.check()?;
    if rollout.dynamic_sampling.is_on() && !reward.is_set() {
        return Err(Error::usage("rollout.dynamic_sampling keeps prompts by their rewards, but no reward is set")
            .hint("set a source in [reward], or remove [rollout.dynamic_sampling]"));
    }
    Error::need(rollout.temperature > 0.0, "rollout.temperature must be above 0 in a distill job (got 0)")?;
    if reward.is_set() { reward.check() } else { Ok(()) }
}

pub const CE_MEAN: &str = "ce_mean";

impl MethodConfig for DistillConfig {
    fn title(&self) -> String {
        if self.on_policy { "on-policy distillation" } else { "distillation" }.into()
    }

    fn epochs(&self) -> Option<f64> {
        Some(self.epochs)
    }

    fn uses(&self, _shared: &Shared) -> Uses {
        if self.on_policy {
            Uses { samples: true, ..Uses::rows(RowKind::Prompt) }
        } else {
            Uses { token_loss: true, ..Uses::rows(RowKind::Demonstration) }
        }
    }

    fn check(&self, shared: &Shared) -> Result<()> {
        self.check_teachers(shared)?;
        if !shared.mesh.placement.is_empty() {
            return Err(Error::usage(
                "mesh.placement does not support distill jobs, which have all roles on all ranks",
            )
            .hint("remove mesh.placement; mesh.zero and mesh.tensor also shard the teachers' weights"));
        }
        if self.on_policy { check_rollout(shared) } else { Ok(()) }
    }

    fn metrics() -> &'static [Key] {
        &[Key {
            name: CE_MEAN,
            section: "loss",
            unit: Unit::Nats,
            meaning: "Mean cross-entropy of the response tokens of the rows in distill jobs, the part of the loss that \
                      distill.ce_coef weighs.",
        }]
    }

    fn needs() -> &'static [Need<Self>] {
        &[
            ("model.teachers model.teacher_weights", "job.kind = \"distill\"", |_, _| true),
            ("distill.ce_coef", "distill.on_policy = false", |distill, _| !distill.on_policy),
        ]
    }
}
