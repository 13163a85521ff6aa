//! The effect of keys and values in 8 bits: log-probabilities of held-out responses by the policy and by the same weights
//! without rounding of keys and values.

use crate::dtype::KvDtype;
use crate::error::Result;
use crate::experience::Experience;
use crate::launch::run::Run;
use crate::learn::packed::Tokens;
use crate::learn::{Role, score};
use crate::metrics::keys::{self, Metrics, named};

/// The most responses that are compared.
pub const RESPONSES_MAX: usize = 256;

/// Compares the first responses of `samples`, which `actor` wrote at `temperature` (0: greedily). `actor` is the policy, if
/// it is on this rank. All ranks of the run call this. No metrics if the job does not round.
pub fn measure(run: &Run, actor: Option<&mut Role>, samples: &[Experience], temperature: f32) -> Result<Metrics> {
    if run.config.rollout.kv_dtype == KvDtype::Model || samples.is_empty() {
        return Ok(Metrics::new());
    }
    let samples = &samples[..samples.len().min(RESPONSES_MAX)];
    let (tokens_max, greedy) = (run.config.ppo.microbatch_tokens_max, temperature == 0.0);
    let temperature = if greedy { 1.0 } else { temperature };
    let found = actor.map(|actor| {
        let tokens: Vec<Tokens> = samples.iter().map(Tokens::from_sample).collect();
        // The policy rounds, so that is last.
        [KvDtype::Model, KvDtype::Fp8].map(|kv| {
            actor.transformer.keep_keys_in(kv);
            score::logprobs(actor, &run.ranks.axes, &tokens, temperature, tokens_max)
        })
    });
    let found = run.ranks.of_placements(&run.ranks.all, found)?.into_iter().flatten().next();
    Ok(found.map_or_else(Metrics::new, |[plain, rounded]| {
        let own = samples.iter().zip(rounded.iter().zip(&plain)).flat_map(|(sample, (rounded, plain))| {
            let pairs = rounded.iter().zip(plain).zip(&sample.mask);
            pairs.filter(|(_, own)| **own != 0).map(|((rounded, plain), _)| f64::from(plain - rounded))
        });
        let (gap, kl) = means(own);
        named([(keys::EVAL_KV_LOGPROB_GAP_MEAN, gap), (keys::EVAL_KV_KL_MEAN, kl)])
    }))
}

/// Means over tokens of |d| and of e^d - 1 - d, which estimates KL(rounded || plain) without bias from tokens that were
/// sampled with rounding, for d = log p_plain - log p_rounded.
fn means(differences: impl Iterator<Item = f64>) -> (f64, f64) {
    let add = |(gap, kl, count): (f64, f64, u64), d: f64| (gap + d.abs(), kl + (d.exp_m1() - d), count + 1);
    let (gap, kl, count) = differences.fold((0.0, 0.0, 0), add);
    (gap / count.max(1) as f64, kl / count.max(1) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_divergence_is_that_of_the_distributions_if_tokens_have_their_shares() {
        // 1,000 tokens from p = (0.5, 0.3, 0.2), compared with q.
        let (p, q) = ([0.5, 0.3, 0.2f64], [0.4, 0.35, 0.25f64]);
        let tokens = p.iter().zip(q).flat_map(|(p, q)| std::iter::repeat_n((q / p).ln(), (1e3 * p).round() as usize));
        let (gap, kl) = means(tokens);
        let exact: f64 = p.iter().zip(q).map(|(p, q)| p * (p / q).ln()).sum();
        let mean: f64 = p.iter().zip(q).map(|(p, q)| p * (p / q).ln().abs()).sum();
        assert!((kl - exact).abs() < 1e-12 && (gap - mean).abs() < 1e-12, "{kl} {exact} {gap} {mean}");
        assert_eq!(means(std::iter::empty()), (0.0, 0.0));
    }
}
