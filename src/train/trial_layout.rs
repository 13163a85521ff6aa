//! A small model as the job lays its own out over ranks, held to the same model of one rank on the same GPU: matrices that ranks
//! share, units that ZeRO deals out, gathers before use and sums after the backward, what waits in the host's memory, and the
//! rollout's layout, from which ranks draw together.
//!
//! What goes from GPU to GPU was tried as patterns before (`comm::check`). Here a transformer sends it: in its order, from where it
//! lies, while it computes, and out of graphs.

use super::check;
use super::trial::{self, Passed, Twin, apart, norm, within};
use super::trial_draws;
use super::trial_update::{Beside, optim};
use crate::comm::{Axes, Group};
use crate::config::Config;
use crate::config::optim::GradientOrder;
use crate::device::Device;
use crate::device::cuda::{Memory, fast, gpu};
use crate::error::{Error, Result};
use crate::learn::Role;
use crate::learn::learner::{Learner, StateLocation};
use crate::model::cut::cut;
use crate::model::{Arch, Gradients, Head, ParamSpec, Reshard, Shards, TensorPart, Transformer, Weights};
use crate::plan::shape::Swap;
use sha2::{Digest, Sha256};
use std::path::Path;

/// How far a gradient summed over ranks may be from that of one rank times what ranks weigh, by the norm of its unit: f32 in
/// another order.
const SUM_APART: f64 = 1e-5;
/// What ranks, or chunks, weigh: powers of two, by which a gradient stays the same to the bit.
const WEIGHTS: [f32; 3] = [1.0, 2.0, 4.0];
/// Bytes of AdamW's state an element: an f32 weight and two moments.
const STATE: usize = 3 * size_of::<f32>();
/// Micro-batches of a chunk: gradients come to those of the first.
const MICROBATCHES: usize = 2;

/// How the job lies on its ranks.
#[derive(Clone, Copy)]
pub struct Laid<'a> {
    pub config: &'a Config,
    pub axes: &'a Axes,
    pub rollout: &'a Axes,
    pub stage: usize,
    pub swap: Swap,
}

impl Laid<'_> {
    fn sizes(&self) -> [usize; 2] {
        [self.axes.tensor.size(), self.rollout.tensor.size()]
    }

    /// Whether anything differs from one rank that keeps all on its GPU.
    fn is_any(&self) -> bool {
        self.sizes() != [1, 1] || self.axes.zero.size() > 1 || self.swap != Swap::default()
    }

    /// The ranks that share matrices, and nothing else that they would share.
    fn alone(&self) -> Axes {
        Axes { tensor: self.axes.tensor.clone(), ..Axes::one() }
    }

    /// All ranks, of which each has the whole row: a ring is tried by itself (`trial_ring`).
    fn without_ring(&self) -> Axes {
        let Axes { sequence, ring_stream, .. } = Axes::one();
        Axes { sequence, ring_stream, ..self.axes.clone() }
    }

    fn reshards(&self) -> bool {
        let [training, rollout] = self.sizes();
        training != rollout || self.stage == 3 && self.axes.zero.size() > 1
    }
}

/// Keeps the first of what differs: ranks go on with what they do together.
struct Found(Result<()>);

impl Found {
    fn note(&mut self, of: &Group, doing: &str, found: Result<()>) {
        if self.0.is_ok() {
            let over = if of.size() > 1 { format!(" over {}", of.ranks_words()) } else { String::new() };
            self.0 = found.map_err(|error| error.within(format!("{doing}{over}")));
        }
    }
}

/// Tries a model like `arch`; whether there was anything to try. All ranks of the layout call this, and none waits for what
/// another finds.
///
/// # Errors
/// `Fault`, naming what differs.
pub fn compare(laid: &Laid, arch: &Arch) -> Result<bool> {
    // A model that cannot be cut so is refused where it is loaded.
    if !laid.is_any() || laid.sizes().iter().any(|size| arch.check_tensor(*size).is_err()) {
        return Ok(false);
    }
    let small = trial::shared(arch, laid.sizes());
    let found = of(laid, &small);
    gpu().trim();
    found.0.map(|()| true)
}

