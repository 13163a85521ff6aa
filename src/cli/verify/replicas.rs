//! Whether ranks hold the values that they should: those of the files, or those of the other ranks.

use crate::comm::{Axes, Group, World, records};
use crate::error::Result;
use crate::model::Weights;
use crate::model::load::Source;
use crate::sys::files::xxh3;
use std::collections::BTreeMap;

/// An element of a rank's weights with a wrong value.
fn describe(weights: &Weights, at: usize, got: f32, wanted: f32) -> String {
    let bits = got.to_bits() ^ wanted.to_bits();
    let flip = match bits.count_ones() {
        1 => format!(": bit {} is flipped", bits.trailing_zeros()),
        n => format!(": {n} bits differ"),
    };
    format!("an element of {} is {got:e} instead of {wanted:e}{flip}", weights.table.name_at(at))
}

/// The first element of this rank's weights that is not that of the files, described.
///
/// # Errors
/// The errors of `Source::fill_f32`.
pub fn unlike_files(weights: &Weights, source: &Source) -> Result<Option<String>> {
    let mut wanted = Vec::new();
    for unit in 0..weights.table.units().len() {
        let range = weights.local(unit).range();
        if range.is_empty() {
            continue;
        }
        wanted.resize(range.len(), 0.0);
        source.fill_f32(range.clone(), &mut wanted)?;
        let got = weights.to_master(range.clone());
        let round = |x: f32| if source.is_rounded(weights.dtype()) { half::bf16::from_f32(x).to_f32() } else { x };
        let differs = got.iter().zip(&wanted).position(|(got, wanted)| got.to_bits() != round(*wanted).to_bits());
        if let Some(at) = differs {
            return Ok(Some(describe(weights, range.start + at, got[at], round(wanted[at]))));
        }
    }
    Ok(None)
}

/// What each rank found, as sentences that name the ranks and their hosts. All ranks call this.
///
/// # Errors
/// `Fault` if the ranks cannot exchange it.
pub fn by_rank(world: &World, mine: Option<String>) -> Result<Vec<String>> {
    let all = records::gather(&world.group(), &[mine])?;
    let named =
        |(rank, found): (usize, Option<String>)| Some(format!("rank {rank} ({}): {}", world.hosts[rank], found?));
    Ok(all.into_iter().enumerate().filter_map(named).collect())
}

/// The different sentences of all ranks. All ranks call this.
///
/// # Errors
/// `Fault` if the ranks cannot exchange them.
pub fn distinct(group: &Group, mine: &[String]) -> Result<Vec<String>> {
    let mut all = records::gather(group, mine)?;
    all.sort();
    all.dedup();
    Ok(all)
}

/// Compares the weights of ranks that hold the same ones, unit by unit, by hash. Returns a sentence for each rank that
/// differs from most others. All ranks of `axes` call this.
///
/// # Errors
/// `Fault` if the ranks cannot exchange their hashes.
pub fn unlike_others(weights: &Weights, axes: &Axes) -> Result<Vec<String>> {
    // The ranks along ZeRO's axis hold the same part of each matrix, unless they share it.
    if weights.is_sharded() || axes.expert.size() > 1 {
        return Ok(Vec::new());
    }
    let hash = |unit: usize| {
        let values = weights.to_master(weights.local(unit).range());
        xxh3(bytemuck::cast_slice(&values))
    };
    let mine: Vec<String> = (0..weights.table.units().len()).map(hash).collect();
    let hashes: Vec<Vec<String>> = records::gather(&axes.zero, &[mine])?;
    let mut found = Vec::new();
    for (rank, unit) in outvoted(&hashes) {
        let of = exchange(weights, unit, &axes.zero, rank);
        let named = axes.zero.describe_member(rank);
        found.push(format!("{named}: {of}"));
    }
    Ok(found)
}

/// Ranks whose hash of a unit is not the most frequent one: the first such unit of each rank. Of equally frequent hashes,
/// the one of the lowest rank counts as right.
pub fn outvoted(hashes: &[Vec<String>]) -> Vec<(usize, usize)> {
    let units = hashes.first().map_or(0, Vec::len);
    let right = |unit: usize| {
        let mut votes: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
        for (rank, of_rank) in hashes.iter().enumerate() {
            votes.entry(&of_rank[unit]).or_insert((0, usize::MAX - rank)).0 += 1;
        }
        votes.into_iter().max_by_key(|(_, votes)| *votes).map(|(hash, _)| hash.to_owned())
    };
    let right: Vec<Option<String>> = (0..units).map(right).collect();
    let first = |(rank, of_rank): (usize, &Vec<String>)| {
        let unit = (0..units).find(|unit| right[*unit].as_ref() != Some(&of_rank[*unit]))?;
        Some((rank, unit))
    };
    hashes.iter().enumerate().filter_map(first).collect()
}

/// Describes the first element of a unit in which `rank` differs from another rank. All ranks of the group call this.
fn exchange(weights: &Weights, unit: usize, group: &Group, rank: usize) -> String {
    let range = weights.local(unit).range();
    let values = weights.to_master(range.clone());
    let [mut of_rank, mut other] = [(); 2].map(|()| bytemuck::cast_slice::<f32, u8>(&values).to_vec());
    group.broadcast_bytes(rank, &mut of_rank);
    group.broadcast_bytes(usize::from(rank == 0), &mut other);
    let floats = |bytes: &Vec<u8>| bytes.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect::<Vec<f32>>();
    let [of_rank, other] = [&of_rank, &other].map(floats);
    let differs = of_rank.iter().zip(&other).position(|(a, b)| a.to_bits() != b.to_bits());
    differs.map_or("its weights differ".into(), |at| describe(weights, range.start + at, of_rank[at], other[at]))
}

#[cfg(test)]
mod tests {
    use super::outvoted;

    #[test]
    fn the_rank_that_differs_from_most_others_is_wrong_and_of_two_the_later_one() {
        let hashes = |text: &str| {
            text.split(' ').map(|rank| rank.chars().map(String::from).collect()).collect::<Vec<Vec<String>>>()
        };
        assert_eq!(outvoted(&hashes("ab ab ab")), []);
        assert_eq!(outvoted(&hashes("ac ab ab")), [(0, 1)]);
        assert_eq!(outvoted(&hashes("ab xy ab")), [(1, 0)]);
        assert_eq!(outvoted(&hashes("ab ac")), [(1, 1)]);
    }
}
