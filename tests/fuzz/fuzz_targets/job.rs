//! Jobs: TOML, its tables and its ranges.

use rlhf_hpc::config;

/// Parses the input and checks what it parses to. A job that is printed must parse again.
pub fn run(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(config) = config::parse(text, &[]) else { return };
    drop(config.check());
    config::parse(&config.to_toml(), &[]).expect("a printed job parses");
}

/// Jobs of the repository.
pub fn seeds() -> Vec<Vec<u8>> {
    let jobs = [
        include_str!("../../../jobs/reference.toml"),
        "[job]\nkind = \"sft\"\n[model]\nactor = \"m\"\n[data]\nprompts = \"a.jsonl\"\n",
        "job.kind = \"ppo\"\nreward.rule = [\"exact\"]\nmesh = { data = 2, tensor = 2 }\n",
        "[[reward.python]]\nfile = \"a.py\"\n[[data.eval_sets]]\nname = \"a\"\nprompts = [\"b\"]\n",
    ];
    jobs.map(|job| job.as_bytes().to_vec()).into()
}
