//! Rows of the banner that every job has.

use crate::config::Config;
use crate::data::Rows;
use crate::launch::step_shape::StepShape;
use crate::metrics::{counted, grouped};

/// Rows of the banner: use of the data, shape of the steps, learning rates.
pub(super) fn about(config: &Config, shape: &StepShape, rows: &Rows, steps: u64) -> Vec<(String, String)> {
    let ledger = rows.ledger();
    let filtered: u64 = ledger.filtered.values().sum();
    let kept = ledger.rows - ledger.held_out - filtered;
    let share = 100.0 * filtered as f64 / ledger.rows.max(1) as f64;
    let rules: Vec<String> = ledger.filtered.iter().map(|(rule, rows)| format!("{rule} {}", grouped(*rows))).collect();
    let by_rule = if rules.is_empty() { String::new() } else { format!(" ({share:.1} %: {})", rules.join(", ")) };
    let [kept, held_out, filtered] = [kept, ledger.held_out, filtered].map(grouped);
    let StepShape { rows: of_step, samples_per_row, minibatch, epochs, .. } = *shape;
    let samples = if samples_per_row > 1 { format!(" x {samples_per_row} samples") } else { String::new() };
    let updates = shape.updates();
    let passes = (steps * of_step as u64) as f64 / rows.epoch_rows().max(1) as f64;
    let rates = [Some(("actor", &config.optim.actor)), (shape.trained > 1).then_some(("critic", &config.optim.critic))];
    let rates = rates.into_iter().flatten().map(|(role, optim)| {
        let schedule = crate::config::name(&optim.schedule);
        format!("{role} {:e}, {schedule} after a warm-up of {} %", optim.lr, 100.0 * optim.warmup_ratio)
    });
    let row = |label: &str, value: String| (label.to_string(), value);
    let rows = row("rows", format!("{kept} train, {held_out} held out, {filtered} filtered{by_rule}"));
    if shape.trained == 0 {
        return vec![rows];
    }
    vec![
        rows,
        row(
            "per step",
            format!(
                "{}{samples}, {} of {}, {} over them; {passes:.2} passes over the data in total",
                counted(of_step, "row"),
                counted(updates, "update"),
                counted(minibatch, "sample"),
                counted(epochs, "epoch")
            ),
        ),
        row("lr", rates.collect::<Vec<_>>().join("; ")),
    ]
}
