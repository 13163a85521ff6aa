//! `rlhf-hpc info MODEL`: a model directory, in facts.

use crate::cli::out::say;
use crate::device::Device;
use crate::error::{Result, format_bytes};
use crate::hub;
use crate::launch::gpu;
use crate::metrics::{counted, grouped};
use crate::model::rope::{Rope, Scaling};
use crate::model::{
    Arch, AttentionSpec, DeltaSpec, ExpertsSpec, Feed, Head, LatentSpec, OnDisk, ParamTable, Scoring, SharedName,
    SharedSpec, Sinks, Tensors, VisionSpec,
};
use crate::ops::glu::Activation;
use crate::text::Tokenizer;
use std::path::Path;

/// The names and the texts of rows. A name that several rows share is printed once.
type Rows = Vec<(&'static str, String)>;

/// Prints what a model directory contains.
///
/// # Errors
/// `Data` if it is not a supported model, or if its files are damaged.
pub fn describe(dir: &Path) -> Result<()> {
    let (arch, warnings) = Arch::read(dir)?;
    let mut rows = Rows::new();
    rows.extend(hub::snapshot_of(dir).map(|_| ("snapshot", hub::describe(dir))));
    rows.extend(of_arch(&arch));
    rows.extend(of_files(dir, &arch)?);
    rows.extend(of_tokenizer(dir, &arch));
    rows.extend(of_devices(&arch));
    rows.extend(warnings.into_iter().map(|text| ("warning", text)));
    let mut last = "";
    for (name, text) in rows {
        say!("{:<11}{text}", if name == last { "" } else { name });
        last = name;
    }
    Ok(())
}

fn of_arch(arch: &Arch) -> Rows {
    let family = arch.family;
    let (class, head) = match arch.head {
        Head::LanguageModel => (family.causal, "language model"),
        Head::Value => (family.classifier, "one score per token"),
    };
    let inside = arch.wrapper.as_ref().map_or(String::new(), |wrapper| format!(", inside {}", wrapper.name()));
    let attention = arch.attention();
    let tied = match arch.head {
        Head::LanguageModel if arch.tied => ", tied to the embedding",
        Head::LanguageModel => ", with a matrix of its own",
        Head::Value => "",
    };
    let mut rows = vec![
        ("family", format!("{}{inside}, {class}", family.name)),
        ("parameters", parameters(arch)),
        ("head", format!("{head}{tied}; vocabulary {}", grouped(arch.vocabulary as u64))),
        ("width", arch.width.to_string()),
        ("heads", heads(attention)),
    ];
    rows.extend(feeds(arch).into_iter().map(|text| ("mlp", text)));
    rows.extend(layers(arch).into_iter().map(|text| ("layers", text)));
    rows.push(("context", counted(arch.positions, "token")));
    rows.extend(arch.sight.iter().map(|sight| ("images", tower(&sight.spec))));
    let caps = [("attention scores", attention.softcap), ("logits", arch.logit_softcap)];
    let caps: Vec<String> = caps.iter().filter_map(|(of, cap)| Some(format!("{of} at {}", (*cap)?))).collect();
    if !caps.is_empty() {
        rows.push(("soft caps", caps.join(", ")));
    }
    rows
}

/// The vision tower.
fn tower(spec: &VisionSpec) -> String {
    let &VisionSpec { depth, width, patch, merge, .. } = spec;
    let blocks = counted(depth, "block");
    let side = patch * merge;
    format!("{blocks} of width {width}, a token for {side} x {side} pixels; on CPUs only")
}

/// The heads of attention.
fn heads(attention: &AttentionSpec) -> String {
    let AttentionSpec { heads, kv_heads, head_dim, latent, .. } = attention;
    let Some(LatentSpec { q_rank, kv_rank, plain, rotated, value, .. }) = latent else {
        let sinks = if attention.sinks == Sinks::None { "" } else { ", with sinks" };
        return format!("{heads} on {kv_heads} of keys and values, head dim {head_dim}{sinks}");
    };
    let queries = q_rank.map_or(String::new(), |rank| format!("; queries compressed to {rank}"));
    format!(
        "{heads} of {plain} + {rotated} rotated, values of {value}; keys and values compressed to {kv_rank} + {rotated}{queries}"
    )
}

/// The number of parameters, and the number that a token uses.
fn parameters(arch: &Arch) -> String {
    let total = ParamTable::new(arch, arch.head).parameters();
    let unchosen = |spec: &ExpertsSpec| (spec.count - spec.top_k) * spec.parameters(arch.width);
    let inactive: usize = arch.feeds().filter_map(Feed::experts).map(unchosen).sum();
    let active = match inactive {
        0 => "all of them".into(),
        _ => grouped((total - inactive) as u64),
    };
    format!("{}, {active} active for each token", grouped(total as u64))
}

/// The kinds of MLPs, with the number of their layers if there are several.
fn feeds(arch: &Arch) -> Vec<String> {
    let mut kinds: Vec<(&Feed, usize)> = Vec::new();
    for feed in arch.feeds() {
        match kinds.iter_mut().find(|(known, _)| *known == feed) {
            Some((_, count)) => *count += 1,
            None => kinds.push((feed, 1)),
        }
    }
    let are_several = kinds.len() > 1;
    let text = |(feed, layers): (&Feed, usize)| {
        let (width, activation) = (feed.width(), describe_activation(feed.activation()));
        let of = if are_several { format!(" in {}", counted(layers, "layer")) } else { String::new() };
        match feed.experts() {
            None => format!("width {width} ({activation}){of}"),
            Some(experts) => mixture(experts, &of),
        }
    };
    kinds.into_iter().map(text).collect()
}

/// A mixture of experts in `layers`.
fn mixture(of: &ExpertsSpec, layers: &str) -> String {
    let ExpertsSpec { count, top_k, width, activation, renormalizes, scoring, has_biases, shared } = of;
    let weights = match (scoring, renormalizes) {
        (Scoring::Softmax, true) => "weights sum to 1".to_owned(),
        (Scoring::Softmax, false) => "weights are probabilities".to_owned(),
        (Scoring::Sigmoid { scale, .. }, true) => format!("weights sum to {scale}"),
        (Scoring::Sigmoid { scale, .. }, false) => format!("weights are sigmoids times {scale}"),
    };
    let groups = match scoring {
        Scoring::Sigmoid { groups, top_groups, .. } if top_groups < groups => {
            format!(" from {top_groups} of {groups} groups")
        }
        _ => String::new(),
    };
    let shared = match shared {
        None => String::new(),
        Some(SharedSpec { name: SharedName::Gated, width }) => {
            format!("; one of width {width} with a gate for all tokens")
        }
        Some(SharedSpec { name: SharedName::Plain, width }) => format!("; one of width {width} for all tokens"),
    };
    let biases = if *has_biases { " with biases" } else { "" };
    let name = describe_activation(*activation);
    format!(
        "{count} experts{biases} of width {width} ({name}){layers}; {top_k} for each token{groups}, {weights}{shared}"
    )
}

fn describe_activation(activation: Activation) -> String {
    match activation {
        Activation::ClampedSilu { alpha, limit } => {
            format!("{} with alpha {alpha}, within {limit}", activation.name())
        }
        other => other.name().into(),
    }
}

/// Each kind of layers: how many there are, their window and their rope.
fn layers(arch: &Arch) -> Vec<String> {
    let mut kinds: Vec<((Option<usize>, usize), usize)> = Vec::new();
    for layer in arch.attentions() {
        let kind = (layer.window, layer.rope);
        match kinds.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, count)) => *count += 1,
            None => kinds.push((kind, 1)),
        }
    }
    let text = |((window, rope), count): ((Option<usize>, usize), usize)| {
        let window =
            window.map_or("all earlier tokens".into(), |window| format!("a window of {}", counted(window, "token")));
        let rope = describe_rope(&arch.ropes[rope], arch.attention().head_dim);
        format!("{count} with {window}, {rope}")
    };
    let delta = |of: &DeltaSpec| {
        let DeltaSpec { key_heads, value_heads, key_dim, value_dim, taps } = of;
        format!(
            "{} with the gated delta rule, {value_heads} states of {key_dim} x {value_dim} on {key_heads} key heads, \
             convolutions of {taps} tokens",
            arch.deltas().count()
        )
    };
    kinds.into_iter().map(text).chain(arch.deltas().next().map(delta)).collect()
}

