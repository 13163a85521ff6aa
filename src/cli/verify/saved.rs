//! A checkpoint of the job's ranks: saved, found again next to the remains of an interrupted one, and restored.

use super::page::Check;
use super::replicas;
use crate::checkpoint::{self, Keep, Manifest, ModelVectors, Payload};
use crate::comm::Axes;
use crate::error::{Error, Result};
use crate::launch::ranks::Ranks;
use crate::learn::Learner;
use crate::optim::host_state::Vector;
use std::path::Path;

/// The step of the checkpoint.
const STEP: u64 = 1;

/// Saves a learner that all ranks of `axes` share. All of them call this.
///
/// # Errors
/// The errors of `checkpoint::save`.
fn save(root: &Path, ranks: &Ranks, axes: &Axes, learner: &Learner) -> Result<()> {
    let (rank, table) = (axes.all.rank(), &learner.role.weights.table);
    let file = |what: Vector| checkpoint::shard((learner.role.name, what.name()), table, rank, learner.stretches(what));
    let files: Vec<(String, Payload)> = learner.vectors().map(file).collect();
    let manifest = Manifest::new(STEP, &ranks.layout().mesh, "verify", serde_json::Value::Null);
    checkpoint::save(root, &axes.all, &files, manifest, Keep { last: 1, best: None }).map(drop)
}

/// Leaves the remains of a newer checkpoint that a kill interrupted.
fn interrupt(root: &Path) -> Result<()> {
    let partial = root.join(format!(".step-{}.partial", STEP + 1));
    let path = partial.join("actor.rank-0000.bin");
    let written = std::fs::create_dir_all(&partial).and_then(|()| std::fs::write(&path, [7; 1000]));
    written.map_err(|e| Error::io("write", &path, &e))
}

/// Saves `learner` under `root`, restores `other` from it, and makes one more `step` with both: all ranks must hold the
/// same bits. All ranks of the job call this.
///
/// # Errors
/// The errors of saving, restoring and stepping, the same on all ranks.
pub fn check(
    root: &Path,
    ranks: &Ranks,
    mut learner: Learner,
    mut other: Learner,
    step: impl Fn(&mut Learner) -> Result<()>,
) -> Result<Check> {
    let (all, axes) = (&ranks.all, &ranks.axes);
    let root = root.join(format!("checkpoints-{}", ranks.placement));
    all.agree(save(&root, ranks, axes, &learner))?;
    all.agree(if axes.all.rank() == 0 { interrupt(&root) } else { Ok(()) })?;
    let found = all.agree(checkpoint::resume(&root, &axes.all))?;
    let found = found.filter(|found| found.manifest.step == STEP && found.skipped.is_empty());
    let found = all.agree(found.ok_or_else(|| Error::fault("the checkpoint was not found again")))?;
    let (table, arch) = (other.role.weights.table.clone(), other.role.arch().clone());
    let vectors = all.agree(ModelVectors::open(&found, other.role.name, &arch, &table))?;
    let restored = other.restore(learner.zero.updates, |what, range, out| vectors.read(what.name(), range, out));
    all.agree(restored)?;
    other.all_gather();
    for learner in [&mut learner, &mut other] {
        step(learner)?;
    }
    let differs = (0..table.units().len()).find_map(|unit| {
        let range = learner.role.weights.local(unit).range();
        let [own, restored] = [&learner, &other].map(|learner| learner.role.weights.to_master(range.clone()));
        let at = own.iter().zip(restored.iter()).position(|(a, b)| a.to_bits() != b.to_bits())?;
        Some(format!("after a resume, the next step gives other values of {}", table.name_at(range.start + at)))
    });
    let wrong = replicas::by_rank(&ranks.world, differs)?;
    Ok(Check::of_faults("checkpoint", &wrong, || {
        let count = all.size();
        let of = if count == 1 { "one rank".to_owned() } else { format!("{count} ranks") };
        format!("saved by {of}, restored next to an interrupted one; the next step is the same to the bit")
    }))
}