fn of(laid: &Laid, small: &Arch) -> Found {
    let (axes, recompute, mut found) = (laid.axes, laid.config.gradient.recompute, Found(Ok(())));
    // Where ranks cut matrices: what they are held to.
    let whole = (laid.sizes() != [1, 1]).then(|| Twin::on(Device::Cuda, small, Head::LanguageModel));
    let part = Twin::over(Device::Cuda, small, Head::LanguageModel, &laid.alone());
    let passed = |twin: &Twin| {
        let mut grads = Gradients::new(twin.weights.table.clone());
        (trial::pass(&twin.model, &twin.weights, recompute, &mut grads), grads)
    };
    let (of_part, grads) = passed(&part);
    if let Some(whole) = whole.as_ref().filter(|_| axes.tensor.size() > 1) {
        found.note(&axes.tensor, "matrices that are cut", shared_is_whole((&of_part, &grads), passed(whole)));
    }
    let grads = grads.to_vec();
    let role = Role::new("actor", Path::new(""), small, part.weights, &laid.alone());
    divided(laid, role, (&of_part, &grads), &mut found);
    if laid.reshards() || laid.rollout.tensor.size() > 1 {
        drawn(laid, small, whole.as_ref(), &mut found);
    }
    found
}

/// Holds a rank's part of a model to the whole: what it computes, and its part of each gradient.
fn shared_is_whole((part, grads): (&Passed, &Gradients), (mut whole, all): (Passed, Gradients)) -> Result<()> {
    let (of_part, of_all) = (grads.to_vec(), all.to_vec());
    let specs = || grads.table.specs().iter();
    let cut_out = |(i, spec): (usize, &ParamSpec)| {
        let (from, mut want) = (&all.table.specs()[i], vec![0.0; spec.len]);
        cut(from, &of_all[from.range()], spec, &mut want);
        (spec.name.clone(), want)
    };
    whole.gradients = specs().enumerate().map(cut_out).collect();
    let gradients = specs().map(|spec| (spec.name.clone(), of_part[spec.range()].to_vec())).collect();
    let part = Passed {
        hidden: part.hidden.clone(),
        scored: part.scored.clone(),
        entropies: part.entropies.clone(),
        gradients,
    };
    check::compare(&part, &whole).map(drop)
}

/// Lets the ranks that ZeRO shards over learn together, each weighing the same row differently, from `part`, which has gone
/// through `alone` with these gradients.
fn divided(laid: &Laid, part: Role, alone: (&Passed, &[f32]), found: &mut Found) {
    let (axes, zero) = (&laid.without_ring(), &laid.axes.zero);
    let away = laid.swap.optimizer;
    let several = zero.size() > 1;
    if !several && laid.swap == Swap::default() {
        return;
    }
    let shards = Shards::new(&part.weights.table, axes, laid.stage);
    let arch = part.arch().clone();
    let role = Role::new("actor", Path::new(""), &arch, part.weights.shard(&shards), axes);
    let state_location = if away { StateLocation::Host } else { StateLocation::Device };
    let (optim, gradient) = (optim(), &laid.config.gradient);
    let learner = Learner::with_state(state_location, role, &optim, gradient, 2, axes, laid.stage);
    let Ok(mut learner) = learner else { return found.note(zero, "a model that learns", learner.map(drop)) };
    let mut beside = Beside::new(&learner, away);
    // What has waited in the host's memory, and is another then, shows in the second step.
    for round in 0..if laid.swap == Swap::default() { 1 } else { 2 } {
        if away {
            let partition = learner.zero.partition();
            overwritten((0..partition.units()).map(|u| STATE * partition.own(u).len()));
        }
        let (scored, weight) = accumulate(&mut learner, axes, laid.config.gradient.recompute);
        let stepped = beside.compare(&mut learner, axes);
        if round == 0 {
            let doing = "log-probabilities of a model whose weights are gathered as they are used,";
            found.note(zero, doing, same_bits(&scored, &alone.0.scored));
            found.note(zero, "gradients that are summed", sums(&learner, weight, alone.1));
        }
        let doing = if away { "an update with its state in the host's memory" } else { "an update" };
        found.note(zero, doing, stepped);
        if laid.swap.roles {
            // As a model that has learned since, and as one that has not.
            for have_changed in [true, false] {
                returned(&mut learner.role, have_changed, zero, found);
            }
        }
    }
    found.note(zero, "weights of all ranks behind an update", alike(&learner, zero));
}

