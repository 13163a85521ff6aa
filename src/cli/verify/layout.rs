//! A computation on several ranks: `--layout tensor=2`.

use super::computation::Computation;
use super::page::Check;
use super::replicas;
use crate::comm::{Axes, World};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::learn::Role;
use crate::mesh::Mesh;
use crate::metrics::Phases;
use crate::model::load::{self, ModelFiles};
use crate::model::{Head, TensorPart};
use crate::sys::memory;
use crate::tensor::DType;
use crate::train::sampling::rollout_weights::RolloutWeights;

/// The axes of a layout, and its ZeRO stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pub mesh: Mesh,
    pub zero: usize,
}

/// Reads `tensor=2,sequence=2`, or with data, expert and zero.
///
/// # Errors
/// `Usage`, naming the axis.
pub fn parse(text: &str) -> Result<Layout> {
    let mut layout = Layout { mesh: Mesh::data_only(1), zero: 0 };
    for entry in text.split(',') {
        let wrong = || {
            Error::usage(format!("--layout must be like tensor=2 or data=2,sequence=2,zero=3 (got {entry:?})"))
                .hint("the axes are data, sequence, tensor and expert; zero is the ZeRO stage, 0 to 3")
        };
        let (name, value) = entry.trim().split_once('=').ok_or_else(wrong)?;
        let value: usize = value.parse().map_err(|_| wrong())?;
        let Mesh { data, sequence, tensor, expert, .. } = &mut layout.mesh;
        match name {
            "zero" if value <= 3 => layout.zero = value,
            "data" if value > 0 => *data = value,
            "sequence" if value > 0 => *sequence = value,
            "tensor" if value > 0 => *tensor = value,
            "expert" if value > 0 => *expert = value,
            _ => return Err(wrong()),
        }
    }
    layout.mesh.check_expert()?;
    Ok(layout)
}

impl Layout {
    /// Rejects another number of ranks than the layout has, with the line to run.
    pub fn check_ranks(&self, ranks: usize, model: &str, text: &str) -> Result<()> {
        let needed = self.mesh.ranks();
        Error::need(ranks == needed, format!("--layout {text} needs {needed} ranks (got {ranks})"))
            .map_err(|error| error.hint(format!("run `mpirun -n {needed} rlhf-hpc verify {model} --layout {text}`")))
    }

    /// The computation on all ranks of `world`, and whether they hold the values of the files. All ranks call this.
    ///
    /// # Errors
    /// The errors of loading and of sampling, the same on all ranks.
    pub fn compute(
        &self,
        files: &ModelFiles,
        dtype: DType,
        world: &World,
        name: &str,
        (ids, new): (&[u32], usize),
    ) -> Result<(Computation, Check)> {
        let all = world.group();
        let axes = Axes::split_mesh(&all, &self.mesh);
        let role = Role::load(Device::Cpu, "actor", files, None, dtype, 0, &axes, self.zero);
        let role = all.agree(role)?;
        let mut found = Computation::forward(name, (&role.transformer, &role.weights), &axes, ids);
        if files.head == Head::LanguageModel {
            let rollout = Axes::split_mesh(
                &all,
                &Mesh { tensor: self.mesh.tensor, ..Mesh::data_only(all.size() / self.mesh.tensor) },
            );
            let weights = all.agree(RolloutWeights::new(&role, &axes, &rollout))?;
            let gathered = weights.gather(&role, &mut Phases::start());
            let memory = memory::available_bytes() / world.local_size.max(1) as u64 / 2;
            all.agree(found.sample(gathered.model(), new, memory))?;
        }
        let part = TensorPart::from_group(&axes.tensor);
        let source = load::open(Device::Cpu, files.dir, files.arch, files.head, 0, part);
        let mine = source.and_then(|source| replicas::unlike_files(&role.weights, &source));
        let wrong = replicas::by_rank(world, all.agree(mine)?)?;
        let check = Check::of_faults("memory", &wrong, || format!("{} ranks hold the values of the files", all.size()));
        Ok((found, check))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layout_names_its_axes_and_the_line_to_run() {
        let layout = parse("tensor=2,sequence=2,zero=3").unwrap();
        assert_eq!((layout.mesh.ranks(), layout.mesh.tensor, layout.mesh.sequence, layout.zero), (4, 2, 2, 3));
        let error = layout.check_ranks(1, "models/a", "tensor=2,sequence=2,zero=3").unwrap_err();
        assert_eq!(error.message, "--layout tensor=2,sequence=2,zero=3 needs 4 ranks (got 1)");
        let hint = "run `mpirun -n 4 rlhf-hpc verify models/a --layout tensor=2,sequence=2,zero=3`";
        assert_eq!(error.hint.as_deref(), Some(hint));
        for wrong in ["tensor", "tensor=0", "tensor=two", "heads=2", "zero=4", ""] {
            assert!(parse(wrong).unwrap_err().message.contains(&format!("got {wrong:?}")), "{wrong}");
        }
        assert!(parse("expert=2").unwrap_err().message.contains("mesh.expert = 2 does not divide"));
    }
}
