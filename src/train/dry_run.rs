//! The dry run of a job on a machine without its GPUs, or without its other ranks.

use crate::launch::run::Run;

/// Reports the checks of a job, as far as this machine can make them. `rows` describe the data.
pub fn report(run: &mut Run, models: &[&str], rows: Vec<(String, String)>) {
    let checked = rows.into_iter().map(|(name, text)| format!("{name}: {text}")).collect::<Vec<_>>().join("; ");
    let (lacks, models) = (run.lacks.clone(), models.join(", "));
    let others = lacks.ranks.map(|ranks| format!("the other {} ranks", ranks - 1));
    let parts: Vec<String> = lacks.gpu.as_ref().map(|_| "a GPU".to_owned()).into_iter().chain(others).collect();
    run.recorder
        .say(&format!("checked without {}: settings, models ({models}), tokenizer, {checked}", parts.join(" and ")));
    let (gpu, ranks) = (lacks.gpu.is_some(), lacks.ranks);
    let reason = match (&lacks.gpu, ranks) {
        (Some(why), _) => format!("no GPU: {why}"),
        (None, ranks) => format!("the job needs {} ranks, and this is one", ranks.unwrap_or(1)),
    };
    let options = [ranks.map(|ranks| format!(" --ranks {ranks}")), gpu.then(|| " --gpu NAME".to_owned())];
    run.recorder.warn(&format!(
        "{reason}; not checked: {}memory, collectives and weights. `rlhf-hpc plan JOB.toml{}` computes memory and time",
        if gpu { "GPU, " } else { "" },
        options.into_iter().flatten().collect::<String>()
    ));
    let (on, by) = match ranks {
        Some(ranks) if gpu => (format!("{ranks} ranks with GPUs"), "one rank without a GPU"),
        Some(ranks) => (format!("{ranks} ranks"), "one rank"),
        None => ("GPUs".to_owned(), "a machine without one"),
    };
    run.recorder.say(&format!("dry run: the job is ready to start on {on}, as far as {by} can check it"));
}
