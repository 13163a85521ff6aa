//! The ranks and alphas of a file of PEFT, which reads the patterns of a job for other names than the job does: for a
//! parameter, its own name counts, and not that of its module. A job doubles both for two linear layers of transformers 4.

use super::naming::Naming;
use super::targets::{Fused, Model, first_match, patterns};
use super::tuning::{Param, Tuning};
use crate::config::lora::LoraConfig;

/// Values by patterns.
type Values<T> = Vec<(String, T)>;

/// The patterns of a job, and before them those of parameters whose rank or scale would be another one. `params` are those
/// of the model, whose names `naming` gives.
pub(super) fn patterns_of(
    settings: &LoraConfig,
    tuning: &Tuning,
    params: &[Param],
    naming: Naming,
) -> (Values<usize>, Values<f64>) {
    let model = Model::new(params);
    let ranks = patterns("rank_pattern", &settings.rank_pattern.0).expect("it selected the ranks");
    let alphas = patterns("alpha_pattern", &settings.alpha_pattern.0).expect("it selected the scales");
    let (mut of_ranks, mut of_alphas): (Values<usize>, Values<f64>) = (Vec::new(), Vec::new());
    for (module, adapter) in &tuning.adapters {
        let Some(parameter) = model.parameter(module) else { continue };
        let fused = model.fused.iter().find(|fused| fused.module == *module);
        let divisor = if settings.rslora { (adapter.rank as f64).sqrt() } else { adapter.rank as f64 };
        let is_alpha = |alpha: f64| (alpha / divisor) as f32 == adapter.scale;
        let names = [parameter.clone()];
        let key = key(fused.copied(), &parameter, tuning, naming);
        let rank = first_match(&ranks, &names).map_or(settings.rank, |pattern| pattern.value);
        if rank != adapter.rank && !of_ranks.iter().any(|(other, _)| *other == key) {
            of_ranks.push((key.clone(), adapter.rank));
        }
        let alpha = first_match(&alphas, &names).map_or(settings.alpha, |pattern| pattern.value);
        if is_alpha(alpha) || of_alphas.iter().any(|(other, _)| *other == key) {
            continue;
        }
        let times = fused.map_or(1, |fused| fused.old.len()).max(1) as f64;
        let of_module = first_match(&alphas, std::slice::from_ref(module)).map(|pattern| pattern.value);
        let alpha = of_module.into_iter().chain([settings.alpha * times]).find(|alpha| is_alpha(*alpha));
        of_alphas.push((key, alpha.unwrap_or(f64::from(adapter.scale) * divisor)));
    }
    of_ranks.extend(settings.rank_pattern.0.clone());
    of_alphas.extend(settings.alpha_pattern.0.clone());
    (of_ranks, of_alphas)
}

/// The pattern of a parameter: as PEFT writes it if all parameters of its name have the same rank and scale, else its whole
/// name.
fn key(fused: Option<&Fused>, parameter: &str, tuning: &Tuning, naming: Naming) -> String {
    let last = ".gate_up_proj";
    let of_experts = || tuning.adapters.iter().filter(|(module, _)| module.ends_with(last)).map(|(_, adapter)| adapter);
    let is_common = of_experts().all(|adapter| Some(adapter) == of_experts().next());
    match fused {
        Some(fused) if fused.module.ends_with(last) && is_common => r".*\.gate_up_proj".to_owned(),
        _ => regex::escape(&naming.in_files(parameter)),
    }
}
