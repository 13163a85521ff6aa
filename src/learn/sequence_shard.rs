//! Shards of a packed row on the ranks of the sequence axis, and the gather of their values.

use crate::comm::Group;
use crate::comm::records;
use crate::device::null;
use crate::learn::packed::PackedRow;

/// This rank's part of a packed row.
pub fn shard(whole: &PackedRow, sequence: &Group) -> PackedRow {
    whole.part(sequence.rank(), sequence.size())
}

/// The values of the shard's predicted tokens, from one value per predicted token of the whole row. An empty list stays empty.
pub fn select(part: &PackedRow, whole: &[f32]) -> Vec<f32> {
    if whole.is_empty() { Vec::new() } else { part.row_indices.iter().map(|&place| whole[place]).collect() }
}

/// One value per predicted token of the whole row, from those of each rank's shard.
pub fn gather(whole: &PackedRow, sequence: &Group, mine: &[f32]) -> Vec<f32> {
    let mut joined = vec![0.0; whole.rows.len()];
    if null::is_active() {
        // A null device has no peers, so there are no values to gather.
        return joined;
    }
    for (rank, values) in records::gather_f32(sequence, mine).iter().enumerate() {
        let places = whole.part(rank, sequence.size()).row_indices;
        assert_eq!(places.len(), values.len(), "a value for each predicted token of rank {rank}");
        places.into_iter().zip(values).for_each(|(place, value)| joined[place] = *value);
    }
    joined
}