fn describe_rope(rope: &Rope, head_dim: usize) -> String {
    let rotated = rope.rotated(head_dim);
    if rotated == 0 {
        return "no rope".into();
    }
    let scaling = match &rope.scaling {
        Scaling::None => String::new(),
        Scaling::Linear { factor } => format!(", linear scaling by {factor}"),
        Scaling::Llama3 { factor, original, .. } => format!(", llama3 scaling by {factor} from {original} tokens"),
        Scaling::Yarn { factor, original, .. } => format!(", yarn by {factor} from {original} tokens"),
        Scaling::LongRope { original, .. } => {
            format!(", LongRoPE: short factors in jobs with rows of up to {original} tokens, else long factors")
        }
    };
    let partial = if rotated < head_dim { format!(" on {rotated} of {head_dim} columns") } else { String::new() };
    let queries = rope.query_scale.map_or(String::new(), |(beta, original)| {
        format!(", queries scaled after {original} tokens (llama_4_scaling_beta {beta})")
    });
    format!("rope with theta {}{partial}{scaling}{queries}", rope.theta)
}

fn of_files(dir: &Path, arch: &Arch) -> Result<Rows> {
    let Some(found) = OnDisk::read(dir, arch)? else {
        return Ok(vec![("weights", "no safetensors files".into())]);
    };
    let describe = |tensors: &Tensors| format!("{}, {}", counted(tensors.count, "tensor"), format_bytes(tensors.bytes));
    let types: Vec<String> =
        found.by_type.iter().map(|(dtype, tensors)| format!("{} in {dtype}", describe(tensors))).collect();
    let mut rows = vec![("weights", format!("{}; {}", types.join("; "), counted(found.files, "file")))];
    if found.others.count > 0 {
        let others = describe(&found.others);
        let of = if arch.wrapper.is_some() { "other parts (images)" } else { "layers that predict further tokens" };
        let what = if arch.sight.is_some() {
            "copied to exports, unless model.vision trains them"
        } else {
            "copied to exports"
        };
        rows.push((if arch.sight.is_some() { "others" } else { "not used" }, format!("{others}, of {of}; {what}")));
    }
    Ok(rows)
}

