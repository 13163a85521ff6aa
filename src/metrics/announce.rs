//! What the caller tells the terminal at the start and at the end of a run.

use super::display::{grouped, one_line};

/// One role's model, for the banner.
#[derive(Clone, Debug, Default)]
pub struct BannerModel {
    /// actor, critic, reference or reward.
    pub role: String,
    pub parameters: u64,
    /// f32 or bf16.
    pub dtype: String,
    /// Where the weights come from.
    pub path: String,
}

/// What is said before the first step.
#[derive(Clone, Debug)]
pub struct Banner {
    pub job_kind: String,
    pub job_name: String,
    pub run_dir: String,
    pub seed: u64,
    /// Steps of the whole job.
    pub steps: u64,
    /// The step of the checkpoint that the run goes on from.
    pub resumed_from: Option<u64>,
    /// Each host and its ranks.
    pub hosts: Vec<(String, usize)>,
    pub threads_per_rank: usize,
    /// What the ranks compute on, e.g. `cpu (avx512, bf16)`; equal ones once.
    pub devices: Vec<String>,
    /// How ranks are arranged, a row for each place of roles.
    pub meshes: Vec<String>,
    pub models: Vec<BannerModel>,
    /// Planned bytes on the fullest rank, by purpose.
    pub memory: Vec<(String, u64)>,
    /// What the run measures beside it at its end: what is taken of a rank's device, or resident at its host.
    pub memory_planned: u64,
    /// Other rows, e.g. `("data", "3,600 train and 400 eval prompts")`.
    pub notes: Vec<(String, String)>,
}

/// How a run ended.
#[derive(Clone, Debug, Default)]
pub struct Finish {
    /// Steps done in all, those before a resume included.
    pub steps: u64,
    /// Wall-clock seconds of this process.
    pub seconds: f64,
    /// What became of the input rows, in the order shown, e.g. `("trained", 3900)`. Empty: not shown.
    pub ledger: Vec<(String, u64)>,
    /// Other rows, e.g. `("export", "runs/x/export")`.
    pub notes: Vec<(String, String)>,
}

/// `3,900 trained, 80 filtered: too_long, 20 deferred`.
pub fn ledger_line(counts: &[(String, u64)]) -> String {
    let parts: Vec<String> = counts.iter().map(|(what, n)| format!("{} {}", grouped(*n), one_line(what))).collect();
    parts.join(", ")
}
