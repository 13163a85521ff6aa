//! `replay --batch`: the numbers of a batch of another system, computed again by the functions of a job.

mod causes;
mod changes;
mod compare;
mod compute;
mod file;
mod models;
mod rows;
mod settings;
mod show;

use super::super::out;
use crate::error::{Error, Result};
use crate::sys::files;
use causes::Difference;
use compare::{Mask, gap, mean};
use compute::Case;
use file::File;
use models::Models;
use rows::{Numbers, Quantity, Rows, Theirs};
use show::{Compared, Report};
use std::path::{Path, PathBuf};

/// A batch, and the models that computed it.
pub struct Batch<'a> {
    pub file: &'a Path,
    pub model: Option<&'a Path>,
    pub reference: Option<&'a Path>,
    pub critic: Option<&'a Path>,
    /// The largest difference that is rounding, as a part of the larger number or of 1.
    pub tolerance: f64,
}

/// Computes all quantities of a batch and prints them next to those of the other system.
///
/// # Errors
/// `Fault` if a quantity differs; `Data` if the file is not a batch, or nothing of it can be computed.
pub fn run(batch: &Batch) -> Result<()> {
    let report = compute(batch).map_err(|e| e.within(batch.file.display()))?;
    out::write(report.text().as_bytes())?;
    match report.first() {
        Some(first) => Err(Error::fault(format!("{} of the batch differs", first.quantity.name()))),
        None => Ok(()),
    }
}

fn compute(batch: &Batch) -> Result<Report> {
    let mut file = File::read(batch.file)?;
    let base = files::parent(batch.file);
    let (settings, named) = settings::read(std::mem::take(&mut file.settings), base)?;
    let (rows, mut theirs) = rows::read(&mut file)?;
    let dir = |given: Option<&Path>, named: &Option<PathBuf>| given.map(Path::to_path_buf).or_else(|| named.clone());
    let [model, reference, critic] =
        [dir(batch.model, &named.model), dir(batch.reference, &named.reference), dir(batch.critic, &named.critic)];
    let has_models = [&model, &reference, &critic].iter().any(|dir| dir.is_some());
    if has_models && rows.lines.is_empty() {
        return Err(models::no_tokens());
    }
    let mut models = Models::open(model.as_deref(), reference.as_deref(), critic.as_deref())?;
    models.check(&rows.lines, &rows.numbers)?;
    let mut case = Case { settings, rows };
    if case.rows.logprobs.is_empty()
        && let Ok(Numbers::Tokens(logprobs)) = models.forward(Quantity::Logprobs, &case)
    {
        case.rows.logprobs = logprobs;
    }
    drop_inputs(&case, &models, &mut theirs);
    report(&case, &theirs, &mut models, named.system, batch.tolerance)
}

/// Removes the numbers that only a missing model could compute: they are inputs then.
fn drop_inputs(case: &Case, models: &Models, theirs: &mut Theirs) {
    let Rows { samples, has_scores, .. } = &case.rows;
    let has_rewards = *has_scores || !samples[0].rewards.is_empty();
    let without = [
        (Quantity::Logprobs, models.actor.is_none()),
        (Quantity::RefLogprobs, models.reference.is_none()),
        (Quantity::Values, models.critic.is_none()),
        (Quantity::Kl, samples[0].ref_logprobs.is_empty() || !has_scores),
        (Quantity::Rewards, !has_scores),
        (Quantity::Returns, !has_rewards),
        (Quantity::Advantages, !has_rewards),
    ];
    without.iter().filter(|(_, is_input)| *is_input).for_each(|(quantity, _)| drop(theirs.remove(quantity)));
}

fn report(case: &Case, theirs: &Theirs, models: &mut Models, system: String, tolerance: f64) -> Result<Report> {
    let mask = Mask::of(case);
    let tokens = case.rows.samples.iter().flat_map(|sample| &sample.mask).filter(|m| **m != 0).count();
    let rows = case.rows.samples.len();
    let (compared, left_out, causes) = (Vec::new(), Vec::new(), Vec::new());
    let mut report = Report { system, rows, tokens, tolerance, compared, left_out, causes };
    for (&quantity, theirs) in theirs {
        let ours = match models.compute(case, quantity) {
            Ok(ours) => ours,
            Err(why) => {
                report.left_out.push((quantity, why));
                continue;
            }
        };
        let Some(gap) = gap(theirs, &ours, &mask) else { continue };
        let differs = !gap.is_within(tolerance);
        if differs && report.first().is_none() {
            report.causes = Difference { case, quantity, theirs, ours: &ours, tolerance }.causes(models);
        }
        report.compared.push(Compared {
            quantity,
            theirs: mean(theirs, &mask),
            ours: mean(&ours, &mask),
            is_mean: matches!(theirs, Numbers::Tokens(_)),
            at: show::place(theirs, &ours, &gap, &case.rows.numbers),
            gap,
            differs,
        });
    }
    if report.compared.is_empty() {
        let reasons: Vec<String> = report.left_out.iter().map(|(q, why)| format!("{}: {why}", q.name())).collect();
        let all = if reasons.is_empty() { "it has no quantity that is computed".into() } else { reasons.join("; ") };
        return Err(Error::data(format!("nothing of the batch can be computed ({all})")));
    }
    Ok(report)
}
