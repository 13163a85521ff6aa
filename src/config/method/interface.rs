//! What a method declares about its jobs.

use crate::config::mesh::MeshConfig;
use crate::config::metric::Key;
use crate::config::model::ModelConfig;
use crate::config::optim::OptimRoles;
use crate::config::reward::RewardConfig;
use crate::config::rollout::RolloutConfig;
use crate::error::Result;

/// The tables of a job that a method's settings are checked against.
#[derive(Clone, Copy)]
pub struct Shared<'a> {
    pub model: &'a ModelConfig,
    pub mesh: &'a MeshConfig,
    pub rollout: &'a RolloutConfig,
    pub reward: &'a RewardConfig,
    pub optim: &'a OptimRoles,
}

/// Keys or tables of a method that have an effect only if a condition holds: their names, the condition in words, and
/// the condition.
pub type Need<T> = (&'static str, &'static str, fn(&T, &Shared) -> bool);

/// The kind of a data row: the fields that a method reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowKind {
    /// The prompt alone: documents are [prompt].
    Prompt,
    /// Prompt and demonstration: documents are [prompt, response], alternating for several turns.
    Demonstration,
    /// Prompt and two responses: documents are [prompt, chosen, rejected].
    Pair,
    /// Prompt and a response labeled true or false: documents are [prompt, response].
    Labelled,
    /// A text with a list of labels, one for each of its steps: documents are [text].
    Steps,
    /// Plain text for `data.pretrain`, whose tokens all count in the loss: documents are [text].
    Text,
}

/// What a job of a method uses.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "independent answers to questions about a method")]
pub struct Uses {
    pub rows: RowKind,
    /// Whether a model is trained.
    pub trains: bool,
    /// Whether responses are sampled, for training or for evaluation.
    pub samples: bool,
    /// Whether a reference model is loaded.
    pub reference: bool,
    /// Whether a critic is trained.
    pub critic: bool,
    /// Whether the loss uses ratios of current to old probabilities, as sampled.
    pub ratios: bool,
    /// Whether each prompt of a step also gets a greedy response.
    pub greedy: bool,
    /// Whether the loss is over tokens of given responses. Held-out rows then have no rewards to record.
    pub token_loss: bool,
    /// Whether the rollout may have ranks of its own and may run ahead.
    pub rollout_ranks: bool,
    /// Whether evaluations use `data.eval_sets`.
    pub eval_sets: bool,
    /// The coefficient of `data.pretrain` in the loss, with its key. `None` if the method does not learn from texts.
    pub pretrain: Option<(&'static str, f32)>,
}

impl Uses {
    /// A method that trains on given rows and uses nothing else.
    pub fn rows(rows: RowKind) -> Self {
        Self {
            rows,
            trains: true,
            samples: false,
            reference: false,
            critic: false,
            ratios: false,
            greedy: false,
            token_loss: false,
            rollout_ranks: false,
            eval_sets: false,
            pretrain: None,
        }
    }
}

/// The settings of a method.
pub trait MethodConfig {
    /// The usual name of the method with these settings: `Dr. GRPO`.
    fn title(&self) -> String;

    /// The passes over the data if `job.steps` is 0. `None` if a job that trains needs `job.steps`.
    fn epochs(&self) -> Option<f64> {
        None
    }

    fn uses(&self, shared: &Shared) -> Uses;

    /// Rejects combinations of values that the method does not support.
    fn check(&self, _shared: &Shared) -> Result<()> {
        Ok(())
    }

    /// The metrics that no other method has.
    fn metrics() -> &'static [Key]
    where
        Self: Sized,
    {
        &[]
    }

    /// Keys that have an effect only in a job of this method for which a condition holds.
    fn needs() -> &'static [Need<Self>]
    where
        Self: Sized,
    {
        &[]
    }
}
