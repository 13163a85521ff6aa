//! One pass over a minibatch: the micro-batches of this rank, and the sums over those of all ranks.

use crate::comm::Axes;
use crate::comm::records;
use crate::config::optim::GradientOrder;
use crate::data::balance::{self, Cost};
use crate::data::packing;
use crate::learn::Learner;
use crate::learn::sums::Sums;

/// Part of a minibatch whose gradient is one summand.
struct Chunk {
    /// Place in the tree of sums.
    leaf: usize,
    number: usize,
    microbatches: Vec<Vec<usize>>,
}

/// The chunks of this rank, in the order in which to compute them. `tokens_max` is a rank's; a ring of ranks holds as
/// many times more of a row.
fn chunks(learner: &Learner, axes: &Axes, lengths: &[usize], tokens_max: usize) -> Vec<Chunk> {
    let (sum, tokens_max) = (&learner.sum, tokens_max * axes.sequence.size());
    match sum.order {
        GradientOrder::Fast => {
            let cost = Cost::of(learner.role.arch());
            let mut plan = balance::plan(lengths, axes.data.size(), tokens_max, &cost);
            let number = axes.data.rank();
            vec![Chunk { leaf: number, number, microbatches: plan.swap_remove(number) }]
        }
        GradientOrder::Fixed => {
            let dealt = packing::deal(lengths, sum.chunks(&axes.data));
            let own = sum.own_chunks(&axes.data).into_iter();
            own.map(|(leaf, number)| {
                let microbatches = packing::microbatches_of(lengths, &dealt[number], tokens_max, 0);
                Chunk { leaf, number, microbatches }
            })
            .collect()
        }
    }
}

/// The rows of each micro-batch that a sweep makes on this rank, in its order.
pub fn microbatches(learner: &Learner, axes: &Axes, lengths: &[usize], tokens_max: usize) -> Vec<Vec<usize>> {
    chunks(learner, axes, lengths, tokens_max).into_iter().flat_map(|chunk| chunk.microbatches).collect()
}

/// Makes the gradient of a minibatch of rows of `lengths` tokens, the same on all ranks of the mesh: `microbatch` adds
/// the gradient of this rank's part of the given rows to `learner.sum.grads`, and returns what it measured. Gives the
/// sums over all ranks: those of a chunk in its order, then chunk by chunk, whoever computed them. Ranks of the tensor
/// axis have the same sums, which count once.
pub fn accumulate(
    learner: &mut Learner,
    axes: &Axes,
    lengths: &[usize],
    tokens_max: usize,
    mut microbatch: impl FnMut(&mut Learner, &[usize]) -> Sums,
) -> Sums {
    let chunks = chunks(learner, axes, lengths, tokens_max);
    let mut left: usize = chunks.iter().map(|chunk| chunk.microbatches.len()).sum();
    let mut mine = Vec::new();
    for chunk in chunks {
        learner.sum.begin_chunk();
        let mut sums = Sums::default();
        for rows in &chunk.microbatches {
            left -= 1;
            learner.sum.begin_microbatch(left == 0);
            sums.add(&microbatch(learner, rows));
        }
        learner.sum.end_chunk(chunk.leaf);
        mine.push((chunk.number, sums));
    }
    let mut all = records::gather(&axes.zero, &mine).expect("ranks of one binary");
    all.sort_by_key(|(number, _)| *number);
    let mut total = Sums::default();
    all.iter().for_each(|(_, sums)| total.add(sums));
    total
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::Axes;
    use crate::config::Config;
    use crate::config::job::{GradientConfig, JobKind};
    use crate::config::optim::OptimConfig;
    use crate::data::RowTokens;
    use crate::learn::Role;
    use crate::mesh::Mesh;
    use crate::model::{Arch, Head, init};
    use crate::plan::{Archs, Job, Rows};
    use crate::tensor::DType;
    use std::path::Path;

    #[test]
    fn the_plan_counts_the_microbatches_that_a_sweep_makes() {
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
            let job = Job::new(&config, &archs, Some(Rows::of(&config, arch.context, &tokens, false)));
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
