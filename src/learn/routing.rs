//! The load-balancing loss of routers (arXiv:2101.03961, section 2.2), and measurements of their choices.
//!
//! With E experts, of which k for each token: f_e is the mean number of times that expert e is chosen (its sum over e is
//! k), and P_e is the mean of its probability. The means are over all (token, layer) pairs of a minibatch together, on
//! all ranks and in all micro-batches. Every layer with experts counts, and every token of the rows.
//!
//!     loss = coef E sum_e f_e P_e;  d loss / d p_e = coef E f_e / pairs
//!
//! f is a constant in the derivative, but it is known only after all forwards. So the rows of a minibatch of several
//! micro-batches pass through the model once more before the first backward. Counts are integers, whose sum does not
//! depend on the ranks.

use super::role::Role;
use super::sums::Sums;
use crate::metrics::keys::{self, Metrics};
use crate::model::RouterSums;
use std::collections::BTreeMap;

/// Keys of sums: (token, layer) pairs, and updates.
const PAIRS: &str = "router_pairs";
const UPDATES: &str = "router_updates";
/// The start of the keys of sums of probabilities by expert.
const PROBABILITY: &str = "router_probability_";

/// The slope of the loss in a backward.
#[derive(Clone, Debug, Default)]
pub(super) enum RouterLoss {
    #[default]
    None,
    /// From the choices of the forward, which is the only one of the minibatch.
    OfForward(f64),
    /// The slope by the probability of each expert.
    Slope(Vec<f32>),
}

impl RouterLoss {
    /// The slope in the backward after the only forward of `role` so far.
    pub(super) fn slope(&self, role: &Role) -> Option<Vec<f32>> {
        match self {
            Self::None => None,
            Self::OfForward(coef) => {
                let sums = role.transformer.routers.sums();
                Some(slope(*coef, sums.pairs as f64, sums.chosen.iter().map(|chosen| *chosen as f64)))
            }
            Self::Slope(slope) => Some(slope.clone()),
        }
    }
}

/// coef E f_e / pairs for each expert, given how often it was chosen.
pub(super) fn slope(coef: f64, pairs: f64, chosen: impl ExactSizeIterator<Item = f64>) -> Vec<f32> {
    let factor = coef * chosen.len() as f64 / pairs.max(1.0).powi(2);
    chosen.map(|chosen| (factor * chosen) as f32).collect()
}

/// The sums of one micro-batch. The probabilities become the loss in `finished`.
pub(super) fn counted(sums: &RouterSums) -> Sums {
    let RouterSums { pairs, chosen, probabilities, entropy } = sums;
    if *pairs == 0 {
        return Sums::default();
    }
    let mut all = Sums::from_list([(PAIRS, *pairs as f64), (keys::ROUTER_ENTROPY, *entropy)]);
    for (e, (chosen, p)) in chosen.iter().zip(probabilities).enumerate() {
        all.0.insert(format!("{}{e}", keys::EXPERT_LOAD), *chosen as f64);
        all.0.insert(format!("{PROBABILITY}{e}"), *p);
    }
    all
}

/// Takes the measurements of routers out of the sums of a minibatch over all ranks. Loads are multiplied by the pairs.
pub(super) fn finished(sums: &mut Sums) -> Sums {
    let is_own = |key: &str| {
        key == PAIRS
            || key == keys::ROUTER_ENTROPY
            || key.starts_with(keys::EXPERT_LOAD)
            || key.starts_with(PROBABILITY)
    };
    let (own, rest): (BTreeMap<String, f64>, _) =
        std::mem::take(&mut sums.0).into_iter().partition(|(key, _)| is_own(key));
    sums.0 = rest;
    let pairs = Sums(own);
    let (count, mut found) = (pairs.get(PAIRS), Sums::default());
    if count == 0.0 {
        return found;
    }
    let loads: Vec<(&String, f64)> =
        pairs.0.iter().filter(|(key, _)| key.starts_with(keys::EXPERT_LOAD)).map(|(key, x)| (key, *x)).collect();
    let (experts, chosen) = (loads.len() as f64, loads.iter().map(|(_, x)| x).sum::<f64>());
    let mut loss = 0.0;
    for (key, load) in loads {
        let e = &key[keys::EXPERT_LOAD.len()..];
        loss += experts * load / count * pairs.get(&format!("{PROBABILITY}{e}")) / count;
        found.0.insert(key.clone(), load * experts / chosen * count);
    }
    found.add(&Sums::from_list([
        (PAIRS, count),
        (UPDATES, 1.0),
        (keys::ROUTER_ENTROPY, pairs.get(keys::ROUTER_ENTROPY)),
        (keys::ROUTER_AUX_LOSS, loss),
    ]));
    found
}

/// The metrics of routers, given the sums of the updates of a step.
pub fn metrics(sums: &Sums) -> Metrics {
    let pairs = sums.get(PAIRS);
    if pairs == 0.0 {
        return Metrics::new();
    }
    let loads: Metrics = sums
        .0
        .iter()
        .filter(|(key, _)| key.starts_with(keys::EXPERT_LOAD))
        .map(|(key, load)| (key.clone(), load / pairs))
        .collect();
    let of_loads = |fold: fn(f64, f64) -> f64| loads.iter().map(|(_, load)| *load).reduce(fold).unwrap_or_default();
    let means = sums.means(&[(keys::ROUTER_AUX_LOSS, UPDATES), (keys::ROUTER_ENTROPY, PAIRS)]);
    let extremes = [(keys::EXPERT_LOAD_MAX, of_loads(f64::max)), (keys::EXPERT_LOAD_MIN, of_loads(f64::min))];
    keys::named(means.into_iter().chain(extremes)).into_iter().chain(loads).collect()
}
