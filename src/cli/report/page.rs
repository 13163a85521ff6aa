//! The sections of the page.

use super::bars;
use super::facts;
use super::numbers::scale;
use super::plot::{Curve, Mark, Plot, swatch};
use super::samples;
use super::source::{Source, is_result, keys_of, settings_of, title_of};
use super::text::{escape, put};
use super::timeline;
use crate::config::Config;
use crate::config::method::distill::CE_MEAN;
use crate::config::method::labelled::{DESIRABLE_REWARD_MEAN, UNDESIRABLE_REWARD_MEAN};
use crate::metrics::adapter_ratios::RoleRatios;
use crate::metrics::{eval_table, keys, name_of_rows};
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};

/// The maximum number of points of a curve, and of all curves of a page.
const CURVE_POINTS: usize = 2000;
const PAGE_POINTS: usize = 120_000;

/// Plots of learning and of updates: title, and keys that share its axis.
const LEARNING: &[(&str, &[&str])] = &[
    ("Accuracy", &[keys::ACCURACY]),
    ("Margin", &[keys::MARGIN_MEAN]),
    ("Reward of chosen and rejected", &[keys::CHOSEN_REWARD_MEAN, keys::REJECTED_REWARD_MEAN]),
    ("Reward of desirable and undesirable", &[DESIRABLE_REWARD_MEAN, UNDESIRABLE_REWARD_MEAN]),
    ("KL to the reference or the teachers", &[keys::KL_MEAN]),
    ("Entropy per token", &[keys::ENTROPY]),
    ("Response length", &[keys::RESPONSE_TOKENS_MEAN]),
    ("Truncated and clipped", &[keys::RESPONSE_TRUNCATED_RATIO, keys::CLIP_RATIO, keys::VALUE_CLIP_RATIO]),
];
const UPDATES: &[(&str, &[&str])] = &[
    ("Loss", &[keys::LOSS]),
    ("Cross-entropy of data rows", &[CE_MEAN]),
    ("Policy loss", &[keys::POLICY_LOSS]),
    ("Value loss", &[keys::VALUE_LOSS]),
    ("KL loss", &[keys::KL_LOSS]),
    ("Gradient norm", &[keys::GRAD_NORM]),
    ("Gradient norm, actor", &[keys::GRAD_NORM_ACTOR, keys::GRAD_NORM_ACTOR_MAX]),
    ("Gradient norm, critic", &[keys::GRAD_NORM_CRITIC, keys::GRAD_NORM_CRITIC_MAX]),
    ("Relative size of adapters", &[keys::ADAPTER_NORM_RATIO_MEAN, keys::ADAPTER_NORM_RATIO_MAX]),
    ("Relative size of adapters, critic", &[keys::ADAPTER_NORM_RATIO_CRITIC_MEAN, keys::ADAPTER_NORM_RATIO_CRITIC_MAX]),
    ("Learning rate", &[keys::LR]),
    ("Learning rate, actor", &[keys::LR_ACTOR]),
    ("Learning rate, critic", &[keys::LR_CRITIC]),
];
const SPEED: &[(&str, &[&str])] = &[
    ("Throughput", &[keys::TOKENS_PER_S]),
    ("Rollout throughput", &[keys::ROLLOUT_TOKENS_PER_S]),
    ("Model FLOP/s utilization", &[keys::MFU]),
];

/// Keys that repeat the value of another key.
const AGAIN: &[(&str, &str)] = &[(keys::GRAD_NORM, keys::GRAD_NORM_ACTOR), (keys::LR, keys::LR_ACTOR)];

/// The page under construction. A key that has a plot is removed from `rest`.
struct Page<'a> {
    sources: &'a [Source],
    marks: Vec<Mark>,
    rest: BTreeSet<String>,
    points_max: usize,
    sections: Vec<(&'static str, String)>,
}

