//! The flat vectors of a model. They are saved in parts if ranks share its matrices, and can be read with any other
//! split.

use super::payload::Payload;
use super::resume::Checkpoint;
use super::vector::SavedVector;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::model::pack::{held_at, pack_f32};
use crate::model::{Arch, ParamSpec, ParamTable, TensorPart};
use crate::tensor::{Layout, PANEL, Slice};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;
use std::sync::{Mutex, PoisonError};

/// Suffix of a vector whose matrices are stored row by row, as on GPUs.
const BY_ROW: &str = ".by-row";

/// The name of a vector of a table: `actor.m` or `actor.m.tensor-1-of-4`, and `actor.m.by-row` in the layout of GPUs.
fn vector_name(vector: &str, table: &ParamTable) -> String {
    let TensorPart { rank, size } = table.tensor_part();
    let parts = if size == 1 { String::new() } else { format!(".tensor-{rank}-of-{size}") };
    format!("{vector}{}{parts}", suffix(table.device()))
}

/// The file of this rank's share of a vector of a role, and its contents: ranges of the vector with their values.
pub fn shard<'a>(
    (role, what): (&str, &str),
    table: &ParamTable,
    rank: usize,
    stretches: Vec<(usize, Slice<'a>)>,
) -> (String, Payload<'a>) {
    let vector = vector_name(&format!("{role}.{what}"), table);
    (format!("{vector}.rank-{rank:04}.bin"), Payload::shards(&vector, stretches, table.len()))
}

fn suffix(device: Device) -> &'static str {
    if Layout::Panel.on(device) == Layout::Row { BY_ROW } else { "" }
}

/// The saved vectors of a model, for a rank that holds a shard of it. Reading them copies no whole vector, for any
/// saved sharding.
#[derive(Debug)]
pub struct ModelVectors<'a> {
    from: &'a Checkpoint,
    role: &'a str,
    own: &'a ParamTable,
    /// Tables of all saved tensor shards, if they differ from the rank's.
    others: Vec<ParamTable>,
    /// The vectors opened so far, each with its shards.
    open: RefCell<BTreeMap<String, Rc<Vec<SavedVector>>>>,
}

impl<'a> ModelVectors<'a> {
    /// Finds the number of ranks over which the vectors `ROLE.*` were sharded, and their device.
    pub fn open(from: &'a Checkpoint, role: &'a str, arch: &Arch, own: &'a ParamTable) -> Result<Self> {
        let ours = (own.tensor_part().size, own.device());
        let (saved, device) = parts_of(from, &format!("{role}.weights")).unwrap_or(ours);
        let mut others = Vec::new();
        if (saved, device) != ours {
            arch.check_tensor(saved)
                .map_err(|e| Error::data(format!("checkpoint {}: {}", from.dir.display(), e.message)))?;
            let part = |rank| ParamTable::on(device, arch, own.head(), TensorPart { rank, size: saved });
            others = (0..saved).map(part).collect();
        }
        Ok(Self { from, role, own, others, open: RefCell::default() })
    }

    /// Whether the vector `ROLE.what` was saved.
    pub fn has(&self, what: &str) -> bool {
        parts_of(self.from, &format!("{}.{what}", self.role)).is_some()
    }

    /// Fills `out` with elements `range` of the rank's vector `ROLE.what`, which is split at multiples of `FLAT_ALIGN`.
    pub fn read(&self, what: &str, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        let saved = self.vector(what)?;
        if self.others.is_empty() {
            return saved[0].read(range, out);
        }
        for (i, spec) in self.own.specs().iter().enumerate() {
            let (start, end) = (spec.offset.max(range.start), (spec.offset + spec.len).min(range.end));
            if start < end {
                let part = &mut out[start - range.start..end - range.start];
                let parts: Vec<_> = self.others.iter().map(|table| &table.specs()[i]).zip(&*saved).collect();
                parameter(&parts, spec, start - spec.offset..end - spec.offset, part)?;
            }
        }
        Ok(())
    }

    fn vector(&self, what: &str) -> Result<Rc<Vec<SavedVector>>> {
        if let Some(saved) = self.open.borrow().get(what) {
            return Ok(saved.clone());
        }
        let vector = format!("{}.{what}", self.role);
        let of = |table: &ParamTable| SavedVector::open(self.from, &vector_name(&vector, table), table.len());
        let tables = if self.others.is_empty() { std::slice::from_ref(self.own) } else { &self.others };
        let saved = Rc::new(tables.iter().map(of).collect::<Result<Vec<_>>>()?);
        self.open.borrow_mut().insert(what.to_string(), saved.clone());
        Ok(saved)
    }
}

/// Reads elements `part` of a parameter from the shards `saved` of its vector: each shard's location and values.
fn parameter(saved: &[(&ParamSpec, &SavedVector)], own: &ParamSpec, part: Range<usize>, out: &mut [f32]) -> Result<()> {
    let failed = Mutex::new(None);
    let fill = |start: usize, to: &mut [f32]| {
        if let Err(error) = rows(saved, start, to) {
            failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
    };
    pack_f32(own, &fill, part, out);
    failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

/// Reads row-major elements of the whole parameter, from `start` on.
fn rows(saved: &[(&ParamSpec, &SavedVector)], start: usize, to: &mut [f32]) -> Result<()> {
    let mut done = 0;
    while done < to.len() {
        // If there are copies, the last one counts.
        let found = saved.iter().rev().find_map(|(spec, values)| Some((spec, values, held_at(spec, start + done)?)));
        let (spec, values, (at, count)) = found.expect("the parts of a parameter are all of it");
        let count = count.min(to.len() - done);
        let stride = if spec.layout == Layout::Panel { PANEL } else { 1 };
        values.read_strided(at, stride, &mut to[done..done + count])?;
        done += count;
    }
    Ok(())
}

/// The number of ranks over which a vector was sharded, and its device. `None` if there is no such vector.
fn parts_of(from: &Checkpoint, vector: &str) -> Option<(usize, Device)> {
    [Device::Cpu, Device::Cuda].into_iter().find_map(|device| {
        let vector = format!("{vector}{}", suffix(device));
        if from.vector_len(&vector).is_some() {
            return Some((1, device));
        }
        let first = format!("{vector}.tensor-0-of-");
        let mut shards = from.manifest.files.iter().filter_map(|entry| entry.shard.as_ref());
        shards.find_map(|shard| Some((shard.vector.strip_prefix(&first)?.parse().ok()?, device)))
    })
}
