//! Rows of the banner that every job has.

use crate::config::Config;
use crate::config::model::Quantize;
use crate::data::{Row, RowSource, Rows};
use crate::dtype::DType;
use crate::error::{Result, format_bytes};
use crate::hub::{self, Kind};
use crate::launch::run::Run;
use crate::launch::step_shape::StepShape;
use crate::metrics::{count, counted, grouped, one_line};
use crate::train::models::JobModel;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// Rows of the banner: use of the data, shape of the steps, learning rates.
pub(super) fn about(config: &Config, shape: &StepShape, rows: &Rows, steps: u64) -> Vec<(String, String)> {
    let ledger = rows.ledger();
    let filtered: u64 = ledger.filtered.values().sum();
    let kept = ledger.rows - ledger.held_out - filtered;
    let share = 100.0 * filtered as f64 / ledger.rows.max(1) as f64;
    let rules: Vec<String> = ledger.filtered.iter().map(|(rule, rows)| format!("{rule} {}", grouped(*rows))).collect();
    let by_rule = if rules.is_empty() { String::new() } else { format!(" ({share:.1} %: {})", rules.join(", ")) };
    let [kept, held_out, filtered] = [kept, ledger.held_out, filtered].map(grouped);
    let StepShape { rows: of_step, samples_per_row, minibatch, epochs, critic_epochs, .. } = *shape;
    let samples = if samples_per_row > 1 { format!(" x {samples_per_row} samples") } else { String::new() };
    let updates = shape.updates();
    let passes = (steps * of_step as u64) as f64 / rows.epoch_rows().max(1) as f64;
    let rates = [Some(("actor", &config.optim.actor)), (shape.trained > 1).then_some(("critic", &config.optim.critic))];
    let rates = rates.into_iter().flatten().map(|(role, optim)| {
        let schedule = crate::config::name(&optim.schedule);
        format!("{role} {:e}, {schedule} after a warm-up of {} %", optim.lr, 100.0 * optim.warmup_ratio)
    });
    let of_critic = if critic_epochs > 0 && critic_epochs != epochs {
        format!(" (critic: {critic_epochs})")
    } else {
        String::new()
    };
    let row = |label: &str, value: String| (label.to_string(), value);
    let mut about = vec![row("rows", format!("{kept} train, {held_out} held out, {filtered} filtered{by_rule}"))];
    about.extend(snapshots(config).map(|text| row("", text)));
    if shape.trained == 0 {
        return about;
    }
    about.extend([
        row(
            "per step",
            format!(
                "{}{samples}, {} of {}, {} over them{of_critic}; {passes:.2} passes over the data in total",
                counted(of_step, "row"),
                counted(updates, "update"),
                counted(minibatch, "sample"),
                counted(epochs, "epoch")
            ),
        ),
        row("lr", rates.collect::<Vec<_>>().join("; ")),
    ]);
    about
}

/// The snapshots of the Hugging Face cache that rows are from.
fn snapshots(config: &Config) -> impl Iterator<Item = String> {
    let of_data = |path: &&PathBuf| hub::snapshot_of(path).is_some_and(|(found, _)| found.kind == Kind::Dataset);
    config.snapshots().iter().filter(of_data).map(|path| hub::describe(path)).collect::<BTreeSet<_>>().into_iter()
}

/// Rows of the banner about the models: their sizes, what of them trains, and the frozen base that they share.
pub(super) fn about_models(config: &Config, models: &[JobModel]) -> Vec<(String, String)> {
    let sizes: Vec<String> = models.iter().map(|model| count(model.whole().parameters() as f64)).collect();
    let columns = sizes.iter().map(String::len).max().unwrap_or(0);
    let mut rows = Vec::new();
    for (i, (model, size)) in models.iter().zip(&sizes).enumerate() {
        let (dtype, dir) = (config.model.dtype(), hub::describe(&model.spec.dir));
        rows.push((
            model.spec.role.name().to_string(),
            format!("{size:>columns$} parameters, {}  {dir}", dtype.name()),
        ));
        let Some(tuning) = &model.arch.tuning else { continue };
        let sharing =
            models[..i].iter().find(|other| other.arch.tuning.is_some() && other.spec.base() == model.spec.base());
        let base = match sharing {
            Some(other) => format!("on the frozen base of the {}", other.spec.role.name()),
            None if config.model.quantize == Quantize::Nf4 => "on a frozen base in nf4".to_string(),
            None => "on a frozen base".to_string(),
        };
        let adapter = &model.spec.adapter;
        let given = if adapter.as_os_str().is_empty() {
            String::new()
        } else {
            format!(", adapter {}", hub::describe(adapter))
        };
        let trained = model.table();
        if model.spec.optim.is_none() {
            let what = if tuning.adapters.is_empty() { "" } else { ", with an adapter" };
            rows.push((String::new(), format!("{base}{what}{given}")));
            continue;
        }
        let mut of_modules: BTreeMap<&str, usize> = BTreeMap::new();
        for spec in trained.specs() {
            // A tower has one matrix for queries, keys and values.
            let name = if spec.name.starts_with("model.visual.") { spec.file_name() } else { &spec.name };
            let module = name.trim_end_matches(".weight").trim_end_matches(".bias");
            let matrix = module.trim_end_matches(".lora_A").trim_end_matches(".lora_B");
            let last = match matrix.rsplit('.').next().unwrap_or(matrix) {
                // One adapter for both, as in the files.
                "gate_proj" | "up_proj" if matrix != module && matrix.contains(".experts.") => "gate_up_proj",
                last => last,
            };
            *of_modules.entry(last).or_default() += spec.elements();
        }
        let of_modules: Vec<String> =
            of_modules.iter().map(|(module, elements)| format!("{module} {}", count(*elements as f64))).collect();
        let frozen = model.whole().parameters().saturating_sub(trained.parameters());
        // Gradient and two moments; with bf16 weights, f32 masters, too.
        let each = size_of::<f32>() * if dtype == DType::Bf16 { 4 } else { 3 };
        let tower = trained.specs().iter().filter(|spec| spec.name.starts_with("model.visual.")).count();
        let of_tower = match &model.arch.sight {
            Some(_) if tower > 0 => ", some of them in the vision tower",
            Some(_) if !tuning.adapters.is_empty() => ", none in the vision tower",
            _ => "",
        };
        rows.push((
            String::new(),
            format!(
                "trains {} ({}{of_tower}), {base}{given}; {} less gradients and optimizer state",
                count(trained.parameters() as f64),
                of_modules.join(", "),
                format_bytes((frozen * each) as u64)
            ),
        ));
    }
    rows
}

/// Shows the first row as the model sees it, in a dry run.
pub(super) fn show_first<T: Row>(run: &Run, source: &mut RowSource<T>) -> Result<()> {
    if run.dry_run {
        let row = run.ranks.all.agree(source.shown())?;
        run.recorder.say(&format!("the first row, with the learned parts in ⟦⟧: {}", one_line(&row)));
    }
    Ok(())
}
