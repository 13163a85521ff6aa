//! A frozen base in nf4 (arXiv:2305.14314). Each unit is dequantized as it is used, so all products are those with the
//! dequantized matrices.

use super::UnitValues;
use crate::device::Device;
use crate::device::cuda::{self, owned_by};
use crate::device::null::{self, Held as Counted};
use crate::model::params::{ParamSpec, ParamTable};
use crate::sys::lock::lock;
use crate::tensor::nf4::{BLOCK, Held, NESTED_BLOCK, Nf4};
use crate::tensor::{DType, SliceMut};
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// The owner of its memory.
const OWNER: &str = "weights of the frozen base";

/// The quantized units of a base: the layers. Embedding and head are not quantized.
pub(super) struct QuantizedUnits {
    /// By unit.
    pub units: Vec<Option<QuantizedUnit>>,
    /// The unit that was dequantized last.
    cache: Mutex<Option<(usize, Arc<UnitValues>)>>,
}

/// A unit in nf4.
pub struct QuantizedUnit {
    matrices: Vec<(Range<usize>, Matrix)>,
    /// Norms and biases.
    vectors: Vec<UnitValues>,
    bytes: usize,
    /// The memory of a unit in a plan, on the host or on the GPU.
    _planned: (Counted, Option<cuda::Memory>),
}

enum Matrix {
    Here(Nf4<'static>),
    OnGpu(cuda::nf4::Nf4),
}

/// Whether a parameter of a unit is quantized.
fn is_quantized(table: &ParamTable, unit: usize, spec: &ParamSpec) -> bool {
    table.is_quantized(unit) && spec.shape.len() == 2
}

impl ParamTable {
    /// Whether the matrices of a unit are quantized in a base in nf4: those of layers are.
    pub fn is_quantized(&self, unit: usize) -> bool {
        (1..self.units().len() - 1).contains(&unit)
    }
}

/// The bytes of a doubly quantized matrix.
fn bytes_of(spec: &ParamSpec) -> usize {
    let blocks = spec.elements().div_ceil(BLOCK);
    spec.elements().div_ceil(2) + blocks + size_of::<f32>() * blocks.div_ceil(NESTED_BLOCK)
}

impl QuantizedUnit {
    /// A unit of `table`. `matrix` returns this rank's part of a matrix, and `fill` fills a range of other values.
    ///
    /// # Errors
    /// The errors of both.
    pub fn build<E>(
        table: &Arc<ParamTable>,
        unit: usize,
        dtype: DType,
        mut matrix: impl FnMut(&ParamSpec) -> Result<Nf4<'static>, E>,
        mut fill: impl FnMut(UnitValues) -> Result<UnitValues, E>,
    ) -> Result<Self, E> {
        let mut built = Self::empty();
        for (id, range) in table.parts(&table.units()[unit]) {
            let spec = table.spec(id);
            if !is_quantized(table, unit, spec) {
                built.vectors.push(fill(UnitValues::part_scratch(table, range, dtype))?);
                continue;
            }
            let nf4 = matrix(spec)?;
            built.bytes += nf4.bytes();
            let held = if table.device() == Device::Cuda { Matrix::OnGpu(nf4.on_gpu()) } else { Matrix::Here(nf4) };
            built.matrices.push((range, held));
        }
        Ok(built)
    }

    /// A unit of a plan, which has no values.
    pub fn planned(table: &Arc<ParamTable>, unit: usize, dtype: DType) -> Self {
        let (quantized, others): (Vec<_>, Vec<_>) =
            table.parts(&table.units()[unit]).partition(|(id, _)| is_quantized(table, unit, table.spec(*id)));
        let bytes = quantized.iter().map(|(id, _)| bytes_of(table.spec(*id))).sum();
        let vectors = others.into_iter().map(|(_, range)| UnitValues::part_scratch(table, range, dtype)).collect();
        let on_gpu = (table.device() == Device::Cuda).then(|| owned_by(OWNER, || cuda::Memory::scratch(bytes)));
        Self { vectors, bytes, _planned: (null::hold(OWNER, bytes), on_gpu), ..Self::empty() }
    }

    fn empty() -> Self {
        Self { matrices: Vec::new(), vectors: Vec::new(), bytes: 0, _planned: (Counted::default(), None) }
    }

    pub fn bytes(&self) -> usize {
        self.bytes + self.vectors.iter().map(UnitValues::bytes).sum::<usize>()
    }

    fn dequantize(&self, to: &mut UnitValues) {
        null::note("dequantize", 0.0, (self.bytes + to.bytes()) as f64);
        self.vectors.iter().for_each(|values| to.copy_part(values));
        for (range, matrix) in &self.matrices {
            match (matrix, to.spec_part_mut(range)) {
                (Matrix::Here(nf4), (spec, values)) => {
                    let all_rows = 0..nf4.n;
                    let rows = std::slice::from_ref(&all_rows);
                    nf4.dequantize(&Held { rows, columns: 0..nf4.k }, spec.layout, 0, values);
                }
                (Matrix::OnGpu(nf4), (spec, SliceMut::Cuda(mut values))) => {
                    nf4.dequantize(0, values.reborrow().part(0..spec.elements()));
                    values.part(spec.elements()..spec.len).clear();
                }
                (Matrix::OnGpu(_), _) => unreachable!("a matrix of a GPU"),
            }
        }
        to.refresh();
    }
}

impl QuantizedUnits {
    pub fn new(units: Vec<Option<QuantizedUnit>>) -> Self {
        Self { units, cache: Mutex::default() }
    }

    /// The values of a quantized unit. They live as long as the result, and at least until the next request.
    pub fn values(&self, table: &Arc<ParamTable>, dtype: DType, index: usize) -> Option<Arc<UnitValues>> {
        let unit = self.units[index].as_ref()?;
        let mut cache = lock(&self.cache);
        if let Some((held, values)) = &*cache
            && *held == index
        {
            return Some(values.clone());
        }
        // Its memory serves the next one.
        *cache = None;
        let mut values = owned_by("gathered units", || UnitValues::scratch(table, index, dtype));
        unit.dequantize(&mut values);
        let values = Arc::new(values);
        *cache = Some((index, values.clone()));
        Some(values)
    }

    pub fn release(&self) {
        *lock(&self.cache) = None;
    }
}
