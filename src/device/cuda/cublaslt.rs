//! Products by cuBLASLt, opened at run time: the `fast` mode. Its sums depend on the shape, so that a row's result may differ
//! from one batch to another.
//!
//! Matrices are row-major here and column-major there: a row-major (r, c) is a column-major (c, r), so each product is asked for
//! transposed, with its factors exchanged.

use super::gpu::{Arg, Stream, gpu};
use super::library::CUBLASLT;
use super::memory::{Memory, View, ViewMut};
use super::nvrtc::reason;
use crate::config::model::DType;
use cudarc::cublaslt::sys::{
    cublasComputeType_t, cublasLtEpilogue_t, cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t,
    cublasLtMatmulDescAttributes_t as Attribute, cublasLtMatmulPreference_t,
    cublasLtMatmulPreferenceAttributes_t as Preference, cublasLtMatrixLayout_t, cudaDataType,
};
use libloading::Library;
use std::collections::HashMap;
use std::ffi::{CStr, OsString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr;
use std::sync::{Mutex, OnceLock, PoisonError};

type Status = c_int;

/// Memory in which a product may keep partial sums.
const WORKSPACE: usize = 32 << 20;
/// What views are aligned to at the least, with rows of a multiple of eight values.
const ALIGN: u32 = 16;

/// As cublasLtMatmulHeuristicResult_t, with a status that may have any value.
#[repr(C)]
#[derive(Clone, Copy)]
struct Heuristic {
    algorithm: cublasLtMatmulAlgo_t,
    workspace: usize,
    state: Status,
    waves: f32,
    reserved: [c_int; 4],
}

macro_rules! functions {
    ($($name:ident: $symbol:literal ($($argument:ty),*) -> $result:ty;)*) => {
        struct Functions {
            $($name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Functions {
            fn of(library: &Library) -> Result<Self, String> {
                // SAFETY: the types below are those of cublasLt.h, the same in versions 11 to 13.
                unsafe {
                    Ok(Self { $($name: *library.get($symbol).map_err(|e| reason(&e))?,)* })
                }
            }
        }
    };
}

functions! {
    version: b"cublasLtGetVersion\0" () -> usize;
    words: b"cublasLtGetStatusString\0" (Status) -> *const c_char;
    create: b"cublasLtCreate\0" (*mut cublasLtHandle_t) -> Status;
    product: b"cublasLtMatmulDescCreate\0" (*mut cublasLtMatmulDesc_t, cublasComputeType_t, cudaDataType) -> Status;
    set: b"cublasLtMatmulDescSetAttribute\0" (cublasLtMatmulDesc_t, Attribute, *const c_void, usize) -> Status;
    layout: b"cublasLtMatrixLayoutCreate\0" (*mut cublasLtMatrixLayout_t, cudaDataType, u64, u64, i64) -> Status;
    preference: b"cublasLtMatmulPreferenceCreate\0" (*mut cublasLtMatmulPreference_t) -> Status;
    prefer: b"cublasLtMatmulPreferenceSetAttribute\0"
        (cublasLtMatmulPreference_t, Preference, *const c_void, usize) -> Status;
    forget: b"cublasLtMatmulPreferenceDestroy\0" (cublasLtMatmulPreference_t) -> Status;
    heuristic: b"cublasLtMatmulAlgoGetHeuristic\0"
        (cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
         cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, c_int, *mut Heuristic, *mut c_int) -> Status;
    matmul: b"cublasLtMatmul\0"
        (cublasLtHandle_t, cublasLtMatmulDesc_t, *const c_void, *const c_void, cublasLtMatrixLayout_t, *const c_void,
         cublasLtMatrixLayout_t, *const c_void, *const c_void, cublasLtMatrixLayout_t, *mut c_void,
         cublasLtMatrixLayout_t, *const cublasLtMatmulAlgo_t, *mut c_void, usize, *mut c_void) -> Status;
}

/// An opened library, without a GPU.
pub struct CublasLt {
    functions: Functions,
    pub path: OsString,
    pub version: usize,
    _library: Library,
}

impl CublasLt {
    /// # Errors
    /// Why there is none.
    pub fn open() -> Result<Self, String> {
        CUBLASLT.open(|path| Self::at(path.as_ref()))
    }

    fn at(path: &Path) -> Result<Self, String> {
        // SAFETY: the initialisers of cuBLASLt ask nothing of the process that opens it.
        let library = unsafe { Library::new(path) }.map_err(|e| reason(&e))?;
        let functions = Functions::of(&library)?;
        // SAFETY: answers a number.
        let version = unsafe { (functions.version)() };
        Ok(Self { functions, path: path.as_os_str().to_owned(), version, _library: library })
    }

    /// `12.2.5`; before 12 the library counts otherwise.
    pub fn version_words(&self) -> String {
        match self.version {
            v @ 100_000.. => format!("{}.{}.{}", v / 10_000, v / 100 % 100, v % 100),
            v => format!("number {v}"),
        }
    }

    fn check(&self, call: &str, status: Status) -> Result<(), String> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the library answers any number with a string of its own.
        let words = unsafe { CStr::from_ptr((self.functions.words)(status)) };
        Err(format!("{call}: {}", words.to_string_lossy()))
    }
}

/// Which of a layer's three products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Form {
    /// y (m, n) = x (m, k) W (n, k)^T, with or without a bias (n).
    Forward { bias: bool },
    /// dx (m, k) = dy (m, n) W (n, k)
    Input,
    /// dW (n, k) += dy (m, n)^T x (m, k)
    Weight,
}

/// Everything that a choice of algorithm depends on; m, n, k as above, and values from row to row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    form: Form,
    mnk: [usize; 3],
    /// Of the first factor, the second factor and the result, as the library takes them.
    strides: [usize; 3],
    /// Whether the result is f32, not bf16.
    is_f32: bool,
    adds: bool,
}

