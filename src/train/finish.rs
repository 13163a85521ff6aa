//! What a finished job leaves: the export, the ledger, a summary.

use super::role::Role;
use super::setup::Run;
use crate::data::Ledger;
use crate::device::Device;
use crate::error::Result;
use crate::metrics::{Finish, keys};
use crate::model::{Reshard, TensorPart, Weights, export};
use crate::sys::files;

pub fn finish(run: &mut Run, actor: Option<&Role>, steps: u64, ledger: &Ledger) -> Result<()> {
    let out = run.dir.join("export");
    let wanted = run.config.job.export;
    let gathered = actor.filter(|_| wanted).and_then(|actor| on_first(run, actor));
    let done = if run.world.rank == 0 {
        let exported = match actor.filter(|_| wanted) {
            Some(actor) => {
                let weights = gathered.as_ref().unwrap_or(&actor.weights);
                export::export(&out, actor.arch(), weights, weights.dtype(), Some(&actor.dir))
            }
            None => Ok(()),
        };
        exported.and_then(|()| ledger.write(&run.dir.join("ledger.json")))
    } else {
        Ok(())
    };
    run.all.agree(done)?;
    let peaks = run.memory_peaks();
    let of = |key| peaks.iter().find(|(name, _)| *name == key).map_or(0.0, |(_, bytes)| *bytes) as u64;
    let measured = of(keys::MEMORY_PEAK_BYTES).saturating_sub(of(keys::MEMORY_START_BYTES));
    let mut notes = Vec::new();
    if let Some(planned) = &run.planned {
        let words = |bytes: u64| files::size_words(bytes);
        let of_it = if run.device == Device::Cuda { planned.memory.arena } else { planned.memory.resident };
        let (measured, planned) = (words(measured), words(of_it as u64));
        notes.push(("memory".to_string(), format!("{measured} at most above the start, {planned} planned")));
    }
    if wanted {
        notes.push(("export".to_string(), out.display().to_string()));
    }
    let filtered: u64 = ledger.filtered.values().sum();
    let summary = Finish {
        steps,
        seconds: run.started.elapsed().as_secs_f64(),
        ledger: vec![
            ("trained".to_string(), ledger.trained),
            ("truncated".to_string(), ledger.truncated.rows),
            ("filtered".to_string(), filtered),
            ("deferred".to_string(), ledger.deferred),
        ],
        notes,
    };
    let finished = run.recorder.finish(&summary);
    run.all.agree(finished)
}

/// The whole model on the rank that writes it, unit by unit from all ranks; nothing where that rank holds it anyway.
fn on_first(run: &Run, actor: &Role) -> Option<Weights> {
    if run.axes.tensor.size() == 1 && !actor.weights.is_sharded() {
        return None;
    }
    let whole = Reshard::new(&actor.transformer, &actor.weights.table, &run.axes, TensorPart::whole());
    let mut all = (run.axes.all.rank() == 0).then(|| Weights::zeros(whole.table().clone(), actor.weights.dtype()));
    whole.each(&actor.weights, |unit, values| {
        if let Some(all) = &mut all {
            all.put(unit, values);
        }
    });
    all
}
