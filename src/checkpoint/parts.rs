//! The flat vectors of a model, saved part by part where ranks share its matrices, and read in any other cut.

use super::resume::Checkpoint;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::model::cut::{cut, join};
use crate::model::pack::repack;
use crate::model::{Arch, ParamSpec, ParamTable, TensorPart};
use crate::tensor::arena::Buffer;
use std::ops::Range;

/// What follows the name of a vector whose matrices lie row by row, as on GPUs.
const BY_ROW: &str = ".by-row";

/// How the vector `vector` of a table's parts is called: `actor.m`, or `actor.m.tensor-1-of-4`; `actor.m.by-row` where it
/// is laid out for GPUs.
pub fn part_name(vector: &str, table: &ParamTable) -> String {
    let TensorPart { rank, size } = table.tensor_part();
    let parts = if size == 1 { String::new() } else { format!(".tensor-{rank}-of-{size}") };
    format!("{vector}{}{parts}", order(table.device()))
}

fn order(device: Device) -> &'static str {
    match device {
        Device::Cpu => "",
        Device::Cuda => BY_ROW,
    }
}

/// The saved vectors of a model, for a rank that holds the parts of a table.
#[derive(Debug)]
pub struct ModelVectors<'a> {
    from: &'a Checkpoint,
    role: &'a str,
    own: &'a ParamTable,
    /// Tables of the whole and of all saved parts, where those are others than the rank's.
    other: Option<(ParamTable, Vec<ParamTable>)>,
}

impl<'a> ModelVectors<'a> {
    /// Finds into how many parts the vectors `ROLE.*` were cut, and for which device.
    ///
    /// # Errors
    /// `Data` where the model cannot be cut into so many.
    pub fn open(from: &'a Checkpoint, role: &'a str, arch: &Arch, own: &'a ParamTable) -> Result<Self> {
        let ours = (own.tensor_part().size, own.device());
        let (saved, device) = parts_of(from, &format!("{role}.weights")).unwrap_or(ours);
        let mut other = None;
        if (saved, device) != ours {
            arch.check_tensor(saved)
                .map_err(|e| Error::data(format!("checkpoint {}: {}", from.dir().display(), e.message)))?;
            let part = |rank| ParamTable::on(device, arch, own.head(), TensorPart { rank, size: saved });
            let whole = ParamTable::on(device, arch, own.head(), TensorPart::whole());
            other = Some((whole, (0..saved).map(part).collect()));
        }
        Ok(Self { from, role, own, other })
    }

    /// Fills `out` with elements `range` of the rank's vector `ROLE.what`.
    ///
    /// # Errors
    /// As `Checkpoint::read_vector`.
    pub fn read(&self, what: &str, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        let vector = format!("{}.{what}", self.role);
        let Some((whole, parts)) = &self.other else {
            return self.from.read_vector(&part_name(&vector, self.own), self.own.len(), range, out);
        };
        for (i, spec) in self.own.specs().iter().enumerate() {
            let (start, end) = (spec.offset.max(range.start), (spec.offset + spec.len).min(range.end));
            if start < end {
                let values = self.parameter(&vector, spec, &whole.specs()[i], parts, i)?;
                out[start - range.start..end - range.start]
                    .copy_from_slice(&values[start - spec.offset..end - spec.offset]);
            }
        }
        Ok(())
    }

    /// One parameter as the rank holds it: joined from all saved parts, and cut.
    fn parameter(
        &self,
        vector: &str,
        own: &ParamSpec,
        whole: &ParamSpec,
        parts: &[ParamTable],
        index: usize,
    ) -> Result<Buffer> {
        let mut saved = Vec::with_capacity(parts.len());
        for table in parts {
            let spec = &table.specs()[index];
            let mut values = Buffer::scratch(spec.len);
            self.from.read_vector(&part_name(vector, table), table.len(), spec.range(), &mut values)?;
            saved.push((spec, values));
        }
        let saved: Vec<(&ParamSpec, &[f32])> = saved.iter().map(|(spec, values)| (*spec, &values[..])).collect();
        let mut joined = Buffer::zeros(whole.len);
        join(&saved, whole, &mut joined);
        let mut values = Buffer::zeros(own.len);
        if whole.layout == own.layout {
            cut(whole, &joined, own, &mut values);
        } else {
            repack(whole, &joined, own, &mut values);
        }
        Ok(values)
    }
}

/// How many parts a vector was saved in, and laid out for which device; none if there is no such vector.
fn parts_of(from: &Checkpoint, vector: &str) -> Option<(usize, Device)> {
    [Device::Cpu, Device::Cuda].into_iter().find_map(|device| {
        let vector = format!("{vector}{}", order(device));
        if from.vector_len(&vector).is_some() {
            return Some((1, device));
        }
        let first = format!("{vector}.tensor-0-of-");
        let mut shards = from.manifest().files.iter().filter_map(|entry| entry.shard.as_ref());
        shards.find_map(|shard| Some((shard.vector.strip_prefix(&first)?.parse().ok()?, device)))
    })
}