/// What the library keeps for a shape.
#[derive(Clone, Copy)]
struct Plan {
    product: cublasLtMatmulDesc_t,
    a: cublasLtMatrixLayout_t,
    b: cublasLtMatrixLayout_t,
    d: cublasLtMatrixLayout_t,
    algorithm: cublasLtMatmulAlgo_t,
    workspace: usize,
}

/// The library with the GPU of this process.
struct Products {
    library: CublasLt,
    handle: cublasLtHandle_t,
    workspace: Memory,
    plans: Mutex<HashMap<Shape, Plan>>,
}

// SAFETY: a handle of cuBLASLt may be used from every thread; plans are used under their lock.
unsafe impl Send for Products {}
// SAFETY: as above.
unsafe impl Sync for Products {}

fn products() -> Result<&'static Products, &'static str> {
    static PRODUCTS: OnceLock<Result<Products, String>> = OnceLock::new();
    PRODUCTS.get_or_init(Products::new).as_ref().map_err(String::as_str)
}

/// Whether there is a cuBLASLt for the GPU of this process.
///
/// # Errors
/// Why there is none.
pub fn available() -> Result<(), &'static str> {
    products().map(|_| ())
}

/// Rows of a matrix, and the values from one row to the next.
pub type Rows<'a> = (View<'a>, usize);
pub type RowsMut<'a, 'b> = (&'a mut ViewMut<'b>, usize);

/// y (m, n) = x (m, k) W (n, k)^T + bias (n); x, W and bias bf16, y bf16 or f32.
///
/// # Panics
/// If something is of another size or dtype, or there is no cuBLASLt.
pub fn forward(x: Rows, w: Rows, bias: Option<View>, y: RowsMut, mnk: [usize; 3]) {
    let form = Form::Forward { bias: bias.is_some() };
    run(form, [(w, mnk[1], mnk[2]), (x, mnk[0], mnk[2])], bias, (y, mnk[0], mnk[1]), mnk, false);
}

/// dx (m, k) = dy (m, n) W (n, k), or += where it `adds`; dy and W bf16, dx bf16 or f32.
///
/// # Panics
/// As `forward`.
pub fn backward_input(dy: Rows, w: Rows, dx: RowsMut, mnk: [usize; 3], adds: bool) {
    run(Form::Input, [(w, mnk[1], mnk[2]), (dy, mnk[0], mnk[1])], None, (dx, mnk[0], mnk[2]), mnk, adds);
}

/// dW (n, k) += dy (m, n)^T x (m, k); x and dy bf16, dW f32.
///
/// # Panics
/// As `forward`.
pub fn backward_weight(x: Rows, dy: Rows, dw: RowsMut, mnk: [usize; 3]) {
    run(Form::Weight, [(x, mnk[0], mnk[2]), (dy, mnk[0], mnk[1])], None, (dw, mnk[1], mnk[2]), mnk, true);
}

