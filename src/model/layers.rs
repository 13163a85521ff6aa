//! The layers of a model. Each declares its parameters, in the order of the table.

use super::arch::{Arch, Head};
use super::block::Block;
use super::layer_units::LayerUnits;
use super::names::EMBEDDING;
use super::norm::Norm;
use super::params::{Init, ParamId, ParamTable};
use super::part::{Cut, TensorPart};
use super::tower::Tower;
use crate::device::Device;
use crate::tensor::Layout;
use std::collections::BTreeSet;
use std::sync::Arc;

#[derive(Clone, Debug)]
pub(super) struct Layers {
    /// The vision tower, if it is in the table.
    pub tower: Option<Tower>,
    pub embedding: ParamId,
    pub blocks: Vec<Block>,
    /// The unit of each block, and of the last norm with the head.
    pub units: Vec<usize>,
    /// The norm after the last block.
    pub norm: Norm,
    /// The language-model head (the embedding if tied), or the value head's vector.
    pub head: ParamId,
}

impl Layers {
    /// Declares a vision tower, embedding, layers, final norm and head. Each layer is a unit, with units of its experts after it, and
    /// so are the embedding before all layers, and the norm with the head after them.
    pub(super) fn declare(table: &mut ParamTable, arch: &Arch) -> Self {
        let tower = arch.sight.as_ref().filter(|sight| sight.trains).map(|sight| Tower::declare(table, &sight.spec));
        table.end_tower();
        let (head, normal) = (table.head(), table.normal());
        let matrix = [Cut::Vocabulary(arch.vocabulary), Cut::Whole(arch.width)];
        // A matrix that is only looked up lies row by row; one that is also multiplied lies in panels.
        let is_multiplied = arch.tied && head == Head::LanguageModel;
        let layout = if is_multiplied { Layout::Panel } else { Layout::Row };
        let embedding = table.add(EMBEDDING, &matrix, layout, normal);
        table.end_unit();
        let mut units = Vec::new();
        let block = |(layer, spec)| {
            units.push(table.units().len());
            let mut block = Block::declare(table, arch, layer, spec);
            table.end_unit();
            block.declare_experts(table, arch, layer);
            block
        };
        let blocks = arch.blocks.iter().enumerate().map(block).collect();
        units.push(table.units().len());
        let norm = Norm::declare(table, "model.norm", arch.width, arch.norm);
        let head = match head {
            Head::LanguageModel if arch.tied => embedding,
            Head::LanguageModel => table.add(&arch.head_name(head), &matrix, Layout::Panel, normal),
            Head::Value => {
                let init = Init::Normal { std: 1.0 / (arch.width as f32 + 1.0) };
                table.add(&arch.head_name(head), &[Cut::Whole(1), matrix[1]], Layout::Row, init)
            }
        };
        table.end_unit();
        table.set_layers(LayerUnits::new(arch, table.head(), &units));
        Self { tower, embedding, blocks, units, norm, head }
    }
}

impl ParamTable {
    /// The whole model on one rank.
    pub fn new(arch: &Arch, head: Head) -> Self {
        Self::on(Device::Cpu, arch, head, TensorPart::whole())
    }

    /// The part of a rank of the tensor axis, laid out for a device.
    ///
    /// # Panics
    /// If the architecture cannot be split into this many parts (`Arch::check_tensor`).
    pub fn on(device: Device, arch: &Arch, head: Head, part: TensorPart) -> Self {
        Self::with_layers(device, arch, head, part, None).0
    }

    /// The same, and the layers that declared it. `base` is the table of its frozen parameters.
    pub(super) fn with_layers(
        device: Device,
        arch: &Arch,
        head: Head,
        part: TensorPart,
        base: Option<&Arc<Self>>,
    ) -> (Self, Layers) {
        if let Err(error) = arch.check_tensor(part.size) {
            panic!("{error}");
        }
        let mut table = Self::empty(device, head, part, arch.init_std).tuned(arch.tuning.as_ref(), base);
        let layers = Layers::declare(&mut table, arch);
        (table, layers)
    }

    /// The table of a frozen base, of which the parameters `kept` are used.
    pub fn of_base(device: Device, arch: &Arch, head: Head, part: TensorPart, kept: &BTreeSet<String>) -> Self {
        let mut table = Self::empty(device, head, part, arch.init_std).keeping(kept);
        Layers::declare(&mut table, arch);
        table
    }

    /// The same table for another part of the model.
    #[must_use]
    pub fn for_part(&self, arch: &Arch, part: TensorPart) -> Self {
        let (device, head) = (self.device(), self.head());
        self.kept()
            .map_or_else(|| Self::on(device, arch, head, part), |kept| Self::of_base(device, arch, head, part, kept))
    }

    /// The same table for a model on the base `base`.
    #[must_use]
    pub fn on_base(&self, arch: &Arch, base: &Arc<Self>) -> Self {
        Self::with_layers(self.device(), arch, self.head(), self.tensor_part(), Some(base)).0
    }
}
