//! A flat f32 vector of a checkpoint: reads any of its elements, independent of the ranks that saved its shards,
//! without a copy of the rest.

use super::resume::Checkpoint;
use crate::error::{Error, Result};
use crate::sys::map::Map;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::OnceLock;

/// The files of a vector, opened once for all reads.
#[derive(Debug)]
pub struct SavedVector {
    extents: Vec<Extent>,
    files: Vec<Source>,
}

/// Elements `range` of a vector: they are in file number `file`, from its element `at` on.
#[derive(Debug)]
struct Extent {
    range: Range<usize>,
    file: usize,
    at: usize,
}

#[derive(Debug)]
struct Source {
    path: PathBuf,
    file: File,
    /// The memory map, for elements that are not contiguous.
    map: OnceLock<Map>,
}

impl SavedVector {
    /// Opens a vector of `len` elements, whose shards must cover it.
    pub fn open(from: &Checkpoint, vector: &str, len: usize) -> Result<Self> {
        let bad = |why: String| Error::data(format!("{}: {vector} {why}", from.dir.display()));
        match from.vector_len(vector) {
            Some(saved) if saved != len => {
                return Err(bad(format!("must have {len} elements (got {saved})"))
                    .hint("resume with the model of the checkpoint, or set another job.dir"));
            }
            None => return Err(bad("was not saved".to_string())),
            _ => {}
        }
        let (mut extents, mut files) = (Vec::new(), Vec::new());
        for (entry, shard) in from.shards(vector) {
            let path = from.sized(entry)?;
            let mut at = 0;
            for &[start, end] in &shard.ranges {
                if start > end || end > len {
                    return Err(bad(format!("has a shard from element {start} to {end} of {len}")));
                }
                extents.push(Extent { range: start..end, file: files.len(), at });
                at = at.saturating_add(end - start);
            }
            if u128::from(entry.bytes) != 4 * at as u128 {
                let (path, bytes) = (path.display(), entry.bytes);
                return Err(bad(format!("must have {at} elements in {path} (got {bytes} bytes)")));
            }
            let file = File::open(&path).map_err(|e| Error::io("open", &path, &e))?;
            files.push(Source { path, file, map: OnceLock::new() });
        }
        extents.sort_by_key(|extent| (extent.range.start, extent.range.end));
        let follows = |next: usize, Extent { range, .. }: &Extent| (range.start == next).then_some(range.end);
        if extents.iter().try_fold(0, follows) != Some(len) {
            return Err(bad(format!("must have each of its {len} elements in exactly one shard")));
        }
        Ok(Self { extents, files })
    }

    pub fn read(&self, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        assert_eq!(range.len(), out.len());
        for extent in self.from(range.start).take_while(|extent| extent.range.start < range.end) {
            let (from, to) = (extent.range.start.max(range.start), extent.range.end.min(range.end));
            if from < to {
                let Source { path, file, .. } = &self.files[extent.file];
                let bytes = bytemuck::cast_slice_mut(&mut out[from - range.start..to - range.start]);
                let at = 4 * (extent.at + from - extent.range.start) as u64;
                file.read_exact_at(bytes, at).map_err(|e| Error::io("read", path, &e))?;
            }
        }
        Ok(())
    }

    /// Fills `out` with elements `first`, `first + stride`, ...
    pub(super) fn read_strided(&self, first: usize, stride: usize, out: &mut [f32]) -> Result<()> {
        let (mut at, mut rest) = (first, out);
        for extent in self.from(first) {
            if rest.is_empty() {
                break;
            }
            let count = extent.range.end.saturating_sub(at).div_ceil(stride).min(rest.len());
            let (here, after) = std::mem::take(&mut rest).split_at_mut(count);
            if count > 0 {
                let values = self.files[extent.file].values()?;
                let values = &values[extent.at + at - extent.range.start..];
                here.iter_mut().zip(values.iter().step_by(stride)).for_each(|(to, from)| *to = *from);
            }
            (at, rest) = (at + count * stride, after);
        }
        Ok(())
    }

    /// The ranges, beginning with the one that holds an element.
    fn from(&self, element: usize) -> impl Iterator<Item = &Extent> {
        self.extents[self.extents.partition_point(|extent| extent.range.end <= element)..].iter()
    }
}

impl Source {
    fn values(&self) -> Result<&[f32]> {
        let map = if let Some(map) = self.map.get() {
            map
        } else {
            let made = Map::open(&self.path)?;
            self.map.get_or_init(|| made)
        };
        Ok(bytemuck::cast_slice(map))
    }
}
