//! `verify MODEL`: two computations of a model, or a model by itself.

use super::compare::{Comparison, TOP, compare, growth};
use super::computation::{Computation, synthetic_ids};
use super::configs;
use super::dump::Dump;
use super::files::{self, TEXT};
use super::layout::{self, Layout};
use super::page::{Check, Page, describe};
use super::tensors;
use super::trials::Trials;
use crate::cli::device::{self, Options};
use crate::cli::model_dirs::ModelDirs;
use crate::cli::ranks::Ranks;
use crate::cli::rows;
use crate::comm::Axes;
use crate::config::job::DeviceName;
use crate::config::model::DTypeName;
use crate::config::rollout::RolloutConfig;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::learn::packed::PackedRow;
use crate::model::load::{self, ModelFiles};
use crate::model::{Arch, Head, Transformer, Weights};
use crate::rollout::Model;
use crate::sys::memory;
use crate::tensor::DType;
use crate::text::Tokenizer;
use serde_json::{Map, Value, json};
use std::path::Path;

/// Tokens of the sequence that is compared.
const TOKENS: usize = 64;
/// States that the page lists; of more, the first and last ones and those around the first difference.
const STATES_LISTED: usize = 12;

/// The options of the verb.
pub struct Request<'a> {
    pub model: &'a Path,
    pub against: Option<&'a Path>,
    pub layout: Option<&'a str>,
    pub device: DeviceName,
    pub dtype: DTypeName,
    pub new_tokens: usize,
    pub json: bool,
}

/// The other side of a comparison.
enum Other {
    None,
    Dump(Box<Dump>),
    Model(ModelDirs),
    Layout(Layout),
    Gpu,
}

/// This model on one rank, in the dtype of the comparison.
struct Ours {
    model: Transformer,
    weights: Weights,
    computed: Computation,
    growth: Vec<f64>,
}

/// Runs `verify MODEL`. All ranks call this.
///
/// # Errors
/// `Usage`; `Fault` if a check failed.
pub fn run(request: &Request, ranks: &Ranks) -> Result<()> {
    let mut page = Page::new(request.json, ranks.world.rank != 0);
    let dirs = ranks.agree(ModelDirs::find(request.model, None, None))?;
    let checks = files::check(&dirs.model);
    let is_damaged = checks.iter().any(Check::has_failed);
    page.text(&title(request));
    for check in checks {
        page.add(check);
    }
    if is_damaged {
        return page.finish(Map::new());
    }
    let arch = ranks.agree(dirs.arch())?;
    let head = dirs.head(&arch);
    let other = ranks.agree(Other::find(request, ranks.world.size))?;
    if let Other::Model(other) = &other {
        let checks = files::check(&other.model);
        let is_damaged = checks.iter().any(Check::has_failed);
        let named = |check: Check| Check { text: format!("{}: {}", other.model.display(), check.text), ..check };
        checks.into_iter().map(named).for_each(|check| page.add(check));
        if is_damaged {
            return page.finish(Map::new());
        }
    }
    let ids = ranks.agree(ids(&other, &dirs, &arch))?;
    let loads = ranks.world.rank == 0;
    let ours = ranks.agree(loads.then(|| Ours::compute(request, &dirs, head, &ids)).transpose())?;
    let object = match &other {
        Other::Layout(layout) => of_layout(request, (*layout, &dirs, &arch, head), ours, &ids, ranks, &mut page)?,
        other => {
            let ours = ours.ok_or_else(|| Error::usage("verify MODEL needs a single rank without --layout"))?;
            of_other(request, other, &dirs, head, ours, ranks, &mut page)?
        }
    };
    page.finish(object)
}

fn title(request: &Request) -> String {
    let other = match (request.against, request.layout, request.device) {
        (Some(other), ..) => format!(" against {}", other.display()),
        (None, Some(layout), _) => format!(" on {layout} against one rank"),
        (None, None, DeviceName::Gpu) => " on a GPU against the CPU".into(),
        _ => String::new(),
    };
    format!("verify {}{other}\n", request.model.display())
}

impl Other {
    fn find(request: &Request, ranks: usize) -> Result<Self> {
        let is_gpu = request.device == DeviceName::Gpu;
        let given = [request.against.is_some(), request.layout.is_some(), is_gpu];
        if given.iter().filter(|is_given| **is_given).count() > 1 {
            return Err(
                Error::usage("--against, --layout and --device gpu exclude each other").hint("leave out all but one")
            );
        }
        if let Some(text) = request.layout {
            let layout = layout::parse(text)?;
            layout.check_ranks(ranks, &request.model.display().to_string(), text)?;
            return Ok(Self::Layout(layout));
        }
        Error::need(ranks == 1, format!("verify MODEL needs a single rank without --layout (got {ranks})"))?;
        match request.against {
            Some(path) if path.is_dir() => Ok(Self::Model(ModelDirs::find(path, None, None)?)),
            Some(path) => Ok(Self::Dump(Box::new(Dump::read(path)?))),
            None if is_gpu => Ok(Self::Gpu),
            None => Ok(Self::None),
        }
    }
}

