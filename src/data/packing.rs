//! Packing rows into groups of near equal token counts: micro-batches within a budget, and shares of ranks.

/// Deals rows of `lengths` tokens to `chunks` shares: the longest row first, each to the share with the fewest tokens,
/// the first such share on a tie (Graham 1969, LPT). Each share lists its rows in ascending order; every row is in
/// exactly one share; a share may be empty where there are fewer rows than shares. A pure function of its arguments.
pub fn deal(lengths: &[usize], chunks: usize) -> Vec<Vec<usize>> {
    assert!(chunks > 0, "packing::deal: rows are dealt to at least one chunk");
    let mut longest_first: Vec<usize> = (0..lengths.len()).collect();
    longest_first.sort_by_key(|i| (std::cmp::Reverse(lengths[*i]), *i));
    let mut shares = vec![Vec::new(); chunks];
    // (tokens, rows, share): equal token counts go to the share with fewer rows, so empty rows spread too.
    let mut heap: std::collections::BinaryHeap<_> = (0..chunks).map(|c| std::cmp::Reverse((0, 0, c))).collect();
    for i in longest_first {
        if let Some(std::cmp::Reverse((tokens, rows, c))) = heap.pop() {
            shares[c].push(i);
            heap.push(std::cmp::Reverse((tokens + lengths[i], rows + 1, c)));
        }
    }
    for share in &mut shares {
        share.sort_unstable();
    }
    shares
}

/// Cuts the rows `of` (ascending) into micro-batches of at most `tokens_max` tokens, as few as `deal` can balance them in,
/// and at least `count_min` where there are as many rows. A row longer than `tokens_max` stands alone. Rows within a group
/// ascend, groups are ordered by their first row; none is empty.
pub fn microbatches(lengths: &[usize], of: &[usize], tokens_max: usize, count_min: usize) -> Vec<Vec<usize>> {
    assert!(tokens_max > 0, "packing::microbatches: a budget of 0 tokens holds no row");
    let (long, fitting): (Vec<usize>, Vec<usize>) = of.iter().partition(|i| lengths[**i] > tokens_max);
    let mut groups: Vec<Vec<usize>> = long.into_iter().map(|i| vec![i]).collect();
    if !fitting.is_empty() {
        let fit: Vec<usize> = fitting.iter().map(|i| lengths[*i]).collect();
        let mut count =
            fit.iter().sum::<usize>().div_ceil(tokens_max).max(count_min.saturating_sub(groups.len())).max(1);
        // Ends at one row per group, where each fits.
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
