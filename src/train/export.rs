//! The end of a job: the export, the ledger, a summary.

use super::models::ModelSpec;
use crate::config::Config;
use crate::data::Ledger;
use crate::error::{Result, format_bytes};
use crate::launch::run::Run;
use crate::learn::{Learner, Role};
use crate::metrics::{grouped, keys};
use crate::model::adapter_config::{AdapterConfig, Task};
use crate::model::collect::collect;
use crate::model::export::{self, Export};
use crate::model::merge::collect_whole;
use crate::model::{Arch, Head, ParamTable, small_files};
use crate::text::Tokenizer;
use std::path::Path;
use std::sync::Arc;

const EXPORT: &str = "export";
/// Directory of the export of the moving average of the weights.
const EXPORT_EMA: &str = "export-ema";

/// Rejects a directory that the export may not replace, and warns of files that it will not contain, before the first
/// step instead of after the last.
pub fn check_export(config: &Config) -> Result<()> {
    if !config.job.export {
        return Ok(());
    }
    small_files::warn_of_foreign(&config.model.actor)?;
    let check = |name| export::check_target(&config.job.dir.join(name));
    let averaged = if config.optim.actor.ema_beta > 0.0 { check(EXPORT_EMA) } else { Ok(()) };
    check(EXPORT).and(averaged).map_err(|e| e.also("set another job.dir, or set job.export = false"))
}

/// Ends the job. `ended`: summary rows about how the run ended.
pub fn finish(
    run: &mut Run,
    mut actor: Option<&mut Learner>,
    steps: u64,
    ledger: &Ledger,
    ended: Vec<(String, String)>,
) -> Result<()> {
    let out = run.dir.join(EXPORT);
    let wanted = run.config.job.export;
    let average = run.dir.join(EXPORT_EMA);
    let mut exported = Ok(());
    for learner in actor.iter_mut().filter(|_| wanted) {
        exported = write(run, &learner.role, &out);
        if learner.zero.has_average() {
            learner.swap_in_average();
            exported = exported.and(write(run, &learner.role, &average));
        }
    }
    let ledger_path = run.dir.join("ledger.json");
    let done = exported.and_then(|()| if run.ranks.world.rank == 0 { ledger.write(&ledger_path) } else { Ok(()) });
    run.ranks.all.agree(done)?;
    let peaks = run.memory_peaks();
    let of = |key| peaks.iter().find(|(name, _)| *name == key).map_or(0.0, |(_, bytes)| *bytes) as u64;
    let measured = of(keys::MEMORY_PEAK_BYTES).saturating_sub(of(keys::MEMORY_START_BYTES));
    let (truncated, filtered) = (ledger.truncated.rows, ledger.filtered.values().sum());
    let became = [
        ("trained", ledger.trained),
        ("truncated", truncated),
        ("held out", ledger.held_out),
        ("filtered", filtered),
        ("deferred", ledger.deferred),
    ];
    let became = became.map(|(what, rows)| format!("{} {what}", grouped(rows)));
    let dropped = [("samples", ledger.samples_dropped), ("groups", ledger.groups_dropped)];
    let dropped = dropped.iter().filter(|(_, n)| *n > 0).map(|(what, n)| format!("; {} {what} dropped", grouped(*n)));
    let mut rows = vec![("ledger".to_string(), became.join(", ") + &dropped.collect::<String>())];
    if let Some(expected) = run.expected_of_fullest() {
        let (measured, planned) = (format_bytes(measured), format_bytes(expected.taken));
        rows.push(("memory".to_string(), format!("up to {measured} above the start, {planned} planned per rank")));
    }
    rows.extend(ended);
    if wanted {
        rows.push(("export".to_string(), out.display().to_string()));
        if run.config.optim.actor.ema_beta > 0.0 {
            rows.push(("average".to_string(), average.display().to_string()));
        }
    }
    let finished = run.recorder.finish(steps, run.started.elapsed().as_secs_f64(), &rows);
    run.ranks.all.agree(finished)
}

/// Writes the export on the actor's first rank, from rows that all its ranks send. No rank holds the whole model, or
/// even a whole parameter. A model with adapters is exported as its adapter.
fn write(run: &Run, actor: &Role, out: &Path) -> Result<()> {
    let (is_first, weights) = (run.ranks.axes.all.rank() == 0, &actor.weights);
    let (arch, dtype) = (actor.arch(), weights.dtype());
    if let Some(tuning) = arch.tuning.as_deref() {
        let merged = Arc::new(ParamTable::new(&Arch { tuning: None, ..arch.clone() }, weights.table.head()));
        if tuning.adapters.is_empty() {
            let begin = || Export::begin(out, &described(run, actor)?, &merged, dtype, Some(&actor.dir));
            return collected(is_first, begin, |take| collect_whole(arch, weights, &merged, &run.ranks.axes, take));
        }
        let spec = ModelSpec::actor(&run.config, weights.table.head());
        let config = adapter_config(&run.config, &ModelSpec { dir: actor.dir.clone(), ..spec.located(&run.config)? })?;
        let (params, own) = (merged.shapes(), Arc::new(actor.whole()));
        let begin = || Export::begin_adapter(out, &config, tuning, &params, &own, dtype, arch.wrapper.is_some());
        return collected(is_first, begin, |take| collect(arch, weights, &run.ranks.axes, take));
    }
    let is_whole = run.ranks.axes.tensor.size() == 1 && run.ranks.axes.pipeline.size() == 1;
    if is_whole && !weights.is_sharded() {
        let all = || export::export(out, &described(run, actor)?, weights, dtype, Some(&actor.dir));
        return if is_first { all() } else { Ok(()) };
    }
    let begin = || Export::begin(out, &described(run, actor)?, &Arc::new(actor.whole()), dtype, Some(&actor.dir));
    collected(is_first, begin, |take| collect(arch, weights, &run.ranks.axes, take))
}

/// Writes on the first rank the rows of parameters that `collect` hands out.
fn collected(
    is_first: bool,
    begin: impl FnOnce() -> Result<Export>,
    collect: impl FnOnce(&mut dyn FnMut(usize, &[f32])),
) -> Result<()> {
    let mut export = if is_first { begin().map(Some) } else { Ok(None) };
    // Every rank sends all its rows, even if the writer has failed.
    collect(&mut |parameter, rows| {
        if let Ok(Some(under_way)) = &mut export
            && let Err(error) = under_way.rows(parameter, rows)
        {
            export = Err(error);
        }
    });
    export?.map_or(Ok(()), Export::commit)
}

/// The settings of the adapter of a trained model: those of the job, or of the adapter that it started from.
pub fn adapter_config(config: &Config, model: &ModelSpec) -> Result<AdapterConfig> {
    let ModelSpec { role, dir, adapter, head, .. } = model;
    let task = if *head == Head::Value { Task::Value } else { Task::LanguageModel };
    let base = Some(std::path::absolute(dir).unwrap_or_else(|_| dir.clone()).display().to_string());
    let settings = if adapter.as_os_str().is_empty() {
        config.lora.of_role(*role)
    } else {
        AdapterConfig::read(adapter)?.settings
    };
    Ok(AdapterConfig { settings, base, task })
}

/// The architecture with all end tokens of the job, and with its use of the chat template.
fn described(run: &Run, actor: &Role) -> Result<Arch> {
    let tokenizer = Tokenizer::find(&actor.dir)?;
    let ends = tokenizer.as_ref().map_or(&[][..], Tokenizer::eos_ids);
    Ok(actor.arch().clone().ending_with(ends).asked_with(run.config.data.template_args()))
}
