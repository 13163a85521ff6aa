//! The report of a batch: both columns, the first difference, and its cause.

use super::compare::Gap;
use super::rows::{Numbers, Quantity};
use std::fmt::Write as _;

/// A quantity of both systems.
pub struct Compared {
    pub quantity: Quantity,
    /// Numbers, or the means over learned tokens.
    pub theirs: f64,
    pub ours: f64,
    pub is_mean: bool,
    pub gap: Gap,
    pub differs: bool,
    /// Both numbers at the largest difference.
    pub at: Option<String>,
}

/// The whole result.
pub struct Report {
    pub system: String,
    pub rows: usize,
    pub tokens: usize,
    pub tolerance: f64,
    pub compared: Vec<Compared>,
    /// Quantities of the file that were not computed, with the reasons.
    pub left_out: Vec<(Quantity, String)>,
    /// The causes of the first difference, the likeliest first.
    pub causes: Vec<String>,
}

impl Report {
    pub fn first(&self) -> Option<&Compared> {
        self.compared.iter().find(|one| one.differs)
    }

    pub fn text(&self) -> String {
        let Self { system, rows, tokens, tolerance, .. } = self;
        let mut text = format!("A batch of {system}: {rows} rows, {tokens} learned tokens\n\n");
        let _ = writeln!(
            text,
            "{:<18}{:>20}{:>20}  {:<20}",
            "quantity",
            system_column(system),
            "rlhf-hpc",
            "largest difference"
        );
        for one in &self.compared {
            let Compared { quantity, theirs, ours, is_mean, gap, differs, .. } = one;
            let [theirs, ours] = [theirs, ours].map(|x| format!("{}{x:.9}", if *is_mean { "mean " } else { "" }));
            let mark = if *differs { "differs" } else { "equal" };
            let _ = writeln!(text, "{:<18}{theirs:>20}{ours:>20}  {:<12.2e}{mark}", quantity.name(), gap.largest);
        }
        for (quantity, why) in &self.left_out {
            let _ = writeln!(text, "{:<18}not computed: {why}", quantity.name());
        }
        text.push('\n');
        let Some(first) = self.first() else {
            let _ = writeln!(text, "Equal within {tolerance:e} of the larger number or of 1.");
            return text;
        };
        let _ =
            writeln!(text, "First difference: {}{}", first.quantity.name(), first.at.as_deref().unwrap_or_default());
        match &self.causes[..] {
            [] => text.push_str("No known difference of settings, masks or formulas explains it.\n"),
            [cause, others @ ..] => {
                let _ = writeln!(text, "Likely cause: {cause}");
                for other in others {
                    let _ = writeln!(text, "Or, with the same numbers: {other}");
                }
            }
        }
        text
    }
}

/// The name of a system without its version.
fn system_column(system: &str) -> &str {
    system.split(' ').next().unwrap_or(system)
}

/// Both numbers at the place of a gap: ` at row 3, column 5 (theirs 0.5, ours 0.25)`.
pub fn place(theirs: &Numbers, ours: &Numbers, gap: &Gap, numbers: &[usize]) -> Option<String> {
    let (Numbers::Tokens(theirs), Numbers::Tokens(ours), Some((i, t))) = (theirs, ours, gap.at) else { return None };
    Some(format!(" at row {}, column {t} (theirs {}, ours {})", numbers[i], theirs[i][t], ours[i][t]))
}
