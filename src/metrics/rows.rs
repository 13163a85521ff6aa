//! The live rows at the bottom of a terminal: sparklines, the bar of the job, and a bar per running phase.

use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};

use super::screen::Screen;

const DRAWS_PER_SECOND: u8 = 8;

/// Restrained color: none if color is not allowed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ink {
    pub colour: bool,
}

impl Ink {
    fn wrap(self, code: &str, text: &str) -> String {
        if self.colour && !text.is_empty() { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    pub fn dim(self, text: &str) -> String {
        self.wrap("2", text)
    }

    pub fn bold(self, text: &str) -> String {
        self.wrap("1", text)
    }

    pub fn spark(self, text: &str) -> String {
        self.wrap("36", text)
    }

    pub fn alarm(self, text: &str) -> String {
        self.wrap("33", text)
    }
}

/// The live rows: curves, the job's bar, then a bar per running phase.
pub(super) struct Rows {
    pub all: MultiProgress,
    pub curves: Vec<ProgressBar>,
    pub job: ProgressBar,
}

impl Rows {
    pub fn new(screen: &Screen, curves: usize, ink: Ink) -> Self {
        let target = ProgressDrawTarget::term_like_with_hz(Box::new(screen.clone()), DRAWS_PER_SECOND);
        let all = MultiProgress::with_draw_target(target);
        let message = style("{msg}");
        let row = |_| all.add(ProgressBar::no_length().with_style(message.clone()));
        let curves = (0..curves).map(row).collect();
        let job = format!("  {} {{bar:28}} {{pos}}/{{len}}  {}", ink.dim(&format!("{:<9}", "steps")), ink.dim("{msg}"));
        let job = all.add(ProgressBar::new(0).with_style(style(&job)));
        Self { all, curves, job }
    }

    /// The bar of a phase; it disappears when dropped.
    pub fn phase(&self, name: &str, total: u64, ink: Ink) -> ProgressBar {
        let label = ink.dim(&format!("{name:<9}"));
        let template = match total {
            0 => format!("  {label} {{spinner}} {}", ink.dim("{elapsed}")),
            _ => format!("  {label} {{bar:28}} {{pos}}/{{len}}  {}", ink.dim("{elapsed}")),
        };
        let bar = self.all.add(ProgressBar::new(total).with_style(style(&template)));
        let bar = bar.with_finish(ProgressFinish::AndClear);
        bar.enable_steady_tick(Duration::from_millis(250));
        bar
    }

    pub fn clear(&self) {
        for row in &self.curves {
            row.finish_and_clear();
        }
        self.job.finish_and_clear();
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("the templates of this file parse").progress_chars("━╸─")
}