/// The tokens that are compared: the dump's, a text's, or synthetic ones.
fn ids(other: &Other, dirs: &ModelDirs, arch: &Arch) -> Result<Vec<u32>> {
    let ids = match other {
        Other::Dump(dump) => dump.computation.ids.clone(),
        _ => match Tokenizer::find(&dirs.tokenizer)? {
            Some(tokenizer) => tokenizer.encode(TEXT, true)?,
            None => synthetic_ids(arch, TOKENS),
        },
    };
    let count = if matches!(other, Other::Dump(_)) { ids.len() } else { ids.len().min(TOKENS).min(arch.context - 1) };
    rows::check(&ids[..count], arch)?;
    Ok(ids[..count].to_vec())
}

/// Loads a model on the CPU of this rank.
fn load(dirs: &ModelDirs, head: Head, dtype: DType) -> Result<(Transformer, Weights)> {
    let (arch, weights) = load::load_with(Device::Cpu, &dirs.model, dirs.adapter.as_deref(), head, dtype, 0)?;
    Ok((Transformer::new(&arch, &weights.table), weights))
}

impl Ours {
    fn compute(request: &Request, dirs: &ModelDirs, head: Head, ids: &[u32]) -> Result<Self> {
        let name = request.model.display().to_string();
        let forward = |dtype| {
            let (model, weights) = load(dirs, head, dtype)?;
            let found = Computation::forward(&name, (&model, &weights), &Axes::one(), ids);
            Ok((found, (model, weights)))
        };
        // The other dtype first: its weights are dropped before the next ones are loaded.
        let dtype = request.dtype.dtype();
        let other = if dtype == DType::Bf16 { DType::F32 } else { DType::Bf16 };
        let other: Result<_> = forward(other);
        let (of_other, loaded) = other?;
        drop(loaded);
        let (mut computed, (model, weights)) = forward(dtype)?;
        let growth = match dtype {
            DType::F32 => growth(&of_other, &computed),
            DType::Bf16 => growth(&computed, &of_other),
        };
        let sampled = Model { transformer: &model, weights: &weights, tokenizer: None };
        computed.sample(sampled, request.new_tokens, memory::available_bytes() / 2)?;
        Ok(Self { model, weights, computed, growth })
    }

    /// Compares the sampler's log-probabilities with those of a training forward over the same tokens.
    fn sampler(&self) -> Check {
        let name = "sampler";
        let Computation { ids, greedy, greedy_logprobs, .. } = &self.computed;
        if greedy.is_empty() {
            return Check::skipped(name, "the model has no language-model head, or no room for new tokens");
        }
        let mut row = PackedRow::new();
        row.push(&[&ids[..], greedy].concat(), ids.len());
        let hidden = self.model.forward(&self.weights, &row.tokens, &row.positions, row.keys(), None);
        let (trained, _) = self.model.logprobs(&self.weights, &hidden, &row.rows, &row.targets, 1.0, false);
        let differs = trained.iter().zip(greedy_logprobs).position(|(a, b)| a.to_bits() != b.to_bits());
        match differs {
            None => Check::ok(
                name,
                format!("{} log-probabilities of sampled tokens are those of training to the bit", greedy.len()),
            ),
            Some(at) => Check::failed(
                name,
                format!(
                    "sampled token {at} has log-probability {} with the cache, and {} in training",
                    greedy_logprobs[at], trained[at]
                ),
            ),
        }
    }
}

