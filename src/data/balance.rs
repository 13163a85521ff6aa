//! Assignment of rows to the micro-batches of all data ranks: within the token budget, the same number of micro-batches
//! on every rank, and nearly equal work.

pub use crate::model::cost::Cost;

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Splits rows of `lengths` tokens into micro-batches of at most `tokens_max` tokens: `[data rank][micro-batch][row]`.
/// Rows are dealt to ranks by cost, the most expensive first, each to the rank with the least work. Every rank gets the
/// same number of micro-batches, because they contain collectives; one may be empty. A row longer than `tokens_max` is
/// a micro-batch of its own. A pure function of its arguments: every rank computes the whole plan.
pub fn plan(lengths: &[usize], data_ranks: usize, tokens_max: usize, cost: &Cost) -> Vec<Vec<Vec<usize>>> {
    let costs: Vec<usize> = lengths.iter().map(|&tokens| cost.row(tokens)).collect();
    let dealt = deal(&costs, data_ranks);
    let mut count = 0;
    loop {
        let mut plan: Vec<_> = dealt.iter().map(|rows| microbatches(lengths, rows, tokens_max, count)).collect();
        let most = plan.iter().map(Vec::len).max().unwrap_or_default();
        // Ranks that need fewer micro-batches spread their rows over the same number, if they have enough rows.
        if most <= count || plan.iter().all(|own| own.len() == most) {
            for own in &mut plan {
                own.resize(most, Vec::new());
            }
            return plan;
        }
        count = most;
    }
}

/// Deals rows of `lengths` tokens to `chunks` shares, the longest row first. Each goes to the share with the fewest
/// tokens, the first one on a tie (Graham 1969, LPT). Each share lists its rows in ascending order. Every row is in
/// exactly one share. With fewer rows than shares, some are empty. A pure function of its arguments.
pub fn deal(lengths: &[usize], chunks: usize) -> Vec<Vec<usize>> {
    assert!(chunks > 0, "balance::deal: rows are dealt to at least one chunk");
    let mut longest_first: Vec<usize> = (0..lengths.len()).collect();
    longest_first.sort_by_key(|i| (Reverse(lengths[*i]), *i));
    let mut shares = vec![Vec::new(); chunks];
    // (tokens, rows, share): equal token counts go to the share with fewer rows, so empty rows spread too.
    let mut heap: BinaryHeap<_> = (0..chunks).map(|c| Reverse((0, 0, c))).collect();
    for i in longest_first {
        if let Some(Reverse((tokens, rows, c))) = heap.pop() {
            shares[c].push(i);
            heap.push(Reverse((tokens + lengths[i], rows + 1, c)));
        }
    }
    for share in &mut shares {
        share.sort_unstable();
    }
    shares
}