/// A matrix with its rows and its width.
type Laid<M> = (M, usize, usize);

fn run(
    form: Form,
    [(a, a_rows, a_width), (b, b_rows, b_width)]: [Laid<Rows>; 2],
    bias: Option<View>,
    (d, d_rows, d_width): Laid<RowsMut>,
    mnk: [usize; 3],
    adds: bool,
) {
    let fits = |len: usize, stride: usize, rows: usize, width: usize| {
        width <= stride && (rows == 0 || (rows - 1) * stride + width <= len)
    };
    let all = fits(a.0.len(), a.1, a_rows, a_width)
        && fits(b.0.len(), b.1, b_rows, b_width)
        && fits(d.0.len(), d.1, d_rows, d_width);
    let [m, n, k] = mnk;
    let bias_fits = bias.is_none_or(|bias| bias.len() == n);
    assert!(all && bias_fits, "cublaslt {form:?}, m {m}, n {n}, k {k}: a matrix has another size");
    if d_rows == 0 || d_width == 0 || (adds && (a_rows == 0 || b_rows == 0)) {
        return;
    }
    let out = d.0.dtype();
    let shape = Shape { form, mnk, strides: [a.1, b.1, d.1], is_f32: out == DType::F32, adds };
    let addresses = [a.0.arg(DType::Bf16), b.0.arg(DType::Bf16), d.0.arg(out)].map(address);
    let bias = bias.map(|bias| address(bias.arg(DType::Bf16)));
    let products = products().unwrap_or_else(|why| panic!("cublaslt: {why}"));
    products.start(shape, addresses, bias).unwrap_or_else(|why| panic!("{shape:?}: {why}"));
}

fn address(arg: Arg) -> *mut c_void {
    arg.word() as *mut c_void
}

fn data_type(dtype: DType) -> cudaDataType {
    match dtype {
        DType::Bf16 => cudaDataType::CUDA_R_16BF,
        DType::F32 => cudaDataType::CUDA_R_32F,
    }
}

impl Products {
    fn new() -> Result<Self, String> {
        let library = CublasLt::open()?;
        let mut handle: cublasLtHandle_t = ptr::null_mut();
        // SAFETY: the GPU's context is this thread's; writes a handle.
        library.check("cublasLtCreate", unsafe { (library.functions.create)(&raw mut handle) })?;
        Ok(Self { library, handle, workspace: Memory::scratch(WORKSPACE), plans: Mutex::default() })
    }

    fn start(&self, shape: Shape, [a, b, d]: [*mut c_void; 3], bias: Option<*mut c_void>) -> Result<(), String> {
        let stream = gpu().stream(Stream::Compute).ok_or("a played GPU has no cuBLASLt")?;
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let plan = match plans.get(&shape) {
            Some(plan) => *plan,
            None => *plans.entry(shape).or_insert(self.plan(shape)?),
        };
        if let Some(bias) = bias {
            self.set(plan.product, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)?;
        }
        let (one, beta) = (1.0f32, if shape.adds { 1.0f32 } else { 0.0 });
        let (one, beta) = (ptr::from_ref(&one).cast(), ptr::from_ref(&beta).cast());
        let workspace = address(self.workspace.arg());
        // SAFETY: handles that live; matrices of the sizes that `run` checked; the workspace belongs to the compute stream.
        let status = unsafe {
            (self.library.functions.matmul)(
                self.handle,
                plan.product,
                one,
                a,
                plan.a,
                b,
                plan.b,
                beta,
                d,
                plan.d,
                d,
                plan.d,
                &raw const plan.algorithm,
                workspace,
                plan.workspace,
                stream,
            )
        };
        self.library.check("cublasLtMatmul", status)
    }

    fn set<T>(&self, product: cublasLtMatmulDesc_t, attribute: Attribute, value: &T) -> Result<(), String> {
        // SAFETY: a value of the attribute's type, of which the library copies as many bytes.
        let status =
            unsafe { (self.library.functions.set)(product, attribute, ptr::from_ref(value).cast(), size_of::<T>()) };
        self.library.check(&format!("{attribute:?}"), status)
    }

