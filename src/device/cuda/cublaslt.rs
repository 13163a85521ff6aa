//! cuBLASLt, opened at run time: the functions that `fast` needs, and descriptions of its statuses.

use super::devices;
use super::library::{CUBLASLT, functions};
use super::nvrtc::reason;
use super::sys::Handle;
use crate::dtype::DType;
use cudarc::cublaslt::sys::{
    cublasComputeType_t, cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t,
    cublasLtMatmulDescAttributes_t as Attribute, cublasLtMatmulPreference_t,
    cublasLtMatmulPreferenceAttributes_t as Preference, cublasLtMatrixLayout_t,
    cublasLtMatrixLayoutAttribute_t as LayoutAttribute, cublasLtReductionScheme_t as Reduction, cudaDataType,
};
use libloading::Library;
use std::ffi::{CStr, OsString, c_char, c_int, c_void};
use std::fmt;
use std::path::Path;
use std::ptr;

type Status = c_int;
pub type Outcome<T> = std::result::Result<T, String>;

/// The oldest supported release, of CUDA 11.4: the first that describes its statuses.
const OLDEST: usize = 11_601;

/// An algorithm for a GEMM and its bytes of workspace: a cublasLtMatmulHeuristicResult_t whose status may have any
/// value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Algorithm {
    how: cublasLtMatmulAlgo_t,
    pub workspace: usize,
    state: Status,
    waves: f32,
    reserved: [c_int; 4],
}

impl Algorithm {
    fn none() -> Self {
        let how = cublasLtMatmulAlgo_t { data: [0; 8] };
        Self { how, workspace: 0, state: 0, waves: 0.0, reserved: [0; 4] }
    }
}

functions! {
    name: b"cublasLtGetStatusName\0" (Status) -> *const c_char;
    words: b"cublasLtGetStatusString\0" (Status) -> *const c_char;
    create: b"cublasLtCreate\0" (*mut cublasLtHandle_t) -> Status;
    product: b"cublasLtMatmulDescCreate\0" (*mut cublasLtMatmulDesc_t, cublasComputeType_t, cudaDataType) -> Status;
    set: b"cublasLtMatmulDescSetAttribute\0" (cublasLtMatmulDesc_t, Attribute, *const c_void, usize) -> Status;
    layout: b"cublasLtMatrixLayoutCreate\0" (*mut cublasLtMatrixLayout_t, cudaDataType, u64, u64, i64) -> Status;
    set_layout: b"cublasLtMatrixLayoutSetAttribute\0"
        (cublasLtMatrixLayout_t, LayoutAttribute, *const c_void, usize) -> Status;
    preference: b"cublasLtMatmulPreferenceCreate\0" (*mut cublasLtMatmulPreference_t) -> Status;
    prefer: b"cublasLtMatmulPreferenceSetAttribute\0"
        (cublasLtMatmulPreference_t, Preference, *const c_void, usize) -> Status;
    forget: b"cublasLtMatmulPreferenceDestroy\0" (cublasLtMatmulPreference_t) -> Status;
    heuristic: b"cublasLtMatmulAlgoGetHeuristic\0"
        (cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
         cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, c_int, *mut Algorithm, *mut c_int) -> Status;
    suits: b"cublasLtMatmulAlgoCheck\0"
        (cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
         cublasLtMatrixLayout_t, *const cublasLtMatmulAlgo_t, *mut Algorithm) -> Status;
    matmul: b"cublasLtMatmul\0"
        (cublasLtHandle_t, cublasLtMatmulDesc_t, *const c_void, *const c_void, cublasLtMatrixLayout_t, *const c_void,
         cublasLtMatrixLayout_t, *const c_void, *const c_void, cublasLtMatrixLayout_t, *mut c_void,
         cublasLtMatrixLayout_t, *const cublasLtMatmulAlgo_t, *mut c_void, usize, *mut c_void) -> Status;
}

