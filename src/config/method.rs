//! The kinds of jobs: the only list of methods that the configuration has. Here each method declares its requirements
//! for the rest of a job; `train::methods` has the methods themselves.

pub mod distill;
pub mod eval;
pub mod labelled;
pub mod ppo;
pub mod preference;
pub mod sft;

use super::Config;
use super::metric::Key;
use crate::error::Result;

/// Calls a macro with the list of methods: the kind of job, then the name and the type of its table. The table
/// of a `shared` kind is used by other kinds, too.
macro_rules! with_methods {
    ($then:ident) => {
        $then! {
            own {
                /// Proximal policy optimization and its relatives (`ppo.advantage`).
                #[default]
                Ppo => ppo: ppo::PpoConfig,
                /// Supervised fine-tuning: token cross-entropy.
                Sft => sft: sft::SftConfig,
                /// A model that scores, trained on preferences.
                RewardModel => reward_model: preference::RewardModelConfig,
                /// A policy trained on preferences themselves: DPO and its relatives (`dpo.loss`).
                Dpo => dpo: preference::DpoConfig,
                /// A policy trained on single responses that are labeled good or bad.
                Kto => kto: labelled::KtoConfig,
                /// A process reward model: it labels the steps of a response.
                StepReward => step_reward: labelled::StepRewardConfig,
                /// A student that learns the distributions of teachers, on rows or on its own samples
                /// (`distill.on_policy`).
                Distill => distill: distill::DistillConfig,
            }
            shared {
                /// An evaluation of responses to held-out prompts, without training.
                Eval => eval: eval::EvalConfig,
            }
        }
    };
}
pub(super) use with_methods;

macro_rules! kinds {
    (
        own { $($(#[$about:meta])* $kind:ident => $table:ident: $($path:ident)::+,)* }
        shared { $($(#[$about_shared:meta])* $kind_shared:ident => $table_shared:ident: $($path_shared:ident)::+,)* }
    ) => {
        /// The kind of job.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
        #[serde(rename_all = "snake_case")]
        pub enum JobKind {
            $($(#[$about])* $kind,)*
            $($(#[$about_shared])* $kind_shared,)*
        }

        /// The table of each method, which only its kind of job uses.
        pub(super) const TABLES: &[Need<Config>] = &[$((
            stringify!($table),
            concat!("job.kind = \"", stringify!($table), "\""),
            |config| config.job.kind == JobKind::$kind,
        ),)*];

        /// The keys of all methods that have a condition.
        pub(super) fn needs() -> impl Iterator<Item = &'static Need<Config>> {
            let all = [$($($path)::+::needs(),)* $($($path_shared)::+::needs(),)*];
            all.into_iter().flatten()
        }

        /// The metrics of all methods.
        pub fn metrics() -> impl Iterator<Item = &'static Key> {
            let all = [$($($path)::+::metrics(),)* $($($path_shared)::+::metrics(),)*];
            all.into_iter().flatten()
        }

        impl Config {
            /// The settings of the job's method.
            pub fn method(&self) -> &dyn MethodConfig {
                match self.job.kind {
                    $(JobKind::$kind => &self.$table,)*
                    $(JobKind::$kind_shared => &self.$table_shared,)*
                }
            }

            /// Fills in keys that the method decides.
            pub(super) fn fill_method_defaults(&mut self) {
                match self.job.kind {
                    $(JobKind::$kind => $($path)::+::fill_defaults(self),)*
                    $(JobKind::$kind_shared => $($path_shared)::+::fill_defaults(self),)*
                }
            }

            /// Sets the tokens of a micro-batch if the job leaves them to the plan.
            pub fn set_microbatches(&mut self, tokens: usize) {
                for method in [$(&mut self.$table.microbatch_tokens_max,)*] {
                    if *method == super::auto::AUTO {
                        *method = tokens;
                    }
                }
            }
        }
    };
}
with_methods!(kinds);

/// Keys or tables that have an effect only if a condition holds: their names, the condition in words, and the
/// condition.
pub type Need<T> = (&'static str, &'static str, fn(&T) -> bool);

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
    /// Plain text for `data.pretrain`, all of which is learned: documents are [text].
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
    /// Whether each prompt of a step also gets a greedy response.
    pub greedy: bool,
    /// Whether the loss is one of tokens of given responses, so that held-out rows have no rewards to record.
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

    /// The passes over the data if `job.steps` is 0. `None` if the method needs `job.steps`.
    fn epochs(&self) -> Option<f64> {
        None
    }

    fn uses(&self, config: &Config) -> Uses;

    /// Rejects combinations of values that the method does not support.
    fn check(&self, _config: &Config) -> Result<()> {
        Ok(())
    }

    /// Fills in keys that the method decides.
    fn fill_defaults(_config: &mut Config)
    where
        Self: Sized,
    {
    }

    /// The metrics that no other method has.
    fn metrics() -> &'static [Key]
    where
        Self: Sized,
    {
        &[]
    }

    /// Keys that have an effect only if a condition holds, in addition to the method's own table.
    fn needs() -> &'static [Need<Config>]
    where
        Self: Sized,
    {
        &[]
    }
}
