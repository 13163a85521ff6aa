//! GEMMs in the `fast` mode: cuBLASLt, which chooses an algorithm for each shape. Its sums depend on the number of
//! rows, so a row's bits may differ from one batch to another, and from one place in memory to another.
//!
//! cuBLASLt computes GEMMs of more than 64 rows (`takes`). With fewer rows, as in decoding, reading W takes the time.
//! The exact kernels have tiles for that case, which are as fast on an H200 (`bench cuda` measures both).
//!
//! Matrices are row-major here and column-major there: a row-major (r, c) is a column-major (c, r). So each GEMM is
//! requested transposed, with its factors exchanged.
//!
//! A call creates nothing: a table keeps the library's descriptions of each shape, for all m of a class ([`class`])
//! together. Only the columns of two matrices are set again if m has changed.

use super::cublaslt::{Algorithm, ColumnMajor, CublasLt, Outcome, Product};
use super::gpu::{Arg, gpu};
use super::memory::Memory;
use super::sys::Handle;
use crate::device::null;
use crate::dtype::DType;
use crate::error::Error;
use crate::sys::lock::lock;
use cudarc::cublaslt::sys::cublasLtHandle_t;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, OnceLock};

/// Memory for the partial sums of a GEMM: the size that NVIDIA recommends for sm_90, and more than sm_80 needs.
pub const WORKSPACE_BYTES: usize = 32 << 20;
/// The largest number of rows with exact GEMMs.
pub const EXACT_ROWS_MAX: usize = 64;
/// The largest alignment that an algorithm needs.
const ALIGN_MAX: u64 = 16;
/// A base address for the bias while an algorithm is chosen: the choice depends on the alignment and reads no values.
const PROMISED: u64 = 1 << 32;

/// Turns the mode on or off, for all GEMMs that are started from now on.
///
/// # Errors
/// The reason why there is no cuBLASLt for the GPU of this process; the mode then stays off.
pub fn turn(on: bool) -> Outcome<()> {
    if on && !null::is_active() {
        products()?;
    }
    gpu().is_fast.store(on, Ordering::SeqCst);
    Ok(())
}

pub fn is_on() -> bool {
    gpu().is_fast.load(Ordering::SeqCst)
}

/// Opens the library for the GPU of this process and allocates its workspace. Returns its name, release and path.
///
/// # Errors
/// The reason why there is none.
pub fn open() -> Outcome<String> {
    products().map(|products| products.library.describe())
}

/// Whether cuBLASLt computes a GEMM with m rows of x and y.
pub(super) fn takes(m: usize) -> bool {
    m > EXACT_ROWS_MAX && is_on()
}

/// The three GEMMs of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Form {
    /// y (m, n) = x (m, k) W (n, k)^T
    Forward,
    /// dx (m, k) = dy (m, n) W (n, k)
    Input,
    /// dW (n, k) = dy (m, n)^T x (m, k)
    Weight,
}

impl Form {
    pub fn op(self) -> &'static str {
        match self {
            Self::Forward => "matmul::forward",
            Self::Input => "matmul::backward_input",
            Self::Weight => "matmul::backward_weight",
        }
    }
}

/// A GEMM to start. The factors are in the library's order: W x, W dy, x dy.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    pub form: Form,
    pub mnk: [usize; 3],
    /// Values from row to row of both factors and the result.
    pub strides: [usize; 3],
    pub factors: [Arg; 2],
    /// The addend of the finished sum, with the description of the result: the result itself, or another matrix.
    pub addend: Option<Arg>,
    pub result: Arg,
    pub dtype: DType,
    /// (n), bf16; the result is then bf16, too.
    pub bias: Option<Arg>,
}

/// Everything that a choice of algorithm depends on, m by its class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    form: Form,
    class: usize,
    n: usize,
    k: usize,
    strides: [usize; 3],
    dtype: DType,
    adds: bool,
    /// Alignment in bytes of the addresses of both factors, the addend, the result and the bias; 0: there is none.
    aligns: [u32; 5],
}

/// The descriptions that are kept for a shape.
struct Plan {
    product: Product,
    /// The algorithm of the class.
    algorithm: Algorithm,
    /// The current setting of the descriptions: m, and the algorithm for that m.
    at: (usize, Algorithm),
}

/// The library with the GPU of this process.
struct Products {
    library: CublasLt,
    handle: Handle<cublasLtHandle_t>,
    /// Belongs to the compute stream.
    workspace: Memory,
    plans: Mutex<HashMap<Shape, Plan>>,
}

fn products() -> Outcome<&'static Products> {
    static PRODUCTS: OnceLock<Outcome<Products>> = OnceLock::new();
    PRODUCTS.get_or_init(Products::new).as_ref().map_err(Clone::clone)
}

/// The largest m that shares the algorithm of this m: steps of an eighth of a power of two.
fn class(m: usize) -> usize {
    m.next_multiple_of((m.next_power_of_two() / 16).max(1))
}

/// Starts a GEMM after all earlier work of the stream.
///
/// # Panics
/// If there is no cuBLASLt, or a call fails: the message names the GEMM, its shapes, the call and its status.
pub(super) fn start(call: Call) {
    let [m, n, k] = call.mnk;
    let is_empty = match call.form {
        Form::Forward => m * n == 0,
        Form::Input => m * k == 0,
        Form::Weight => n * k == 0 || m == 0,
    };
    if is_empty || null::is_active() {
        return;
    }
    let started =
        products().and_then(|products| gpu().enter().and_then(|()| products.start(&call, gpu().queue().cast())));
    if let Err(why) = started {
        let Call { form, strides: [a, b, d], dtype, addend, .. } = call;
        let bias = if call.bias.is_some() { " with a bias" } else { "" };
        let added = match addend {
            None => "",
            Some(c) if c == call.result => " that is added to",
            Some(_) => " plus another matrix",
        };
        let message = format!(
            "matmul, {form:?}{bias}, m {m}, n {n}, k {k}, row strides {a}, {b} and {d}, {} result{added}: {why}",
            dtype.name()
        );
        if !gpu().is_noted(&message) {
            let hint = "set job.gemm = \"exact\" to run without cuBLASLt";
            std::panic::panic_any(Error::fault(message).hint(hint));
        }
    }
}