/// Splits the rows `of` (ascending) into micro-batches of at most `tokens_max` tokens: as few as `deal` can balance,
/// and at least `count_min` if there are enough rows. A row longer than `tokens_max` is a micro-batch of its own. Rows
/// within a group ascend, groups are ordered by their first row, and none is empty.
pub fn microbatches(lengths: &[usize], of: &[usize], tokens_max: usize, count_min: usize) -> Vec<Vec<usize>> {
    assert!(tokens_max > 0, "balance::microbatches: a budget of 0 tokens holds no row");
    let (long, fitting): (Vec<usize>, Vec<usize>) = of.iter().partition(|i| lengths[**i] > tokens_max);
    let mut groups: Vec<Vec<usize>> = long.into_iter().map(|i| vec![i]).collect();
    if !fitting.is_empty() {
        let fit: Vec<usize> = fitting.iter().map(|i| lengths[*i]).collect();
        let mut count =
            fit.iter().sum::<usize>().div_ceil(tokens_max).max(count_min.saturating_sub(groups.len())).max(1);
        // Ends at the latest with one row per group, which always fits.
        let dealt = loop {
            let dealt = deal(&fit, count);
            if dealt.iter().all(|group| group.iter().map(|i| fit[*i]).sum::<usize>() <= tokens_max) {
                break dealt;
            }
            count += 1;
        };
        let rows = dealt.into_iter().filter(|group| !group.is_empty());
        groups.extend(rows.map(|group| group.into_iter().map(|i| fitting[i]).collect()));
    }
    groups.sort_unstable_by_key(|group: &Vec<usize>| group[0]);
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Arch;
    use crate::rng::{Purpose, Rng};

    fn cost(context: usize) -> Cost {
        let config = serde_json::json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "hidden_size": 2048,
            "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4,
            "max_position_embeddings": context,
        });
        Cost::from_arch(&Arch::from_config(config.as_object().expect("an object")).expect("a model"))
    }

    /// 1024 rows, log-normal with median 300 and sigma 0.9, cut at 2048.
    fn heavy_tailed() -> Vec<usize> {
        let rng = Rng::new(7, Purpose::Synthetic);
        let normal = |i: u32| f64::from(rng.normal_pair([i, 0, 0, 0])[0]);
        (0..1024).map(|i| ((300.0f64.ln() + 0.9 * normal(i)).exp() as usize).clamp(8, 2048)).collect()
    }

    #[test]
    fn the_slowest_rank_has_at_most_5_percent_more_work_than_the_mean_on_heavy_tailed_lengths() {
        let (lengths, cost) = (heavy_tailed(), cost(2048));
        let longest = lengths.iter().filter(|&&n| n == 2048).count();
        assert!(longest > 4 && lengths.iter().filter(|&&n| n < 300).count() > 400, "a heavy tail: {longest} at 2048");
        let work = |rows: &[usize]| rows.iter().map(|&i| cost.row(lengths[i])).sum::<usize>() as f64;
        for ranks in 2..=16 {
            let plan = plan(&lengths, ranks, 8192, &cost);
            let mean = plan.iter().flatten().map(|rows| work(rows)).sum::<f64>() / ranks as f64;
            let of_rank = |own: &Vec<Vec<usize>>| own.iter().map(|rows| work(rows)).sum::<f64>();
            let slowest = plan.iter().map(of_rank).fold(0.0, f64::max);
            assert!(slowest <= 1.05 * mean, "{ranks} ranks: slowest {slowest}, mean {mean}");
            // If ranks synchronize in every micro-batch, the slowest of each counts.
            let met: f64 = (0..plan[0].len()).map(|j| plan.iter().map(|own| work(&own[j])).fold(0.0, f64::max)).sum();
            assert!(met <= 1.25 * mean, "{ranks} ranks that meet in every micro-batch: {met}, mean {mean}");
        }
    }

    #[test]
    fn all_ranks_get_equally_many_microbatches_within_the_budget_and_no_row_is_lost() {
        let cost = cost(2048);
        let mut lengths = heavy_tailed();
        lengths.truncate(101);
        for (ranks, tokens_max) in [(1, 8192), (2, 4096), (3, 2048), (5, 1000), (16, 4096), (128, 4096)] {
            let plan = plan(&lengths, ranks, tokens_max, &cost);
            assert_eq!(plan.len(), ranks);
            let mut rows: Vec<usize> = plan.concat().concat();
            rows.sort_unstable();
            assert_eq!(rows, (0..lengths.len()).collect::<Vec<_>>(), "{ranks} ranks");
            for own in &plan {
                assert_eq!(own.len(), plan[0].len(), "{ranks} ranks");
                for rows in own {
                    let tokens: usize = rows.iter().map(|i| lengths[*i]).sum();
                    assert!(tokens <= tokens_max || rows.len() == 1, "{rows:?} of {tokens} tokens");
                }
            }
        }
        assert_eq!(plan(&[], 2, 8, &cost), vec![Vec::<Vec<usize>>::new(); 2]);
        assert_eq!(plan(&[3], 2, 8, &cost), vec![vec![vec![0]], vec![vec![]]]);
    }
}