/// An opened library.
pub struct CublasLt {
    functions: Functions,
    pub path: OsString,
    pub version: usize,
    _library: Library,
}

/// The description of a GEMM D = A B + C: transpositions, epilogue, and the matrices A, B and D. C has the layout of D.
#[derive(Clone, Copy)]
pub(super) struct Product {
    how: cublasLtMatmulDesc_t,
    matrices: [cublasLtMatrixLayout_t; 3],
}

// SAFETY: the library's handles may be used from every thread; descriptors are only changed under a lock.
unsafe impl Send for Product {}

/// A matrix in the library's order: column-major, `stride` values from column to column.
#[derive(Clone, Copy, Debug)]
pub(super) struct ColumnMajor {
    pub dtype: DType,
    pub rows: usize,
    pub columns: usize,
    pub stride: usize,
}

fn data_type(dtype: DType) -> cudaDataType {
    match dtype {
        DType::Bf16 => cudaDataType::CUDA_R_16BF,
        DType::F32 => cudaDataType::CUDA_R_32F,
    }
}

fn pointer(address: u64) -> *mut c_void {
    address as *mut c_void
}

impl CublasLt {
    /// Opens the first library that is not newer than the driver's CUDA, if a driver was opened: others need a newer
    /// driver.
    ///
    /// # Errors
    /// The reason why there is none: the names that were looked for, or the defect of each file that was found.
    pub fn open() -> Outcome<Self> {
        let driver = devices::newest_cuda();
        CUBLASLT.open(|path| {
            let found = Self::at(path.as_ref())?;
            match driver {
                Some((major, minor)) if found.major() > major as usize => {
                    let version = found.version_name();
                    Err(format!(
                        "cuBLASLt must not be newer than the driver (found {version}, driver for CUDA {major}.{minor})"
                    ))
                }
                _ => Ok(found),
            }
        })
    }

    /// # Errors
    /// The reason why the file cannot be used.
    pub fn at(path: &Path) -> Outcome<Self> {
        // SAFETY: the initialisers of cuBLASLt ask nothing of the process that opens it.
        let library = unsafe { Library::new(path) }.map_err(|e| reason(&e))?;
        // SAFETY: in all releases it takes nothing and answers a number.
        let version = unsafe {
            let version = library.get::<unsafe extern "C" fn() -> usize>(b"cublasLtGetVersion\0");
            version.map_err(|e| reason(&e))?()
        };
        if version < OLDEST {
            let [found, needed] = [version, OLDEST].map(version_name);
            return Err(format!("cuBLASLt must be {needed} or newer (found {found})"));
        }
        let functions = Functions::load(&library)?;
        Ok(Self { functions, path: path.as_os_str().to_owned(), version, _library: library })
    }

    /// The major version, which is also that of CUDA.
    fn major(&self) -> usize {
        if self.version < 100_000 { self.version / 1000 } else { self.version / 10_000 }
    }

    /// The version as text: `12.2.5`.
    pub fn version_name(&self) -> String {
        version_name(self.version)
    }

    /// Describes the library: `cuBLASLt 12.2.5 (libcublasLt.so.12)`.
    pub fn describe(&self) -> String {
        format!("cuBLASLt {} ({})", self.version_name(), self.path.display())
    }