    fn plan(&self, shape: Shape) -> Result<Plan, String> {
        let [m, n, k] = shape.mnk;
        let mut product: cublasLtMatmulDesc_t = ptr::null_mut();
        let (sums, scale) = (cublasComputeType_t::CUBLAS_COMPUTE_32F, cudaDataType::CUDA_R_32F);
        // SAFETY: writes a handle.
        let status = unsafe { (self.library.functions.product)(&raw mut product, sums, scale) };
        self.library.check("cublasLtMatmulDescCreate", status)?;
        // 1: transposed. Columns and rows as the library counts them.
        let ([a, b, d], transposed) = match shape.form {
            Form::Forward { .. } => ([[k, n], [k, m], [n, m]], [1i32, 0]),
            Form::Input => ([[k, n], [n, m], [k, m]], [0, 0]),
            Form::Weight => ([[k, m], [n, m], [k, n]], [0, 1]),
        };
        self.set(product, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &transposed[0])?;
        self.set(product, Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &transposed[1])?;
        if shape.form == (Form::Forward { bias: true }) {
            self.set(product, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS)?;
            self.set(product, Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &cudaDataType::CUDA_R_16BF)?;
        }
        let [a_stride, b_stride, d_stride] = shape.strides;
        let a = self.layout(DType::Bf16, a, a_stride)?;
        let b = self.layout(DType::Bf16, b, b_stride)?;
        let d = self.layout(if shape.is_f32 { DType::F32 } else { DType::Bf16 }, d, d_stride)?;
        let (algorithm, workspace) = self.choose(product, [a, b, d])?;
        Ok(Plan { product, a, b, d, algorithm, workspace })
    }

    fn layout(
        &self,
        dtype: DType,
        [rows, columns]: [usize; 2],
        stride: usize,
    ) -> Result<cublasLtMatrixLayout_t, String> {
        let mut layout: cublasLtMatrixLayout_t = ptr::null_mut();
        let dtype = data_type(dtype);
        // SAFETY: writes a handle.
        let status = unsafe {
            (self.library.functions.layout)(&raw mut layout, dtype, rows as u64, columns as u64, stride as i64)
        };
        self.library.check("cublasLtMatrixLayoutCreate", status)?;
        Ok(layout)
    }

    /// The algorithm that the library expects to be the fastest.
    fn choose(
        &self,
        product: cublasLtMatmulDesc_t,
        [a, b, d]: [cublasLtMatrixLayout_t; 3],
    ) -> Result<(cublasLtMatmulAlgo_t, usize), String> {
        let f = &self.library.functions;
        let mut preference: cublasLtMatmulPreference_t = ptr::null_mut();
        // SAFETY: writes a handle.
        self.library.check("cublasLtMatmulPreferenceCreate", unsafe { (f.preference)(&raw mut preference) })?;
        let workspace = WORKSPACE as u64;
        let room: [(Preference, *const c_void, usize); 5] = [
            (Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, ptr::from_ref(&workspace).cast(), 8),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, ptr::from_ref(&ALIGN).cast(), 4),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, ptr::from_ref(&ALIGN).cast(), 4),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, ptr::from_ref(&ALIGN).cast(), 4),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, ptr::from_ref(&ALIGN).cast(), 4),
        ];
        for (attribute, value, bytes) in room {
            // SAFETY: a value of the attribute's type.
            let status = unsafe { (f.prefer)(preference, attribute, value, bytes) };
            self.library.check("cublasLtMatmulPreferenceSetAttribute", status)?;
        }
        let nothing = cublasLtMatmulAlgo_t { data: [0; 8] };
        let mut best = Heuristic { algorithm: nothing, workspace: 0, state: 0, waves: 0.0, reserved: [0; 4] };
        let mut found = 0;
        // SAFETY: handles that live; room for the one answer that is asked for.
        let status =
            unsafe { (f.heuristic)(self.handle, product, a, b, d, d, preference, 1, &raw mut best, &raw mut found) };
        // SAFETY: made above, destroyed once.
        self.library.check("cublasLtMatmulPreferenceDestroy", unsafe { (f.forget)(preference) })?;
        self.library.check("cublasLtMatmulAlgoGetHeuristic", status)?;
        self.library.check("the algorithm", best.state)?;
        if found == 0 {
            return Err("cuBLASLt has no algorithm".into());
        }
        Ok((best.algorithm, best.workspace))
    }
}