/// Compares with a dump, a model or a GPU, or checks the model by itself.
fn of_other(
    request: &Request,
    other: &Other,
    dirs: &ModelDirs,
    head: Head,
    mut ours: Ours,
    ranks: &Ranks,
    page: &mut Page,
) -> Result<Map<String, Value>> {
    page.add(ours.sampler());
    match other {
        Other::Dump(dump) => of_dump(dump, dirs, &mut ours, page),
        Other::Model(other) => of_model(request, dirs, other, head, &ours, page),
        Other::Gpu => {
            let options = Options { device: DeviceName::Gpu, dtype: DTypeName::Auto, check: true };
            let opened = device::open("verify", dirs, options, head, (RolloutConfig::default(), 0), ranks)?;
            let loaded = (&opened.transformer, &opened.weights);
            let mut theirs = Computation::forward("gpu", loaded, &Axes::one(), &ours.computed.ids);
            let model = Model { transformer: loaded.0, weights: loaded.1, tokenizer: None };
            let bytes = opened.cache_bytes(&RolloutConfig::default(), &[], 1);
            theirs.sample(model, request.new_tokens, 2 * bytes)?;
            let found = compare(&ours.computed, &theirs, &ours.growth)?;
            show(&found, &ours.computed, &theirs, page);
            Ok(object(&found))
        }
        Other::None | Other::Layout(_) => {
            let last = ours.growth[ours.computed.hidden.len() - 1];
            page.add(Check::ok(
                "values",
                format!("finite; bf16 changes the last hidden state by {:.2} %", 100.0 * last),
            ));
            Ok(Map::new())
        }
    }
}

fn of_dump(dump: &Dump, dirs: &ModelDirs, ours: &mut Ours, page: &mut Page) -> Result<Map<String, Value>> {
    let theirs = &dump.computation;
    page.text(&format!("\nthe dump was made by {} in {}", dump.program, theirs.dtype.name()));
    if let Some(text) = &dump.text
        && let Some(check) = files::compare_text(&dirs.tokenizer, text, &theirs.ids)?
    {
        page.add(check);
    }
    let found = match compare(&ours.computed, theirs, &ours.growth) {
        Ok(found) => found,
        Err(error) => {
            page.add(Check::failed("shape", describe(&error)));
            return Ok(Map::new());
        }
    };
    show(&found, &ours.computed, theirs, page);
    let is_secret_bf16 = dump.has_bf16_values && theirs.dtype == DType::F32;
    let causes = if is_secret_bf16 {
        vec!["bf16: all hidden states of the dump are numbers of bf16, although it names f32".to_owned()]
    } else {
        let Ours { model, weights, computed, growth } = ours;
        Trials { model, weights, ours: computed, theirs, found: &found, growth }.causes()?
    };
    if found.first().is_some() || is_secret_bf16 {
        page.add(Check::failed("cause", causes.join("\n")));
    }
    Ok(object(&found))
}

fn of_model(
    request: &Request,
    dirs: &ModelDirs,
    other: &ModelDirs,
    head: Head,
    ours: &Ours,
    page: &mut Page,
) -> Result<Map<String, Value>> {
    let shown = [&dirs.model, &other.model].map(|dir| dir.display().to_string());
    let names = [shown[0].as_str(), shown[1].as_str()];
    let archs = [dirs.arch()?, other.arch()?];
    let keys = configs::differences(&archs[0].source, &archs[1].source);
    let keys: Vec<String> = keys.iter().map(|key| configs::describe(key, names)).collect();
    page.add(Check::of_faults("config", &keys, || "the keys that a forward reads are equal".into()));
    if let Some(check) = files::compare_tokenizers(&dirs.tokenizer, &other.tokenizer)? {
        page.add(check);
    }
    let source = |dirs: &ModelDirs, arch: &Arch| ModelFiles { dir: &dirs.model, adapter: None, arch, head }.source();
    let is_alike =
        [0, 1].map(|i| ModelFiles { dir: &dirs.model, adapter: None, arch: &archs[i], head }.whole().shapes());
    if is_alike[0] != is_alike[1] {
        page.add(Check::failed("shape", format!("{} and {} have other tensors", names[0], names[1])));
        return Ok(Map::new());
    }
    let (changes, all) = tensors::changes(&source(dirs, &archs[0])?, &source(other, &archs[1])?)?;
    let described = tensors::describe(&changes, all, names);
    page.add(Check::of_faults("weights", &described, || format!("{all} tensors are equal to the bit")));
    let (model, weights) = load(other, head, ours.weights.dtype())?;
    let mut theirs = Computation::forward(names[1], (&model, &weights), &Axes::one(), &ours.computed.ids);
    let sampled = Model { transformer: &model, weights: &weights, tokenizer: None };
    theirs.sample(sampled, request.new_tokens, memory::available_bytes() / 2)?;
    let found = compare(&ours.computed, &theirs, &ours.growth)?;
    show(&found, &ours.computed, &theirs, page);
    Ok(object(&found))
}

