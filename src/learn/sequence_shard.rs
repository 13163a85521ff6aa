//! What the ranks of the sequence axis hold of a packed row, and how values of their parts are gathered.

use crate::comm::Group;
use crate::comm::records;
use crate::device::null;
use crate::learn::packed::PackedRow;

/// This rank's part of a packed row.
pub fn shard(whole: &PackedRow, sequence: &Group) -> PackedRow {
    whole.part(sequence.rank(), sequence.size())
}

/// The values of the part's predicted tokens, of one value a predicted token of the whole row; none of none.
pub fn select(part: &PackedRow, whole: &[f32]) -> Vec<f32> {
    if whole.is_empty() { Vec::new() } else { part.row_indices.iter().map(|&place| whole[place]).collect() }
}

/// One value a predicted token of the whole row from those that each rank of the sequence axis has of its part.
pub fn gather(whole: &PackedRow, sequence: &Group, mine: &[f32]) -> Vec<f32> {
    let mut joined = vec![0.0; whole.rows.len()];
    if null::is_active() {
        // Peers that are not there have no values.
        return joined;
    }
    for (rank, values) in records::gather_f32(sequence, mine).iter().enumerate() {
        let places = whole.part(rank, sequence.size()).row_indices;
        assert_eq!(places.len(), values.len(), "a value for each predicted token of rank {rank}");
        places.into_iter().zip(values).for_each(|(place, value)| joined[place] = *value);
    }
    joined
}
