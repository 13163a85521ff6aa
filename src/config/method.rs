//! The kinds of jobs: the only list of methods that the configuration has. The file of each method has its settings and
//! its requirements for the rest of a job; `train::methods` has the methods themselves.

pub mod distill;
pub mod eval;
mod interface;
pub mod labelled;
pub mod ppo;
pub mod preference;
pub mod sft;

pub use interface::{MethodConfig, RowKind, Shared, Uses};

use super::metric::Key;

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

        /// The metrics of all methods.
        pub fn metrics() -> impl Iterator<Item = &'static Key> {
            let all = [$($($path)::+::metrics(),)* $($($path_shared)::+::metrics(),)*];
            all.into_iter().flatten()
        }
    };
}
with_methods!(kinds);
