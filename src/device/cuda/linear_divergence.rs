//! Divergences of a student's distributions from a teacher's, from the logits of both, a chunk of tokens at a time.

use super::gpu::{Arg, gpu};
use super::linear_logprob::{GRADIENT_COLUMNS, check};
use super::matmul::Matrix;
use super::memory::{Memory, ViewMut};
use super::shape::{check_aligned, dim};
use crate::config::method::distill::Divergence;
use crate::dtype::DType;

/// Logits of student and teacher, f32, and the statistics (`linear_logprob::stats`) of the whole rows, of which they
/// may be parts.
#[derive(Clone, Copy, Debug)]
pub struct Pair<'a> {
    pub student: Matrix<'a>,
    pub teacher: Matrix<'a>,
    pub inverse_temperature: f32,
    pub of_student: &'a Memory,
    pub of_teacher: &'a Memory,
}

impl Pair<'_> {
    /// The arguments that both kernels begin with.
    fn args(&self, op: &str, of: Divergence) -> [Arg; 8] {
        let (student, teacher) = (self.student, self.teacher);
        check(op, student);
        [
            student.values.arg(DType::F32),
            student.stride.into(),
            teacher.values.arg(DType::F32),
            teacher.stride.into(),
            dim(op, student.width),
            dim(op, of as usize),
            Arg::F32(self.inverse_temperature),
            self.of_student.arg(),
        ]
    }

    /// Two sums over each row, in the form of statistics with max 0 and target 0, so that the sums of parts add up like
    /// statistics. They are the sums of the CPU's `Pair::sums`. A row's bits depend only on the row.
    pub fn sums(&self, of: Divergence, sums: &mut Memory) {
        const OP: &str = "linear_divergence::sums";
        let args = [&self.args(OP, of)[..], &[self.of_teacher.arg(), sums.arg_mut()]].concat();
        gpu().launch("linear_divergence_sums", [self.student.rows, 1, 1], 256, 0, &args);
    }

    /// dlogits (rows, dstride) bf16 += `scale` times the slope of the divergence by the student's logits / temperature;
    /// `sums` are those of whole rows. Columns past v are unchanged.
    pub fn add(&self, of: Divergence, sums: &Memory, scale: f32, mut dlogits: ViewMut, dstride: usize) {
        const OP: &str = "linear_divergence::add";
        let rows = self.student.rows;
        let dlogits = dlogits.arg(DType::Bf16);
        check_aligned(OP, &[dlogits]);
        let more = [self.of_teacher.arg(), sums.arg(), Arg::F32(scale), dlogits, dstride.into()];
        let args = [&self.args(OP, of)[..], &more].concat();
        gpu().launch("linear_divergence_add", [rows, dstride.div_ceil(GRADIENT_COLUMNS), 1], 256, 0, &args);
    }
}