/// The whole page.
pub fn render_page(sources: &mut [Source]) -> String {
    let scores: Vec<_> = sources.iter_mut().map(bars::scores).collect();
    let n = sources.len();
    let samples: String = sources.iter_mut().map(|source| samples::html(source, n)).collect();
    let sources = &*sources;
    let keys = keys_of(sources);
    let marks =
        sources.iter().enumerate().flat_map(|(run, source)| source.restarts().into_iter().map(move |at| (at, run)));
    let mut page = Page {
        sources,
        marks: marks.collect(),
        points_max: (PAGE_POINTS / (keys.len() * n).max(1)).clamp(50, CURVE_POINTS),
        rest: keys.iter().filter(|key| !is_again(sources, key)).cloned().collect(),
        sections: Vec::new(),
    };
    page.learning(&scores);
    page.evaluations(&keys);
    let updates = page.plots(UPDATES) + &page.adapters();
    page.section("Updates", &updates, "");
    page.times();
    page.memory_and_rows();
    page.samples(&samples);
    page.others(&keys);
    page.settings();
    page.add_meanings(&keys);
    page.whole()
}

/// The first and the last step of some runs, at least two steps.
fn steps_of<'a>(sources: impl Iterator<Item = &'a Source>) -> (f64, f64) {
    let steps = sources.flat_map(|source| &source.lines).map(|line| line.step as f64);
    let (first, last) = steps.fold((f64::INFINITY, 0.0f64), |(first, last), step| (first.min(step), last.max(step)));
    (first.min(last - 1.0), last)
}

/// Whether every run with `key` has another key with the same value.
fn is_again(sources: &[Source], key: &str) -> bool {
    let is_so = |other: &str| sources.iter().all(|source| !source.has(key) || source.has(other));
    AGAIN.iter().any(|(again, other)| *again == key && is_so(other))
}

