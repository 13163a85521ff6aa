//! What a run shows at its start and at its end.

#[derive(Clone, Debug, Default)]
pub struct BannerModel {
    pub role: String,
    pub parameters: u64,
    pub dtype: String,
    pub path: String,
}

#[derive(Clone, Debug)]
pub struct Banner {
    pub job_kind: String,
    pub job_name: String,
    pub run_dir: String,
    pub seed: u64,
    pub steps: u64,
    /// The step of the checkpoint that the run resumes from.
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
    /// The bytes that the run compares with this at its end: in use of a rank's device, or resident at its host.
    pub memory_planned: u64,
    /// Other rows, e.g. `("data", "3,600 train and 400 eval prompts")`.
    pub notes: Vec<(String, String)>,
}

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