fn of_layout(
    request: &Request,
    (layout, dirs, arch, head): (Layout, &ModelDirs, &Arch, Head),
    ours: Option<Ours>,
    ids: &[u32],
    ranks: &Ranks,
    page: &mut Page,
) -> Result<Map<String, Value>> {
    let files = ModelFiles { dir: &dirs.model, adapter: None, arch, head };
    Error::need(dirs.adapter.is_none(), "--layout needs a model without an adapter")?;
    let dtype = request.dtype.dtype();
    let name = request.layout.unwrap_or_default();
    let (theirs, check) = layout.compute(&files, dtype, &ranks.world, name, (ids, request.new_tokens))?;
    let Some(ours) = ours else {
        page.add(check);
        return Ok(Map::new());
    };
    page.add(ours.sampler());
    page.add(check);
    let found = compare(&ours.computed, &theirs, &ours.growth)?;
    show(&found, &ours.computed, &theirs, page);
    Ok(object(&found))
}

/// Prints the comparison: a table of states, and a check for each kind of result.
fn show(found: &Comparison, ours: &Computation, theirs: &Computation, page: &mut Page) {
    page.text(&format!("\n  {:<14}{:>12}{:>20}   {}", "state", "difference", "rounding explains", "largest at"));
    let first = found.gaps.iter().position(|gap| !gap.is_explained());
    let n = found.gaps.len();
    let is_listed = |i: usize| {
        n <= STATES_LISTED || i < 2 || i + 4 >= n || first.is_some_and(|first| i + 2 >= first && i <= first + 2)
    };
    for (_, gap) in found.gaps.iter().enumerate().filter(|(i, _)| is_listed(*i)) {
        let mark = if gap.is_explained() { "" } else { "  <" };
        let largest = (0..gap.rows.len()).max_by(|a, b| gap.rows[*a].total_cmp(&gap.rows[*b])).unwrap_or(0);
        let at = if gap.gap == 0.0 { "equal".to_owned() } else { format!("token {largest}") };
        page.text(&format!("  {:<14}{:>12.2e}{:>20.2e}   {at}{mark}", gap.name, gap.gap, gap.allowed));
    }
    page.text("");
    let coarser = if ours.dtype == theirs.dtype { ours.dtype } else { DType::Bf16 };
    page.add(match found.first() {
        None if found.gaps.iter().all(|gap| gap.gap == 0.0) => Check::ok("states", "all states are equal to the bit"),
        None => Check::ok("states", format!("rounding of {} explains all differences", coarser.name())),
        Some(gap) => Check::failed(
            "states",
            format!(
                "the difference starts at {}, token {}: {:.2e}, of which rounding of {} explains {:.2e}",
                gap.name,
                gap.first_token().unwrap_or(0),
                gap.rows[gap.first_token().unwrap_or(0)],
                coarser.name(),
                gap.allowed
            ),
        ),
    });
    of_tokens(found, ours, theirs, page);
}

/// Adds the checks of next-token distributions and of sampled tokens.
fn of_tokens(found: &Comparison, ours: &Computation, theirs: &Computation, page: &mut Page) {
    let is_fine = found.first().is_none();
    let mark = |name, text: String| if is_fine { Check::ok(name, text) } else { Check::failed(name, text) };
    if let Some(words) = &found.of_words {
        let t = ours.ids.len();
        let text = format!(
            "KL {:.1e} on average, {:.1e} at token {}; {:.1} % of the {TOP} likeliest tokens shared; {} of {t} likeliest \
             tokens equal; log-probabilities differ by up to {:.1e} (token {})",
            words.kl.0,
            words.kl.1,
            words.kl.2,
            100.0 * words.overlap,
            words.same_first,
            words.logprob.0,
            words.logprob.1
        );
        page.add(mark("next tokens", text));
    }
    match found.greedy {
        None => {}
        Some((count, None)) => page.add(Check::ok("greedy", format!("{count} sampled tokens are equal"))),
        Some((count, Some(at))) => {
            let [own, other] = [ours.greedy[at], theirs.greedy[at]];
            let text = format!("sampled token {at} of {count} differs: {own} and {other}");
            let tie = if is_fine { "; rounding decides between two nearly equal logits" } else { "" };
            page.add(mark("greedy", text + tie));
        }
    }
}

fn object(found: &Comparison) -> Map<String, Value> {
    let gaps: Vec<Value> = found
        .gaps
        .iter()
        .map(|gap| json!({"state": gap.name, "gap": gap.gap, "allowed": gap.allowed, "first_token": gap.first_token()}))
        .collect();
    let mut object = Map::new();
    object.insert("states".into(), gaps.into());
    if let Some(words) = &found.of_words {
        object.insert("kl_mean".into(), words.kl.0.into());
        object.insert("kl_max".into(), words.kl.1.into());
        object.insert("top_overlap".into(), words.overlap.into());
        object.insert("logprob_gap_max".into(), words.logprob.0.into());
    }
    if let Some((count, differs)) = found.greedy {
        object.insert("greedy_equal".into(), differs.unwrap_or(count).into());
    }
    object
}