/// Lets the weights of a role leave for the host's memory and come back: a forward that begins as they come, and each of them.
fn returned(role: &mut Role, have_changed: bool, of: &Group, found: &mut Found) {
    let Role { transformer, weights, .. } = role;
    let units = 0..weights.table.units().len();
    let held =
        |weights: &Weights| -> Vec<Vec<f32>> { units.clone().map(|u| weights.local(u).cuda().to_f32()).collect() };
    let (scored, were) = (trial::score(transformer, weights), held(weights));
    let sizes: Vec<usize> = units.clone().map(|u| weights.local(u).bytes()).collect();
    weights.leave(have_changed);
    overwritten(sizes.into_iter());
    weights.come();
    let (again, came) = (trial::score(transformer, weights), held(weights));
    let changed = units
        .clone()
        .find_map(|u| Some((u, came[u].iter().zip(&were[u]).position(|(a, b)| a.to_bits() != b.to_bits())?)));
    let same = changed.map_or(Ok(()), |(u, i)| {
        let name = weights.table.name_at(weights.local(u).range().start + i);
        Err(Error::fault(format!("a value of {name} is {:e}, where {:e} was", came[u][i], were[u][i])))
    });
    found.note(of, "weights that were in the host's memory", same);
    found.note(of, "log-probabilities of weights that were in the host's memory", same_bits(&again, &scored));
}

/// Writes into memory that has become free, as whoever gets it would: what does not come back there shows.
fn overwritten(sizes: impl Iterator<Item = usize>) {
    drop(sizes.filter(|bytes| *bytes > 0).map(Memory::zeros).collect::<Vec<_>>());
}

/// A minibatch of this rank's chunks, as a job makes it: the log-probabilities of its last pass, and what the sums of all ranks
/// weigh.
fn accumulate(learner: &mut Learner, axes: &Axes, recompute: bool) -> (Vec<f32>, f32) {
    let weight = |number: usize| WEIGHTS[number % WEIGHTS.len()];
    // As in the order `fast` every rank has a chunk, on the axes of ZeRO together.
    let (own, count, each) = match learner.sum.order {
        GradientOrder::Fast => (vec![(0, axes.zero.rank())], axes.zero.size(), MICROBATCHES),
        GradientOrder::Fixed => (learner.sum.own_chunks(&axes.data), learner.sum.chunks(&axes.data), 1),
    };
    let mut scored = Vec::new();
    for (i, (leaf, number)) in own.iter().enumerate() {
        learner.sum.begin_chunk();
        for microbatch in 0..each {
            learner.sum.begin_microbatch(i + 1 == own.len() && microbatch + 1 == each);
            let (Learner { role, sum, .. }, scale) = (&mut *learner, weight(*number));
            scored = trial::pass_scaled(&role.transformer, &role.weights, recompute, scale, &mut sum.grads).scored;
        }
        learner.sum.end_chunk(*leaf);
    }
    (scored, each as f32 * (0..count).map(weight).sum::<f32>())
}

fn same_bits(got: &[f32], want: &[f32]) -> Result<()> {
    let other = got.iter().zip(want).position(|(a, b)| a.to_bits() != b.to_bits());
    other.map_or(Ok(()), |i| Err(Error::fault(format!("that of token {i} is {}, and {} otherwise", got[i], want[i]))))
}