impl Page<'_> {
    /// A plot of one or more keys over all runs; none if no run has a value for them.
    fn plot(&mut self, title: &str, of: &[&str], is_small: bool) -> Option<String> {
        let mut curves = Vec::new();
        for (dash, key) in of.iter().enumerate() {
            self.rest.remove(*key);
            for (run, source) in self.sources.iter().enumerate() {
                let points = source.points(key);
                if !points.is_empty() {
                    let (name, colour, band) = (self.name(run, key), self.colour(run, dash), self.band(source, key));
                    curves.push(Curve { name, colour, dash, points, band });
                }
            }
        }
        let key = of.first()?;
        let is_shown = |source: &Source| of.iter().any(|key| source.has(key));
        let steps = steps_of(self.sources.iter().filter(|source| is_shown(source)));
        let marks: Vec<Mark> = self.marks.iter().filter(|(_, run)| is_shown(&self.sources[*run])).copied().collect();
        Plot { title, key, curves, marks: &marks, steps, is_small }.html(self.points_max)
    }

    fn colour(&self, run: usize, dash: usize) -> usize {
        if self.sources.len() == 1 { dash } else { run }
    }

    /// The key, with the name of the run if there are several.
    fn name(&self, run: usize, key: &str) -> String {
        if self.sources.len() == 1 { key.to_string() } else { format!("{} · {key}", self.sources[run].name) }
    }

    /// One standard deviation around the reward, if there is only one run.
    fn band(&self, source: &Source, key: &str) -> Vec<f64> {
        let is_alone = self.sources.len() == 1 && key == keys::REWARD_MEAN;
        let deviations = source.points(keys::REWARD_STD).into_iter().map(|(_, y)| if y.is_finite() { y } else { 0.0 });
        if is_alone { deviations.collect() } else { Vec::new() }
    }

    fn section(&mut self, title: &'static str, figures: &str, note: &str) {
        if !figures.is_empty() {
            let note = if note.is_empty() { String::new() } else { format!("<p class=\"note\">{note}</p>") };
            let legend = self.legend();
            self.sections.push((title, format!("{note}{legend}<div class=\"figures\">{figures}</div>")));
        }
    }

    /// The legend of the runs' colors.
    fn legend(&self) -> String {
        if self.sources.len() == 1 {
            return String::new();
        }
        let of = |(run, source): (usize, &Source)| format!("<span>{}{}</span>", swatch(run, 0), escape(&source.name));
        let runs: Vec<String> = self.sources.iter().enumerate().map(of).collect();
        format!("<p class=\"legend\">{}</p>", runs.concat())
    }

    fn plots(&mut self, plots: &[(&str, &[&str])]) -> String {
        let shown = plots.iter().filter(|(_, keys)| !is_again(self.sources, keys[0]));
        shown.filter_map(|(title, keys)| self.plot(title, keys, false)).collect()
    }

    fn learning(&mut self, scores: &[Vec<(u64, Vec<f32>)>]) {
        let reward = self.plot("Reward", &[keys::REWARD_MEAN], false).unwrap_or_default();
        let is_alone = self.sources.len() == 1 && reward.contains("class=\"band");
        let band = "The band around the reward is one standard deviation over the samples of a step.";
        let restart = "A dotted vertical line marks a restart.";
        let notes = [(is_alone, band), (!self.marks.is_empty(), restart)].into_iter().filter(|(is_so, _)| *is_so);
        let note = notes.map(|(_, note)| note).collect::<Vec<_>>().join(" ");
        let figures = [reward, self.histograms(scores), self.plots(LEARNING)].concat();
        self.section("Learning", &figures, &note);
    }

    fn evaluations(&mut self, keys: &[String]) {
        let results = keys.iter().filter(|key| is_result(key));
        let figures: String = results.filter_map(|key| self.plot(&title_of(key), &[key], false)).collect();
        let tables: String = self.sources.iter().map(|source| self.sets(source)).collect();
        // Without training steps no curve has a second point.
        let is_alone = self.sources.iter().all(|source| source.lines.iter().all(|line| !line.is_of_step()));
        let figures = if is_alone && self.sources.len() == 1 { tables } else { tables + &figures };
        self.section("Evaluation", &figures, "On held-out rows.");
    }

    /// A table of the last evaluation of a run, if it has several sets, or if the run only evaluates.
    fn sets(&self, source: &Source) -> String {
        let Some(line) = source.lines.iter().rev().find(|line| line.is_evaluated()) else { return String::new() };
        let has_sets = line.values.iter().any(|(key, _)| keys::of_set(key).is_some());
        if line.is_of_step() && !has_sets {
            return String::new();
        }
        let row = |cells: &Vec<String>| {
            let cells = cells.iter().enumerate().map(|(i, cell)| {
                let tag = if i == 0 { "th" } else { "td" };
                format!("<{tag}>{}</{tag}>", escape(cell))
            });
            format!("<tr>{}</tr>\n", cells.collect::<String>())
        };
        let evaluated: Vec<_> = line.values.iter().filter(|(key, _)| keys::is_eval(key)).cloned().collect();
        let split = name_of_rows(source.config.get("data.eval_split").map_or("", String::as_str));
        let rows: String = eval_table(&evaluated, split).iter().map(row).collect();
        let title = self.title(&format!("Evaluation of step {}", line.step), source);
        let caption = format!("<figcaption><b>{}</b></figcaption>", escape(&title));
        format!("<figure class=\"wide\">{caption}<table class=\"sets\">{rows}</table></figure>")
    }

    fn histograms(&self, scores: &[Vec<(u64, Vec<f32>)>]) -> String {
        let all = || scores.iter().flatten().flat_map(|(_, scores)| scores).map(|score| f64::from(*score));
        let between = (all().fold(f64::INFINITY, f64::min), all().fold(f64::NEG_INFINITY, f64::max));
        let figure = |(source, scores): (&Source, &Vec<_>)| {
            bars::histogram(&self.title("Scores of the samples", source), between, scores)
        };
        self.sources.iter().zip(scores).filter_map(figure).collect()
    }

    /// The title of a figure of one run.
    fn title(&self, title: &str, source: &Source) -> String {
        if self.sources.len() == 1 { title.to_string() } else { format!("{title}, {}", source.name) }
    }

    /// The adapters that are largest relative to their matrices.
    fn adapters(&self) -> String {
        let of = |source: &Source| {
            let (step, roles) = source.adapters.as_ref().map(|ratios| (ratios.step, &ratios.roles))?;
            let figure = |role: &RoleRatios| {
                let title = self.title(&format!("Largest adapters of the {}, step {step}", role.role), source);
                let caption = format!("<figcaption><b>{}</b></figcaption>", escape(&title));
                format!("<figure class=\"plot\">{caption}{}</figure>", facts::adapters(role))
            };
            Some(roles.iter().map(figure).collect::<String>())
        };
        self.sources.iter().filter_map(of).collect()
    }

    fn times(&mut self) {
        let phases: String = self
            .sources
            .iter()
            .filter_map(|source| bars::phases(source, &self.title("Phases of a step", source)))
            .collect();
        let figures = phases + &self.plots(SPEED);
        self.section("Time and throughput", &figures, "");
        let of = |source: &Source| {
            let figure = |step| timeline::html(step, &self.title(&format!("Step {}", step.step), source));
            source.traced.iter().map(figure).collect::<String>()
        };
        let timelines: String = self.sources.iter().map(of).collect();
        let note = "The height of a color is the share of the time in which a rank computes. A rank in a collective waits \
                    until the last rank enters it; then the transfer begins. The critical path is on the rank for which \
                    the others wait. https://ui.perfetto.dev opens the files in traces/ with every operation.";
        self.section("Traced steps", &timelines, note);
    }

    /// The measured memory and the planned memory; on a CPU, without the memory that was in use before the models.
    fn memory(&self) -> String {
        let mut curves = Vec::new();
        for (run, source) in self.sources.iter().enumerate() {
            let start: BTreeMap<u64, f64> =
                source.points(keys::MEMORY_START_BYTES).into_iter().map(|(x, y)| (x as u64, y)).collect();
            let peak = source.points(keys::MEMORY_PEAK_BYTES).into_iter();
            let measured = peak.map(|(x, y)| (x, (y - start.get(&(x as u64)).unwrap_or(&0.0)).max(0.0))).collect();
            let planned = source.points(keys::MEMORY_PLANNED_BYTES);
            for (dash, (name, points)) in [("measured", measured), ("planned", planned)].into_iter().enumerate() {
                if !points.is_empty() {
                    let (name, colour) = (self.name(run, name), self.colour(run, dash));
                    curves.push(Curve { name, colour, dash, points, band: Vec::new() });
                }
            }
        }
        let (key, marks, steps) = (keys::MEMORY_PEAK_BYTES, &*self.marks, steps_of(self.sources.iter()));
        let plot = Plot { title: "Memory above the start-up baseline", key, curves, marks, steps, is_small: false };
        plot.html(self.points_max).unwrap_or_default()
    }

    fn memory_and_rows(&mut self) {
        let mut figures = self.memory();
        for source in self.sources {
            if let Some(ledger) = &source.ledger {
                let title = self.title("Use of the data rows", source);
                put!(figures, "<figure class=\"plot\"><figcaption><b>{}</b></figcaption>", escape(&title));
                figures += &facts::rows(ledger);
                figures += "</figure>";
            }
        }
        let note =
            "Measured: the peak of all ranks so far. Planned: the peak that the plan expects of the fullest rank.";
        self.section("Memory and rows", &figures, note);
    }

    fn samples(&mut self, steps: &str) {
        if !steps.is_empty() {
            let controls = include_str!("controls.html");
            self.sections.push(("Samples", format!("{controls}{steps}")));
        }
    }

    /// A small plot for every key without one, by section.
    fn others(&mut self, keys: &[String]) {
        let mut by_section: Vec<(String, String)> = Vec::new();
        for key in keys.iter().filter(|key| *key != keys::RESTARTS) {
            if !self.rest.contains(key) {
                continue;
            }
            let Some(figure) = self.plot(key, &[key], true) else { continue };
            let own = key.split_once('/').map_or("other", |(section, _)| section);
            let section = keys::find(key).map_or(own, |key| key.section);
            match by_section.iter_mut().find(|(known, _)| known == section) {
                Some((_, figures)) => figures.push_str(&figure),
                None => by_section.push((section.to_string(), figure)),
            }
        }
        let of = |(section, figures): &(String, String)| {
            format!("<h3>{}</h3><div class=\"figures small\">{figures}</div>", escape(section))
        };
        let all: String = by_section.iter().map(of).collect();
        let legend = self.legend();
        self.sections.extend((!all.is_empty()).then(|| ("Other metrics", format!("{legend}{all}"))));
    }

    /// Settings that a run changes; settings that differ between runs are first.
    fn settings(&mut self) {
        // From the text, in which a number has the digits that the run wrote.
        let defaults = settings_of(&Config::default().to_toml()).expect("a configuration is TOML");
        let configs = || self.sources.iter().map(|source| &source.config);
        let keys: BTreeSet<&String> = configs().flat_map(BTreeMap::keys).collect();
        let (mut differing, mut same) = (String::new(), String::new());
        for key in keys {
            let values: Vec<Option<&String>> = configs().map(|config| config.get(key)).collect();
            let is_same = values.iter().all(|value| *value == values[0]);
            if is_same && values[0] == defaults.get(key) {
                continue;
            }
            let cells = values.iter().map(|value| format!("<td>{}</td>", escape(value.map_or("", |v| v))));
            let cells = cells.collect::<Vec<_>>().concat();
            let row = format!(
                "<tr{}><th>{}</th>{cells}</tr>\n",
                if is_same { "" } else { " class=\"differs\"" },
                escape(key)
            );
            if is_same { same += &row } else { differing += &row }
        }
        if differing.is_empty() && same.is_empty() {
            return;
        }
        let names = self.sources.iter().map(|source| format!("<th>{}</th>", escape(&source.name)));
        let names = names.collect::<Vec<_>>().concat();
        let head = if self.sources.len() == 1 { String::new() } else { format!("<tr><th></th>{names}</tr>") };
        let table = format!("<div class=\"wide\"><table class=\"settings\">{head}{differing}{same}</table></div>");
        let note = "<p class=\"note\">Keys of config.resolved.toml that differ from the defaults.</p>";
        self.sections.push(("Settings", format!("{note}{table}")));
    }

    fn add_meanings(&mut self, keys: &[String]) {
        let mut known: Vec<&keys::Key> = keys.iter().filter_map(|key| keys::find(key)).collect();
        known.sort_by_key(|key| keys::rank(key.name));
        known.dedup_by_key(|key| key.name);
        let of = |key: &keys::Key| {
            let (_, unit) = scale(key.unit, 0.0);
            let unit = if unit.is_empty() { String::new() } else { format!(" <i>{unit}</i>") };
            format!("<dt><code>{}</code>{unit}</dt><dd>{}</dd>\n", key.name, escape(key.meaning))
        };
        let all: String = known.into_iter().map(of).collect();
        self.sections
            .extend((!all.is_empty()).then(|| ("Meaning of the metrics", format!("<dl class=\"words\">{all}</dl>"))));
    }

    fn whole(self) -> String {
        let names: Vec<String> = self.sources.iter().map(|source| escape(&source.name)).collect();
        let title = names.join(", ");
        let mut body = format!("<header class=\"top\"><h1>{title}</h1>\n");
        let links = self.sections.iter().map(|(name, _)| format!("<a href=\"#{}\">{name}</a>", id_of(name)));
        put!(body, "<nav>{}</nav></header>", links.collect::<Vec<_>>().join(" "));
        for source in self.sources {
            body += &facts::about(source, self.sources.len() > 1);
        }
        for lack in self.sources.iter().flat_map(|source| &source.lacks) {
            put!(body, "<p class=\"lack\">Left out: {}</p>", escape(&lack.message));
        }
        for (name, section) in &self.sections {
            put!(body, "<section id=\"{}\"><h2>{name}</h2>\n{section}</section>", id_of(name));
        }
        let seal = Sha256::digest(body.as_bytes());
        let nonce = seal.iter().take(16).map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().concat();
        let (style, script) = (include_str!("page.css"), include_str!("page.js"));
        format!(include_str!("page.html"), title = title, nonce = nonce, style = style, script = script, body = body)
    }
}

fn id_of(name: &str) -> String {
    name.to_lowercase().replace(' ', "-")
}