fn align(address: u64) -> u32 {
    (1u64 << address.trailing_zeros().min(63)).min(ALIGN_MAX) as u32
}

impl Call {
    /// Addresses of D = A B + C; C is D if nothing is added.
    fn matrices(&self) -> [u64; 4] {
        let Self { factors: [a, b], addend, result, .. } = *self;
        [a, b, addend.unwrap_or(result), result].map(Arg::word)
    }
}

impl Shape {
    fn from_call(call: &Call) -> Self {
        let [m, n, k] = call.mnk;
        let [a, b, c, d] = call.matrices().map(align);
        Self {
            form: call.form,
            class: class(m),
            n,
            k,
            strides: call.strides,
            dtype: call.dtype,
            adds: call.addend.is_some(),
            aligns: [a, b, c, d, call.bias.map_or(0, |bias| align(bias.word()))],
        }
    }

    /// The transpositions of the factors, and the matrices.
    fn matrices(&self) -> ([i32; 2], [ColumnMajor; 3]) {
        let Self { class: m, n, k, .. } = *self;
        let (transposed, sizes) = match self.form {
            Form::Forward => ([1, 0], [[k, n], [k, m], [n, m]]),
            Form::Input => ([0, 0], [[k, n], [n, m], [k, m]]),
            Form::Weight => ([0, 1], [[k, m], [n, m], [k, n]]),
        };
        let columns = |i: usize, dtype| {
            let ([rows, columns], stride) = (sizes[i], self.strides[i]);
            ColumnMajor { dtype, rows, columns, stride }
        };
        (transposed, [columns(0, DType::Bf16), columns(1, DType::Bf16), columns(2, self.dtype)])
    }

    /// The matrices with m columns among A, B and D.
    fn of_m_columns(&self) -> [usize; 2] {
        if self.form == Form::Weight { [0, 1] } else { [1, 2] }
    }
}

impl Products {
    fn new() -> Outcome<Self> {
        let library = CublasLt::open()?;
        gpu().enter()?;
        let handle = library.handle().map_err(|why| format!("{}: {why}", library.describe()))?;
        Ok(Self { library, handle, workspace: Memory::scratch(WORKSPACE_BYTES), plans: Mutex::default() })
    }

    fn start(&self, call: &Call, stream: *mut c_void) -> Outcome<()> {
        let shape = Shape::from_call(call);
        let bias = call.bias.map(Arg::word);
        let mut plans = lock(&self.plans);
        let plan = match plans.entry(shape) {
            Entry::Occupied(plan) => plan.into_mut(),
            Entry::Vacant(free) => free.insert(self.plan(&shape)?),
        };
        if plan.at.0 != call.mnk[0] {
            self.fit(&shape, plan, call.mnk[0])?;
        }
        if let Some(bias) = bias {
            self.library.set_bias(&plan.product, bias)?;
        }
        let (addresses, workspace) = (call.matrices(), self.workspace.address());
        self.library.start(self.handle, &plan.product, addresses, shape.adds, &plan.at.1, workspace, stream)
    }

    fn plan(&self, shape: &Shape) -> Outcome<Plan> {
        let (transposed, matrices) = shape.matrices();
        let product = self.library.product(transposed, matrices, shape.aligns[4] > 0)?;
        let algorithm = self.choose(shape, &product)?;
        Ok(Plan { product, algorithm, at: (shape.class, algorithm) })
    }

    fn choose(&self, shape: &Shape, product: &Product) -> Outcome<Algorithm> {
        let [a, b, c, d, bias] = shape.aligns;
        if bias > 0 {
            // The choice depends on the alignment, and is kept for all biases of the class. So the address has only
            // their alignment.
            self.library.set_bias(product, PROMISED + u64::from(bias))?;
        }
        self.library.choose(self.handle, product, [a, b, c, d], WORKSPACE_BYTES)
    }

    /// Sets a plan to m rows. The result depends on m alone, not on earlier GEMMs.
    fn fit(&self, shape: &Shape, plan: &mut Plan, m: usize) -> Outcome<()> {
        // If any call below fails, the next call sets everything again.
        plan.at.0 = 0;
        for matrix in shape.of_m_columns() {
            self.library.set_columns(&plan.product, matrix, m)?;
        }
        let again = self.library.again(self.handle, &plan.product, &plan.algorithm);
        let algorithm = match again.filter(|again| again.workspace <= WORKSPACE_BYTES) {
            Some(algorithm) => algorithm,
            None => self.choose(shape, &plan.product)?,
        };
        plan.at = (m, algorithm);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_classes_are_at_least_m_and_at_most_an_eighth_larger() {
        for m in 1..5000 {
            let class = class(m);
            assert!(class >= m && class <= m + m / 8 && self::class(class) == class, "{m}: {class}");
        }
        let classes: std::collections::BTreeSet<usize> = (65..=16384).map(class).collect();
        assert_eq!(classes.len(), 64);
    }

    #[test]
    fn addresses_are_aligned_to_16_bytes_at_most() {
        assert_eq!([0, 2, 4, 24, 48, 256].map(align), [16, 2, 4, 8, 16, 16]);
    }
}