/// Holds what this rank has of summed gradients to those of one rank times `weight`.
fn sums(learner: &Learner, weight: f32, alone: &[f32]) -> Result<()> {
    let (partition, table) = (learner.zero.partition(), &learner.role.weights.table);
    for u in 0..partition.units() {
        let (own, unit) = (partition.own(u), partition.unit(u));
        let want: Vec<f32> = alone[own.clone()].iter().map(|x| weight * x).collect();
        let got = learner.sum.grads.own(u).to_host();
        // That of the whole unit, as far as this rank's range would have of it.
        let share = (own.len() as f64 / unit.len().max(1) as f64).sqrt();
        let gap = apart(&got, &want, f64::from(weight) * share * norm(&alone[unit]));
        let worst = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).enumerate();
        let worst = worst.fold((0, 0.0), |most, (i, gap)| if gap > most.1 { (i, gap) } else { most }).0;
        let name = || format!("that of {}", table.name_at(own.start + worst));
        within(name, gap, SUM_APART, "of its norm")?;
    }
    Ok(())
}

/// Whether all ranks use the same weights: each unit as a layer opens it.
fn alike(learner: &Learner, zero: &Group) -> Result<()> {
    let weights = &learner.role.weights;
    let units = 0..weights.table.units().len();
    let hash = |u: usize| Sha256::digest(bytemuck::cast_slice::<f32, u8>(&weights.unit(u).cuda().to_f32()));
    let hashes: Vec<u8> = units.flat_map(hash).collect();
    weights.release();
    let all = zero.all_gather_bytes(&hashes);
    let other = |other: &Vec<u8>| other.iter().zip(&all[0]).position(|(a, b)| a != b);
    let Some((rank, at)) = all.iter().enumerate().find_map(|(rank, of)| other(of).map(|at| (rank, at))) else {
        return Ok(());
    };
    let unit = weights.table.units()[at / Sha256::output_size()].clone();
    let name = weights.table.specs().iter().find(|spec| unit.contains(&spec.offset)).map_or("", |spec| &spec.name);
    let [first, other] = [0, rank].map(|rank| zero.world_ranks().nth(rank).unwrap_or(rank));
    Err(Error::fault(format!("the unit of {name} is another on rank {other} than on rank {first}")))
}

/// Brings a model into the rollout's layout, and draws from it where ranks do so together.
fn drawn(laid: &Laid, small: &Arch, whole: Option<&Twin>, found: &mut Found) {
    let (training, rollout) = (laid.without_ring(), Axes { tensor: laid.rollout.tensor.clone(), ..Axes::one() });
    let to = TensorPart::of(&rollout.tensor);
    let mut want = Twin::over(Device::Cuda, small, Head::LanguageModel, &rollout);
    if laid.reshards() {
        let twin = Twin::over(Device::Cuda, small, Head::LanguageModel, &laid.alone());
        let shards = Shards::new(&twin.weights.table, &training, laid.stage);
        let (table, sharded) = (twin.weights.table.clone(), twin.weights.shard(&shards));
        let transformer = Transformer::over(small, &table, &training);
        let came = Reshard::new(&transformer, &table, &training, to).weights(&sharded).0;
        found.note(&training.all, "weights brought into the layout of the rollout", same_weights(&came, &want.weights));
        want.weights = came;
    }
    if let Some(whole) = whole.filter(|_| to.size > 1) {
        let graphs = laid.config.rollout.graphs;
        let compared = trial_draws::compare(want.pair(), whole.pair(), graphs, !fast::is_on());
        found.note(&rollout.tensor, "draws from matrices that are cut", compared);
    }
}

fn same_weights(got: &Weights, want: &Weights) -> Result<()> {
    for (u, unit) in want.table.units().iter().enumerate() {
        let [a, b] = [got, want].map(|weights| weights.local(u).cuda().to_f32());
        let Some(i) = a.iter().zip(&b).position(|(a, b)| a.to_bits() != b.to_bits()) else { continue };
        let name = want.table.name_at(unit.start + i);
        return Err(Error::fault(format!("a value of {name} is {}, where {} was", a[i], b[i])));
    }
    Ok(())
}
