//! The parameters of a unit while layers use it.

use super::UnitValues;
use super::quantized::{QuantizedUnit, QuantizedUnits};
use crate::model::params::{ParamId, ParamTable};
use crate::tensor::{DType, Operand, Slice, Weight};
use std::cell::OnceCell;
use std::sync::Arc;

/// The parameters of one unit of a model, for layers.
pub struct Unit<'a> {
    pub(super) own: Held<'a>,
    pub(super) base: Option<Held<'a>>,
}

pub enum Held<'a> {
    Here(&'a UnitValues),
    Gathered(Arc<UnitValues>),
    Quantized(InUse<'a>),
}

impl Held<'_> {
    pub fn values(&self) -> &UnitValues {
        match self {
            Held::Here(values) => values,
            Held::Gathered(values) => values,
            Held::Quantized(unit) => unit.values(),
        }
    }
}

impl Unit<'_> {
    /// The unit of a parameter, and its id there.
    fn held(&self, id: ParamId) -> (&Held<'_>, ParamId) {
        let held = if id.is_frozen { self.base.as_ref().expect("frozen parameters have a base") } else { &self.own };
        (held, ParamId::own(id.index))
    }

    /// A matrix. Row-layout matrices are f32 with either dtype.
    pub fn weight(&self, id: ParamId) -> Weight<'_> {
        let (held, id) = self.held(id);
        held.values().weight(id)
    }

    /// A matrix that `rows` rows are multiplied by.
    pub fn operand(&self, id: ParamId, rows: usize) -> Operand<'_> {
        match self.held(id) {
            (Held::Quantized(unit), id) => unit.operand(id, rows),
            (held, id) => held.values().weight(id).into(),
        }
    }

    /// A norm, a bias or a value head: its elements, padding excluded.
    pub fn vector(&self, id: ParamId) -> Slice<'_> {
        match self.held(id) {
            (Held::Quantized(unit), id) => unit.vector(id),
            (held, id) => held.values().vector(id),
        }
    }

    pub fn dtype(&self) -> DType {
        self.own.values().dtype()
    }
}

/// A quantized unit in use. It is dequantized if values of its matrices are needed.
pub struct InUse<'a> {
    pub units: &'a QuantizedUnits,
    pub table: &'a Arc<ParamTable>,
    pub dtype: DType,
    pub index: usize,
    pub unit: Arc<QuantizedUnit>,
    pub values: OnceCell<Arc<UnitValues>>,
}

impl InUse<'_> {
    pub fn values(&self) -> &UnitValues {
        self.values.get_or_init(|| self.units.values(self.table, self.dtype, (self.index, &self.unit)))
    }

    /// A matrix for a product with `rows` rows.
    pub fn operand(&self, id: ParamId, rows: usize) -> Operand<'_> {
        let codes = self.unit.codes(self.table.spec(id), rows);
        codes.map_or_else(|| self.values().weight(id).into(), Operand::Nf4)
    }

    pub fn vector(&self, id: ParamId) -> Slice<'_> {
        let range = self.table.spec(id).range();
        let values = self.unit.vectors.iter().find(|values| values.range() == range);
        values.expect("a vector of this unit").vector(id)
    }
}