fn of_tokenizer(dir: &Path, arch: &Arch) -> Rows {
    let tokenizer = match Tokenizer::find(dir) {
        Ok(Some(tokenizer)) => tokenizer,
        Ok(None) => {
            return vec![
                ("tokenizer", "none (no tokenizer.json)".into()),
                ends(arch.eos_tokens.iter().map(u32::to_string)),
            ];
        }
        Err(error) => return vec![("tokenizer", format!("not usable: {}", error.message))],
    };
    let (tokens, embedded) = (tokenizer.vocabulary(), arch.vocabulary);
    let fits = match tokens.checked_sub(embedded) {
        Some(0) => "as many as the model embeds".into(),
        Some(more) => format!("{more} more than the model embeds"),
        None => format!("the model embeds {} more", embedded - tokens),
    };
    let chat = if tokenizer.chat().is_ok() { "with" } else { "without" };
    let name = |id: &u32| format!("{id} {:?}", tokenizer.decode(&[*id], false).unwrap_or_default());
    vec![
        ("tokenizer", format!("{} ({fits}), {chat} a chat template", counted(tokens, "token"))),
        ends(tokenizer.eos_ids().iter().map(name)),
    ]
}

fn ends(tokens: impl Iterator<Item = String>) -> (&'static str, String) {
    let tokens: Vec<String> = tokens.collect();
    ("ends with", if tokens.is_empty() { "no token: responses have the full length".into() } else { tokens.join(", ") })
}

/// What GPUs compute, and the numbers of tensor ranks.
fn of_devices(arch: &Arch) -> Rows {
    let sizes = arch.tensor_sizes();
    let listed = |sizes: &[usize]| sizes.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    let on_gpus: Vec<usize> =
        sizes.iter().copied().filter(|&n| gpu::check_arch(Device::Cuda, arch, n).is_ok()).collect();
    let gpus = match gpu::check_arch(Device::Cuda, arch, 1) {
        Ok(()) => format!("all of it runs on GPUs, with mesh.tensor = {}", listed(&on_gpus)),
        Err(error) => format!("not on GPUs: {}", error.message),
    };
    vec![("tensor", format!("mesh.tensor may be {}", listed(&sizes))), ("gpus", gpus)]
}
