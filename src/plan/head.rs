//! How `ops::linear_logprob` cuts the rows that go through a head of `v` rows.

/// Logits of one chunk on the CPU, scored and with a backward behind.
const CHUNK_BYTES: usize = 8 << 20;
const CHUNK_BYTES_BACKWARD: usize = 16 << 20;
const CHUNK_BYTES_MAX: usize = 40 << 20;
const CHUNK_ROWS: usize = 64;
/// Logits of one chunk on a GPU; chunks whose gradients of logits, bf16, are held together.
const GPU_CHUNK_BYTES: usize = 256 << 20;
const GPU_GROUP: usize = 2;

/// Where a head is, and its rows.
#[derive(Clone, Copy)]
pub struct Cut {
    pub cpu: bool,
    pub v: usize,
}

impl Cut {
    fn chunk(self, rows: usize, bytes: usize) -> usize {
        let row = 4 * self.v;
        if !self.cpu {
            return (GPU_CHUNK_BYTES / row).max(1).min(rows);
        }
        let fit = (bytes / row).max(CHUNK_ROWS).min(CHUNK_BYTES_MAX / row);
        let fit = if fit >= 8 { fit / 8 * 8 } else { fit.max(1) };
        fit.min(rows)
    }

    /// Rows that are scored at a time. With exact products a GPU needs less than their logits (`linear_logprob_fused`).
    pub fn scored(self, rows: usize) -> usize {
        self.chunk(rows, CHUNK_BYTES)
    }

    /// Rows of a chunk with a backward behind.
    pub fn trained(self, rows: usize) -> usize {
        self.chunk(rows, CHUNK_BYTES_BACKWARD)
    }

    /// Rows whose gradients of logits are held beside a chunk of logits; none on the CPU, where they take its place.
    pub fn gradients(self, rows: usize) -> Option<usize> {
        (!self.cpu).then(|| rows.min(GPU_GROUP * self.trained(rows)))
    }
}
