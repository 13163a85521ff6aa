//! The data that a rank saves in a checkpoint: borrowed, in host memory or on a GPU. From a GPU it is copied in pieces.

use super::manifest::{Entry, Shard};
use crate::device::cuda::View;
use crate::error::{Error, Result};
use crate::sys::files::{LargeFile, hex};
use crate::tensor::Slice;
use std::hash::Hasher;
use std::path::Path;
use twox_hash::XxHash3_64;

/// Bytes hashed and written at a time. Tensors of a GPU are copied to the host in pieces of this size.
const PIECE: usize = 4 << 20;

/// The contents of one file.
pub struct Payload<'a> {
    parts: Vec<Part<'a>>,
    shard: Option<Shard>,
    written: Option<&'a dyn Fn()>,
    name_at: Option<&'a dyn Fn(usize) -> String>,
}

enum Part<'a> {
    Host(&'a [u8]),
    /// f32.
    Cuda(View<'a>),
}

impl Part<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Host(bytes) => bytes.len(),
            Self::Cuda(view) => view.len() * view.dtype().bytes(),
        }
    }

    /// Passes its bytes to `take`, piece by piece. `room` holds pieces from a GPU.
    fn each(&self, room: &mut Vec<u8>, mut take: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let view = match self {
            Self::Host(bytes) => return bytes.chunks(PIECE).try_for_each(take),
            Self::Cuda(view) => view,
        };
        let each = PIECE / view.dtype().bytes();
        for start in (0..view.len()).step_by(each) {
            let values = view.part(start..(start + each).min(view.len()));
            room.resize(values.len() * values.dtype().bytes(), 0);
            values.read_bits(room);
            take(room)?;
        }
        Ok(())
    }
}

impl<'a> From<Slice<'a>> for Part<'a> {
    fn from(values: Slice<'a>) -> Self {
        match values {
            Slice::F32(values) => Self::Host(bytemuck::cast_slice(values)),
            Slice::Bf16(values) => Self::Host(bytemuck::cast_slice(values)),
            Slice::Cuda(view) => Self::Cuda(view),
        }
    }
}

impl<'a> Payload<'a> {
    fn from_parts(parts: Vec<Part<'a>>, shard: Option<Shard>) -> Self {
        Self { parts, shard, written: None, name_at: None }
    }

    /// Calls `then` when the file is on the disk, so the memory that it was written from may be released.
    #[must_use]
    pub fn and_then(self, then: &'a dyn Fn()) -> Self {
        Self { written: Some(then), ..self }
    }

    /// Rejects values of the vector that are not finite. `name_at(element)` names the element of the first one.
    #[must_use]
    pub fn finite(self, name_at: &'a dyn Fn(usize) -> String) -> Self {
        Self { name_at: Some(name_at), ..self }
    }

    pub fn bytes(bytes: &'a [u8]) -> Self {
        Self::from_parts(vec![Part::Host(bytes)], None)
    }

    /// Stretches of the flat f32 vector `vector` of `len` elements, whose other elements are saved by other ranks:
    /// (first element, values), ascending and without overlap. `SavedVector` reassembles any range of it, on any number
    /// of ranks.
    pub fn shards<V: Into<Slice<'a>>>(
        vector: &str,
        stretches: impl IntoIterator<Item = (usize, V)>,
        len: usize,
    ) -> Self {
        let stretches = stretches.into_iter().map(|(start, values)| (start, values.into()));
        let (ranges, parts): (Vec<[usize; 2]>, Vec<Part>) =
            stretches.map(|(start, values): (usize, Slice)| ([start, start + values.len()], values.into())).unzip();
        debug_assert!(ranges.windows(2).all(|w| w[0][1] <= w[1][0]), "{vector}: stretches {ranges:?} ascend");
        Self::from_parts(parts, Some(Shard { vector: vector.to_string(), ranges, len }))
    }

    pub fn size(&self) -> u64 {
        self.parts.iter().map(|p| p.len() as u64).sum()
    }

    /// Writes and hashes the file, and returns when it is on the disk.
    pub(super) fn write(&self, dir: &Path, name: &str) -> Result<Entry> {
        let path = dir.join(name);
        let (mut hash, mut room) = (XxHash3_64::new(), Vec::new());
        let mut file = LargeFile::create(&path)?;
        for (i, part) in self.parts.iter().enumerate() {
            let mut at = self.shard.as_ref().map_or(0, |shard| shard.ranges[i][0]);
            part.each(&mut room, |piece| {
                self.check(piece, at)?;
                at += piece.len() / size_of::<f32>();
                hash.write(piece);
                file.write(piece)
            })?;
        }
        file.finish()?;
        self.written.iter().for_each(|then| then());
        Ok(Entry { name: name.to_string(), bytes: self.size(), xxh3: hex(hash.finish()), shard: self.shard.clone() })
    }

    /// Checks a piece that begins with element `at` of the vector.
    fn check(&self, piece: &[u8], at: usize) -> Result<()> {
        let Some(name_at) = self.name_at else { return Ok(()) };
        let values = || piece.chunks_exact(size_of::<f32>()).map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]]));
        // A fold over all values is vectorized; a search would not be.
        if values().fold(true, |all, x| all & x.is_finite()) {
            return Ok(());
        }
        let (i, x) = values().enumerate().find(|(_, x)| !x.is_finite()).expect("one of them is not");
        let name = name_at(at + i);
        Err(Error::fault(format!("{name} is {x}, so no checkpoint was saved"))
            .hint("lower the learning rate and run the same command again to resume from the previous checkpoint"))
    }
}
