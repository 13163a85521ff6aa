//! The state that a resume must restore, and its form in a checkpoint.

use super::best::Best;
use super::config_diff;
use super::inputs::{self, Inputs};
use crate::checkpoint::{self, Checkpoint, Keep, Manifest, ModelVectors, Payload};
use crate::comm::records;
use crate::data::{Cursor, Ledger};
use crate::dtype::KvDtype;
use crate::error::{Error, Kind, Result};
use crate::launch::run::Run;
use crate::learn::Learner;
use crate::model::{Arch, corrections, small_files};
use crate::optim::host_state::Vector;
use crate::sys::trace::{self, Category};
use crate::tensor::arena::Buffer;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The small part of a checkpoint: JSON in its manifest.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct State {
    pub step: u64,
    pub cursor: Cursor,
    pub ledger: Ledger,
    /// The method's own state. For ppo: the KL controller and the reward moments.
    pub method: Value,
    /// Optimizer steps of each learner.
    pub updates: Vec<u64>,
    /// Whether `work.bin` holds an unfinished step.
    pub has_work: bool,
    /// Whether the evaluation after `step` is still due.
    pub eval_due: bool,
    /// The step of the last evaluation, if there was one.
    #[serde(default)]
    pub evaluated: Option<u64>,
    #[serde(default)]
    pub best: Best,
    /// Hashes of the job's inputs.
    pub inputs: Inputs,
}

/// The key of a manifest's state that says whether exports keep the tower, because rows have images.
pub const IMAGES: &str = "images";

