//! Rows cut in micro-batches by the code that cuts them in a run.

use super::job::Job;
use super::rows::{Row, drawn_per_step};
use crate::config::job::JobKind;
use crate::config::optim::GradientOrder;
use crate::data::balance::{self, Cost};
use crate::data::packing;
use crate::learn::tree_sum::leaves;
use crate::mesh::Mesh;
use crate::rng::{Purpose, Rng};

/// Minibatches that are looked at.
const MINIBATCHES_MAX: usize = 32;

/// One forward and backward: whole rows in one packed row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Microbatch {
    pub tokens: usize,
    pub rows: usize,
    pub learned: usize,
    /// Tokens of the longest row.
    pub longest: usize,
}

impl Microbatch {
    fn of(rows: &[Row], chosen: &[usize]) -> Self {
        let mut all = Self { rows: chosen.len(), ..Self::default() };
        for row in chosen.iter().map(|&i| rows[i]) {
            all.tokens += row.tokens();
            all.learned += row.learned;
            all.longest = all.longest.max(row.tokens());
        }
        all
    }
}

/// What one data rank has of a minibatch, or of the samples of a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Share {
    pub rows: Vec<Row>,
    /// In the order in which they are computed.
    pub microbatches: Vec<Microbatch>,
}

impl Share {
    fn of(rows: &[Row], microbatches: &[Vec<usize>]) -> Self {
        Self {
            rows: microbatches.iter().flatten().map(|&i| rows[i]).collect(),
            microbatches: microbatches.iter().map(|chosen| Microbatch::of(rows, chosen)).collect(),
        }
    }

    pub fn tokens(&self) -> usize {
        self.microbatches.iter().map(|batch| batch.tokens).sum()
    }

    pub fn learned(&self) -> usize {
        self.microbatches.iter().map(|batch| batch.learned).sum()
    }

    /// The most tokens of one micro-batch.
    pub fn fullest(&self) -> usize {
        self.microbatches.iter().map(|batch| batch.tokens).max().unwrap_or(0)
    }
}