    fn check(&self, call: impl fmt::Display, status: Status) -> Outcome<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the library answers any number with strings of its own.
        let [name, words] = unsafe {
            let [name, words] = [(self.functions.name)(status), (self.functions.words)(status)];
            [name, words].map(|text| CStr::from_ptr(text).to_string_lossy())
        };
        Err(format!("{call}: {name}, {words}"))
    }

    /// Creates a handle for the GPU whose context this thread has.
    pub(super) fn handle(&self) -> Outcome<Handle<cublasLtHandle_t>> {
        let mut handle: cublasLtHandle_t = ptr::null_mut();
        // SAFETY: writes a handle.
        self.check("cublasLtCreate", unsafe { (self.functions.create)(&raw mut handle) })?;
        Ok(Handle(handle))
    }

    /// D = op(A) op(B), sums in f32; 1: transposed. If it is `biased`, values of D's dtype are added to each column of
    /// D.
    pub(super) fn product(&self, transposed: [i32; 2], of: [ColumnMajor; 3], biased: bool) -> Outcome<Product> {
        use cudarc::cublaslt::sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
        let mut how: cublasLtMatmulDesc_t = ptr::null_mut();
        let (sums, scale) = (cublasComputeType_t::CUBLAS_COMPUTE_32F, cudaDataType::CUDA_R_32F);
        // SAFETY: writes a handle.
        let status = unsafe { (self.functions.product)(&raw mut how, sums, scale) };
        self.check("cublasLtMatmulDescCreate", status)?;
        let [a, b, d] = of.map(|matrix| self.layout(matrix));
        let product = Product { how, matrices: [a?, b?, d?] };
        self.set(&product, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &transposed[0])?;
        self.set(&product, Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &transposed[1])?;
        if biased {
            self.set(&product, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &CUBLASLT_EPILOGUE_BIAS)?;
        }
        Ok(product)
    }

    /// Sets the address of the bias.
    pub(super) fn set_bias(&self, product: &Product, address: u64) -> Outcome<()> {
        self.set(product, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &pointer(address))
    }

    fn set<T>(&self, product: &Product, attribute: Attribute, value: &T) -> Outcome<()> {
        // SAFETY: a value of the attribute's type, of which the library copies as many bytes.
        let status =
            unsafe { (self.functions.set)(product.how, attribute, ptr::from_ref(value).cast(), size_of::<T>()) };
        self.check(format_args!("cublasLtMatmulDescSetAttribute, {attribute:?}"), status)
    }

    fn layout(&self, of: ColumnMajor) -> Outcome<cublasLtMatrixLayout_t> {
        let mut layout: cublasLtMatrixLayout_t = ptr::null_mut();
        let (rows, columns) = (of.rows as u64, of.columns as u64);
        // SAFETY: writes a handle.
        let status =
            unsafe { (self.functions.layout)(&raw mut layout, data_type(of.dtype), rows, columns, of.stride as i64) };
        self.check("cublasLtMatrixLayoutCreate", status)?;
        Ok(layout)
    }

    /// Gives one of the matrices another number of columns.
    pub(super) fn set_columns(&self, product: &Product, matrix: usize, columns: usize) -> Outcome<()> {
        let layout = product.matrices[matrix];
        let (attribute, columns) = (LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_COLS, columns as u64);
        // SAFETY: a handle that lives, and a value of the attribute's type.
        let status = unsafe { (self.functions.set_layout)(layout, attribute, ptr::from_ref(&columns).cast(), 8) };
        self.check("cublasLtMatrixLayoutSetAttribute", status)
    }

    /// The algorithm that the library expects to be the fastest among the ones with at most `workspace` bytes and
    /// partial sums in f32. `aligns`: the alignment in bytes of the addresses of A, B, C and D.
    pub(super) fn choose(
        &self,
        handle: Handle<cublasLtHandle_t>,
        product: &Product,
        aligns: [u32; 4],
        workspace: usize,
    ) -> Outcome<Algorithm> {
        let f = &self.functions;
        let mut preference: cublasLtMatmulPreference_t = ptr::null_mut();
        // SAFETY: writes a handle.
        self.check("cublasLtMatmulPreferenceCreate", unsafe { (f.preference)(&raw mut preference) })?;
        let (workspace, [a, b, c, d]) = (workspace as u64, &aligns);
        let sums = Reduction::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        let wanted: [(Preference, *const c_void, usize); 6] = [
            (Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, ptr::from_ref(&workspace).cast(), 8),
            (Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, ptr::from_ref(&sums).cast(), 4),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, ptr::from_ref(a).cast(), 4),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, ptr::from_ref(b).cast(), 4),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, ptr::from_ref(c).cast(), 4),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, ptr::from_ref(d).cast(), 4),
        ];
        let set = wanted.into_iter().try_for_each(|(attribute, value, bytes)| {
            // SAFETY: a value of the attribute's type.
            let status = unsafe { (f.prefer)(preference, attribute, value, bytes) };
            self.check(format_args!("cublasLtMatmulPreferenceSetAttribute, {attribute:?}"), status)
        });
        let (mut best, mut found) = (Algorithm::none(), 0);
        // SAFETY: handles that live; room for the one answer that is asked for.
        let status = unsafe {
            let Product { how, matrices: [a, b, d] } = *product;
            (f.heuristic)(handle.0, how, a, b, d, d, preference, 1, &raw mut best, &raw mut found)
        };
        // SAFETY: made above, destroyed once.
        let forgotten = unsafe { (f.forget)(preference) };
        set?;
        self.check("cublasLtMatmulAlgoGetHeuristic", status)?;
        self.check("cublasLtMatmulPreferenceDestroy", forgotten)?;
        if found == 0 {
            return Err("cublasLtMatmulAlgoGetHeuristic: no algorithm found".into());
        }
        self.check("cublasLtMatmulAlgoGetHeuristic, first result", best.state)?;
        Ok(best)
    }

    /// The same algorithm for a GEMM whose number of columns has changed; `None` if it does not support that number.
    pub(super) fn again(
        &self,
        handle: Handle<cublasLtHandle_t>,
        product: &Product,
        algorithm: &Algorithm,
    ) -> Option<Algorithm> {
        let mut found = Algorithm::none();
        let Product { how, matrices: [a, b, d] } = *product;
        // SAFETY: handles that live; room for the answer.
        let status =
            unsafe { (self.functions.suits)(handle.0, how, a, b, d, d, &raw const algorithm.how, &raw mut found) };
        (status == 0 && found.state == 0).then_some(Algorithm { workspace: found.workspace, ..*algorithm })
    }

    /// Starts D = A B, plus C if it `adds`, on a stream of the handle's GPU.
    pub(super) fn start(
        &self,
        handle: Handle<cublasLtHandle_t>,
        of: &Product,
        [a, b, c, d]: [u64; 4],
        adds: bool,
        algorithm: &Algorithm,
        workspace: u64,
        stream: *mut c_void,
    ) -> Outcome<()> {
        let Product { how, matrices: [a_layout, b_layout, d_layout] } = *of;
        let (one, beta) = (1.0f32, if adds { 1.0f32 } else { 0.0 });
        let (one, beta) = (ptr::from_ref(&one).cast(), ptr::from_ref(&beta).cast());
        // SAFETY: handles that live; the caller holds matrices of the described sizes, and a workspace of the stream
        // with as many bytes.
        let status = unsafe {
            (self.functions.matmul)(
                handle.0,
                how,
                one,
                pointer(a),
                a_layout,
                pointer(b),
                b_layout,
                beta,
                pointer(c),
                d_layout,
                pointer(d),
                d_layout,
                &raw const algorithm.how,
                pointer(workspace),
                algorithm.workspace,
                stream,
            )
        };
        self.check("cublasLtMatmul", status)
    }
}

/// Formats a version: `12.2.5`. Releases before 11.10 count in steps of 1000 and 100.
fn version_name(version: usize) -> String {
    match version {
        v @ 100_000.. => format!("{}.{}.{}", v / 10_000, v / 100 % 100, v % 100),
        v @ 11_000.. => format!("11.{}.{}", (v - 11_000) / 100, v % 100),
        v => format!("{}.{}.{}", v / 1000, v / 100 % 10, v % 100),
    }
}

#[cfg(test)]
mod tests {
    use super::version_name;

    #[test]
    fn version_numbers_of_every_release_are_parsed() {
        let names = [131_000, 120_205, 111_103, 11_601, 10_202].map(version_name);
        assert_eq!(names, ["13.10.0", "12.2.5", "11.11.3", "11.6.1", "10.2.2"]);
    }
}