/// Saves at the end of `state.step`, or within the next step if there is `work`. Also writes `ledger.json`. `learned`:
/// names of all models that learn. `learners`: the ones on this rank.
pub fn save(
    run: &mut Run,
    state: &mut State,
    learned: &[&'static str],
    learners: &[&mut Learner],
    work: Option<&[u8]>,
) -> Result<()> {
    let _span = trace::span(Category::Phase, "checkpoint", "", || []);
    let synced = run.recorder.sync();
    run.ranks.all.agree(synced)?;
    let of = |name: &&str| learners.iter().find(|l| l.role.name == *name).map_or(0.0, |l| l.zero.updates as f64);
    let mut updates: Vec<f64> = learned.iter().map(of).collect();
    run.ranks.all.all_reduce_max_f64(&mut updates);
    state.updates = updates.into_iter().map(|updates| updates as u64).collect();
    state.has_work = work.is_some();
    let rank = run.ranks.world.rank;
    let side = if rank == 0 { side_files(&run.config.model.actor) } else { Ok(Vec::new()) };
    let side = run.ranks.all.agree(side)?;
    // If state is offloaded to memory-mapped files, only one vector at a time is in memory.
    let evict = learners.iter().map(|learner| || learner.zero.buffers().for_each(Buffer::evict));
    let evict: Vec<_> = evict.collect();
    let names = learners.iter().map(|learner| {
        let learner: &Learner = learner;
        let name = |what| (what, move |at: usize| learner.describe_element(what, at));
        learner.vectors().map(name).collect()
    });
    let names: Vec<Vec<_>> = names.collect();
    let mut files: Vec<(String, Payload)> = Vec::new();
    for ((learner, evict), names) in learners.iter().zip(&evict).zip(&names) {
        for (what, name) in names {
            let (role, stretches) = (&learner.role, learner.stretches(*what));
            let (file, shard) = checkpoint::shard((role.name, what.name()), &role.weights.table, rank, stretches);
            files.push((file, shard.finite(name).and_then(evict)));
        }
    }
    if let Some(bytes) = work.filter(|_| rank == 0) {
        files.push(("work.bin".to_string(), Payload::bytes(bytes)));
    }
    files.extend(side.iter().map(|(name, bytes)| (name.clone(), Payload::bytes(bytes))));
    let mut json = serde_json::json!({ "run": state, "roles": learned, "config": run.config.to_toml() });
    if let Some(gemm) = &run.gemm {
        json["gemm"] = serde_json::json!(gemm);
    }
    if learners.iter().any(|learner| learner.role.arch().uses_tower()) {
        json[IMAGES] = true.into();
    }
    let manifest = Manifest::new(state.step, &run.ranks.layout().mesh, &run.config_hash, json);
    let keep = Keep { last: run.config.checkpoint.keep_last, best: state.best.step() };
    checkpoint::save(&run.checkpoints(), &run.ranks.all, &files, manifest, keep)?;
    let written = if rank == 0 { state.ledger.write(&run.dir.join("ledger.json")) } else { Ok(()) };
    run.ranks.all.agree(written)
}

/// config.json, the tokenizer files, and what else of the model is not trained. With them a checkpoint can be exported without the directory it began from.
fn side_files(dir: &Path) -> Result<Vec<(String, Vec<u8>)>> {
    let mut files = Vec::new();
    for name in small_files::names(dir)? {
        if let Some(path) = small_files::own(dir, &name)? {
            files.push((name, std::fs::read(&path).map_err(|e| Error::io("read", &path, &e))?));
        }
    }
    files.extend(Arch::read(dir)?.0.corrections.to_file()?.map(|bytes| (corrections::FILE.to_owned(), bytes)));
    Ok(files)
}

/// A checkpoint that a run resumes from, with its state.
pub struct Resumed {
    checkpoint: Checkpoint,
    pub state: State,
    /// The rest of an interrupted step.
    pub work: Option<Vec<u8>>,
}

/// Finds the newest complete checkpoint of the run, before any model is read. `first`: the architecture of the job's
/// first model. `learned`: the names of the models that learn. `inputs`: the hashes of the current inputs. All ranks
/// call this.
///
/// # Errors
/// `Usage` if the state depends on a key or an input that has changed. `Data` if the checkpoint belongs to another
/// model or is damaged. The error is the same on all ranks.
pub fn find(run: &Run, first: &Arch, learned: &[&'static str], inputs: &Inputs) -> Result<Option<Resumed>> {
    let find = if run.dry_run { checkpoint::find } else { checkpoint::resume };
    let Some(checkpoint) = find(&run.checkpoints(), &run.ranks.all)? else { return Ok(None) };
    for skipped in &checkpoint.skipped {
        run.recorder.warn(&format!("skipped an incomplete checkpoint: {skipped}"));
    }
    let saved = &checkpoint.manifest.state;
    // A replay is meant to compute with other settings.
    let changes = |text| match run.replay {
        Some(_) => Ok(Vec::new()),
        None => config_diff::check(text, &run.config, saved["run"]["has_work"] == true),
    };
    let known = saved["config"].as_str().map_or(Ok(Vec::new()), changes).and_then(|mut changed| {
        let (mut state, work) = state_of(learned, &checkpoint, first, run.replay.is_some())?;
        changed.extend(inputs::compare(&mut state.inputs, inputs, run.config.checkpoint.changed_inputs)?);
        Ok((changed, state, work))
    });
    let (changed, mut state, work) = run.ranks.all.agree(known)?;
    check_best(run, &checkpoint, &mut state.best)?;
    let (root, keep) = (run.checkpoints(), Keep { last: run.config.checkpoint.keep_last, best: state.best.step() });
    let is_repairer = run.ranks.all.rank() == 0 && !run.dry_run;
    let repaired = if is_repairer { checkpoint::repair(&root, &checkpoint.dir, state.step, keep) } else { Ok(()) };
    run.ranks.all.agree(repaired)?;
    if !changed.is_empty() {
        run.recorder.say(&format!("resuming with changes: {}", changed.join(", ")));
    }
    Ok(Some(Resumed { checkpoint, state, work }))
}

/// Forgets the best evaluation if its checkpoint is lost: it is damaged, or a newer one, now damaged, replaced it.
/// All ranks call this.
fn check_best(run: &Run, resumed: &Checkpoint, best: &mut Best) -> Result<()> {
    let Some(step) = best.step().filter(|_| run.replay.is_none()) else { return Ok(()) };
    let all = &run.ranks.all;
    // Other hosts may still see an older listing.
    let dir: PathBuf = records::of_first(all, || checkpoint::best_of(&run.checkpoints(), step));
    let opened = if dir == resumed.dir { return Ok(()) } else { Checkpoint::open(&dir) };
    if let Err(error) = all.agree(opened.and_then(|best| best.verify(all))) {
        // The checkpoint may be intact although it cannot be read at the moment.
        if error.kind == Kind::Io && !all.any(checkpoint::lacks_files(&dir)) {
            return Err(
                error.hint(format!("run the same command again, or remove {} to continue without it", dir.display()))
            );
        }
        let was = best.describe().unwrap_or_default();
        run.recorder.warn(&format!(
            "the best checkpoint ({was}) is lost: {}; the next evaluation counts as the best",
            error.message
        ));
        best.forget();
    }
    Ok(())
}

/// Opens the checkpoint of the best evaluation of the run that has just ended. All ranks call this.
pub fn best(run: &Run, best: &Best, first: &Arch, learned: &[&'static str]) -> Result<Option<Resumed>> {
    let Some(step) = best.step() else { return Ok(None) };
    let gone = "if the best checkpoint is gone, add checkpoint.export_best=false to export the last one";
    let opened = Checkpoint::open(&checkpoint::best_of(&run.checkpoints(), step)).map_err(|e| e.hint(gone));
    let checkpoint = run.ranks.all.agree(opened)?;
    run.ranks.all.agree(checkpoint.verify(&run.ranks.all))?;
    let (state, work) = run.ranks.all.agree(state_of(learned, &checkpoint, first, false))?;
    Ok(Some(Resumed { checkpoint, state, work }))
}

impl Resumed {
    /// Restores the learners' weights and optimizer state. All ranks call this.
    pub fn fill(&self, run: &Run, learned: &[&'static str], learners: &mut [&mut Learner]) -> Result<()> {
        let filled = learners.iter_mut().try_for_each(|learner| {
            let index = learned.iter().position(|name| *name == learner.role.name);
            let updates = self.state.updates[index.expect("a learner has a learned role")];
            let (table, arch) = (learner.role.weights.table.clone(), learner.role.arch().clone());
            let vectors = ModelVectors::open(&self.checkpoint, learner.role.name, &arch, &table)?;
            // If an average is kept from now on, it begins with the weights.
            let begins = !vectors.has(Vector::Average.name());
            let saved = |what| if what == Vector::Average && begins { Vector::Master } else { what };
            learner.restore(updates, |what, range, out| vectors.read(saved(what).name(), range, out))
        });
        run.ranks.all.agree(filled)?;
        for learner in learners {
            learner.all_gather();
        }
        Ok(())
    }
}

fn state_of(learned: &[&str], from: &Checkpoint, first: &Arch, is_replay: bool) -> Result<(State, Option<Vec<u8>>)> {
    let mut state = read(from)?;
    let json = &from.manifest.state["roles"];
    let roles: Vec<String> = serde_json::from_value(json.clone()).unwrap_or_default();
    let place = |name: &&str| roles.iter().position(|role| role == name);
    // A replay with another estimator may have no use for the critic.
    let places: Vec<usize> = learned.iter().filter_map(place).collect();
    let is_known = places.len() == learned.len() && state.updates.len() == roles.len();
    if !is_known || roles.len() > learned.len() && !is_replay {
        return Err(unusable(from, &format!("it holds {json}, but this job trains {learned:?}"))
            .hint("set another job.dir, or use the configuration that the run was saved with"));
    }
    state.updates = places.into_iter().map(|place| state.updates[place]).collect();
    check_model(from, first)
        .map_err(|e| e.hint("set another job.dir, or set model.actor to the model that the run was started with"))?;
    let work = if state.has_work { Some(from.file("work.bin")?.to_vec()) } else { None };
    Ok((state, work))
}

fn unusable(from: &Checkpoint, why: &str) -> Error {
    Error::data(format!("checkpoint {}: {why}", from.dir.display()))
}

/// The small part of a checkpoint.
pub fn read(from: &Checkpoint) -> Result<State> {
    let state = from.manifest.state["run"].clone();
    serde_json::from_value(state).map_err(|e| unusable(from, &format!("its state is malformed: {e}")))
}

/// Rejects a checkpoint whose first model does not compute as `first` does.
pub fn check_model(from: &Checkpoint, first: &Arch) -> Result<()> {
    let saved = Arch::load(&from.dir)?.for_rows(first.context);
    // The rounding of keys is the job's.
    if !saved.computes_as(&first.clone().with_keys_in(KvDtype::Model)) {
        let (was, is) = (saved.shape(), first.shape());
        let what = if was == is {
            "its config.json differs from model.actor's in rope, norm, window or bias settings".to_string()
        } else {
            format!("it was saved from {was}, but model.actor is {is}")
        };
        return Err(unusable(from, &what));
    }
    Ok(())
}