impl Job<'_> {
    /// Steps that are looked at: those whose rows are known, one where all rows are alike.
    pub fn looked_at(&self) -> usize {
        let known = self.rows.all().len() / drawn_per_step(self.config).max(1);
        if self.rows.are_alike() { 1 } else { known.max(1) }
    }

    /// The rows of step `step`, counted from 0, in the order of their prompts and samples.
    pub fn rows_of(&self, step: usize) -> Vec<Row> {
        let (drawn, samples) = (drawn_per_step(self.config), self.samples() / drawn_per_step(self.config).max(1));
        (0..drawn).flat_map(|i| std::iter::repeat_n(self.rows.at(step * drawn + i), samples)).collect()
    }

    /// The minibatches of step `step`: one of each size where all rows are alike.
    fn minibatches(&self, step: usize) -> Vec<Vec<Row>> {
        let rows = self.rows_of(step);
        if self.config.job.kind == JobKind::Sft || self.rows.are_alike() {
            return rows.chunks(self.minibatch()).take(1).map(<[Row]>::to_vec).collect();
        }
        let (rng, epochs) = (Rng::new(self.config.job.seed, Purpose::Shuffle), self.config.ppo.epochs);
        // As `train::ppo` deals the samples of a step, which counts from 1.
        let orders = (0..epochs).map(|epoch| rng.permutation(rows.len(), ((step + 1) * epochs + epoch) as u32));
        let dealt = orders.flat_map(|order| order.chunks(self.minibatch()).map(<[usize]>::to_vec).collect::<Vec<_>>());
        dealt.take(MINIBATCHES_MAX).map(|chosen| chosen.into_iter().map(|i| rows[i]).collect()).collect()
    }

    /// The minibatches of step `step`, each as data ranks have it: `[minibatch][data rank]`.
    pub fn training_of(&self, step: usize, mesh: &Mesh) -> Vec<Vec<Share>> {
        self.minibatches(step).iter().map(|rows| self.cut(rows, mesh, self.config.gradient.order)).collect()
    }

    /// The same of all steps that are looked at.
    pub fn training(&self, mesh: &Mesh) -> Vec<Vec<Share>> {
        (0..self.looked_at()).flat_map(|step| self.training_of(step, mesh)).take(MINIBATCHES_MAX).collect()
    }

    /// `rows` as data ranks have them, cut to the budget of tokens; ranks of a sequence group share each packed row, so
    /// that its budget grows with them. As `learn::accumulation` and `learn::score` cut.
    pub fn cut(&self, rows: &[Row], mesh: &Mesh, order: GradientOrder) -> Vec<Share> {
        let lengths: Vec<usize> = rows.iter().map(|row| row.tokens()).collect();
        let tokens_max = (self.tokens_max() * mesh.sequence).max(1);
        if order == GradientOrder::Fast || !mesh.data.is_power_of_two() {
            let plan = balance::plan(&lengths, mesh.data, tokens_max, &Cost::of(&self.archs.actor));
            return plan.iter().map(|own| Share::of(rows, own)).collect();
        }
        let chunks = self.config.gradient.chunks;
        let dealt = packing::deal(&lengths, chunks);
        let of_rank = |rank: usize| {
            let own = leaves(chunks, rank, mesh.data).into_iter();
            let own = own.flat_map(|(_, chunk)| packing::microbatches(&lengths, &dealt[chunk], tokens_max, 0));
            Share::of(rows, &own.collect::<Vec<_>>())
        };
        (0..mesh.data).map(of_rank).collect()
    }

    /// Prompt and response tokens of a step over all ranks, the mean of those that are looked at.
    pub fn tokens_of_a_step(&self) -> usize {
        let steps = self.looked_at();
        let tokens = |step| self.rows_of(step).iter().map(|row| row.tokens()).sum::<usize>();
        (0..steps).map(tokens).sum::<usize>() / steps
    }

    /// The first of the data ranks that have the fullest micro-batch.
    pub fn fullest_rank(&self, mesh: &Mesh) -> usize {
        let training = self.training(mesh);
        let fullest = |rank: &usize| training.iter().map(|shares| shares[*rank].fullest()).max();
        (0..mesh.data).rev().max_by_key(fullest).unwrap_or(0)
    }

    /// The fullest micro-batch of training, over all ranks.
    pub fn fullest(&self, mesh: &Mesh) -> Microbatch {
        let all = self.training(mesh).into_iter().flatten().flat_map(|share| share.microbatches);
        all.max().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use crate::comm::Axes;
    use crate::config::Config;
    use crate::config::job::{GradientConfig, JobKind};
    use crate::config::optim::GradientOrder;
    use crate::config::optim::OptimConfig;
    use crate::data::RowTokens;
    use crate::learn::Learner;
    use crate::learn::Role;
    use crate::learn::accumulation::accumulate;
    use crate::learn::sums::Sums;
    use crate::mesh::Mesh;
    use crate::model::{Arch, Head, init};
    use crate::plan::{Archs, Job, Rows};
    use crate::tensor::DType;
    use std::path::Path;

    #[test]
    fn the_plan_counts_the_microbatches_that_training_makes() {
        let model = serde_json::json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 32,
            "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
            "max_position_embeddings": 512,
        });
        let arch = Arch::from_config(model.as_object().expect("an object")).expect("a model");
        let lengths: Vec<usize> = (0..90).map(|i| 20 + i * i * 37 % 300).collect();
        let tokens: Vec<RowTokens> = lengths.iter().map(|&all| RowTokens { all, response: all / 3 }).collect();
        let archs = Archs { actor: arch.clone(), critic: None, reference: None, reward: None };
        for order in [GradientOrder::Fast, GradientOrder::Fixed] {
            let mut config = Config::default();
            config.job.kind = JobKind::Sft;
            config.sft.minibatch_samples = 30;
            config.sft.microbatch_tokens_max = 1000;
            config.gradient = GradientConfig { order, chunks: 6, ..GradientConfig::default() };
            let weights = init::init(&arch, Head::LanguageModel, DType::F32, 1);
            let axes = Axes::one();
            let role = Role::new("actor", Path::new(""), &arch, weights, &axes);
            let optim = OptimConfig::with_lr(1e-4);
            let mut learner = Learner::new(role, &optim, &config.gradient, 1, &axes, 1).expect("a learner");
            let job = Job::new(&config, &archs, Some(Rows::of(&config, arch.context, &tokens, false)), |_| Ok(()));
            let planned = job.training(&Mesh::data_only(1));
            assert_eq!(planned.len(), 3);
            for (lengths, shares) in lengths.chunks(30).zip(planned) {
                let mut made = Vec::new();
                accumulate(&mut learner, &axes, lengths, 1000, |_, rows| {
                    made.push((rows.len(), rows.iter().map(|i| lengths[*i]).sum::<usize>()));
                    Sums::default()
                });
                learner.sum.finish();
                let counted = shares[0].microbatches.iter().map(|batch| (batch.rows, batch.tokens));
                assert_eq!(counted.collect::<Vec<_>>(), made, "{order:?}");
            }
        }
    }
}
