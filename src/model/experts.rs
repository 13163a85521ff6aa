//! A mixture of experts: y = sum over the chosen experts e of g_e Wdown_e (act(Wgate_e n) * Wup_e n). The ranks of the
//! tensor axis share the inner width of each expert; the router is whole on each rank.

use super::arch::Arch;
use super::block_spec::ExpertsSpec;
use super::branch::Body;
use super::context::{Context, LayerKeys};
use super::expert_files::ExpertFiles;
use super::names::ROUTER;
use super::params::{ParamId, ParamTable};
use super::part::Cut;
use super::weights::{Gradients, Unit};
use crate::ops::attention::Packed;
use crate::ops::experts::{Addend, Routing};
use crate::ops::glu;
use crate::ops::matmul::{self, Into};
use crate::tensor::{Layout, Tensor, Weight};

#[derive(Clone, Debug)]
pub(super) struct Experts {
    router: ParamId,
    /// One matrix for each expert.
    gate: Vec<ParamId>,
    up: Vec<ParamId>,
    down: Vec<ParamId>,
    spec: ExpertsSpec,
}

/// The activations that the backward needs.
#[derive(Debug)]
pub(super) struct ExpertsSaved {
    /// The branch's input (t, d)
    n: Tensor,
    routing: Routing,
    /// The results of the rows of experts (s, f)
    gate: Tensor,
    up: Tensor,
    /// act(gate) * up (s, f)
    act: Tensor,
}

impl ExpertsSaved {
    /// The results with a row for each token, in the order in which they were computed.
    pub(super) fn results(&self) -> Vec<(&'static str, &Tensor)> {
        vec![("the MLP's norm", &self.n), ("the router", &self.routing.probabilities)]
    }
}

impl Experts {
    /// Declares the router, all gates and ups by expert, and all downs, of layer `layer`.
    pub(super) fn declare(table: &mut ParamTable, layer: usize, arch: &Arch, spec: &ExpertsSpec) -> Self {
        let name = format!("model.layers.{layer}.mlp");
        let (hidden, inner, normal) = (Cut::Whole(arch.width), Cut::Even(spec.width), table.normal());
        let files = ExpertFiles { layer, form: arch.expert_form(), spec, width: arch.width };
        let dims = [Cut::Whole(spec.count), hidden];
        let router =
            table.add_in(files.router(), &format!("model.layers.{layer}{ROUTER}"), &dims, Layout::Panel, normal);
        let mut expert = |e: usize, part: &str, dims: [Cut; 2]| {
            let own = format!("{name}.experts.{e}.{part}_proj.weight");
            table.add_in(files.expert(e, part), &own, &dims, Layout::Panel, normal)
        };
        let first = |e| [expert(e, "gate", [inner, hidden]), expert(e, "up", [inner, hidden])];
        let (gate, up) = (0..spec.count).map(first).map(|[gate, up]| (gate, up)).unzip();
        let down = (0..spec.count).map(|e| expert(e, "down", [hidden, inner])).collect();
        Self { router, gate, up, down, spec: *spec }
    }

    /// Chooses the experts of each row of n.
    fn route(&self, c: Context, n: &Tensor) -> Routing {
        let mut logits = n.like(n.rows(), self.spec.count);
        matmul::forward(n, c.w.operand(self.router, n.rows()), None, &mut logits, Into::Overwrite);
        let routing = Routing::new(logits, self.spec.top_k, self.spec.renormalizes);
        c.routers.note(&routing);
        routing
    }

    /// The experts of each row of n, and the rows of gate, up and act.
    fn activations(&self, c: Context, n: &Tensor) -> (Routing, [Tensor; 3]) {
        let routing = self.route(c, n);
        let [gate, up] = [&self.gate, &self.up].map(|ids| weights(c.w, ids));
        let [gate, up] = routing.forward_each(&routing.gather(n), [&gate, &up]);
        let mut act = gate.like(gate.rows(), gate.width());
        glu::forward(self.spec.activation, &gate, &up, &mut act);
        (routing, [gate, up, act])
    }

    /// x += y from the rows of act. The sum over ranks starts from the first rank's x.
    fn add_rows(&self, c: Context, routing: &Routing, act: &Tensor, x: &mut Tensor, keeps: bool) -> Option<Tensor> {
        let [rows] = routing.forward_each(act, [&weights(c.w, &self.down)]);
        let before = keeps.then(|| {
            let apart = x.like(x.rows(), x.width());
            std::mem::replace(x, apart)
        });
        let addend = match &before {
            _ if c.tensor.rank() > 0 => Addend::Nothing,
            Some(before) => Addend::Values(before),
            None => Addend::Result,
        };
        routing.combine(&rows, addend, x);
        c.tensor.sum_slice(x.slice_mut());
        before
    }

    /// dW += dy^T x for each expert's own rows, unless the experts are frozen.
    fn backward_weights(
        c: Context,
        ids: &[ParamId],
        routing: &Routing,
        dy: &Tensor,
        x: &Tensor,
        grads: &mut Gradients,
    ) {
        if ids.iter().all(|id| !id.is_frozen) {
            routing.backward_weight(dy, x, grads.weights_mut(ids), c.w.dtype());
        }
    }

    /// dn += (dlogits / dn)^T dlogits, and the gradient of the router, given that of the weights.
    fn backward_router(
        &self,
        c: Context,
        (n, routing): (&Tensor, &Routing),
        dweights: &Tensor,
        dn: &mut Tensor,
        grads: &mut Gradients,
    ) {
        let dlogits = c.routers.backward(routing, dweights);
        if !self.router.is_frozen {
            matmul::backward_weight(&dlogits, n, grads.weight_mut(self.router), c.w.dtype());
        }
        matmul::backward_input(&dlogits, c.w.weight(self.router), dn, Into::Add);
    }
}

/// The matrices of all experts.
fn weights<'a>(w: &'a Unit, ids: &[ParamId]) -> Vec<Weight<'a>> {
    ids.iter().map(|id| w.weight(*id)).collect()
}

impl Body for Experts {
    type Saved = ExpertsSaved;

    fn forward(&self, c: Context, n: Tensor, _: &mut LayerKeys) -> ExpertsSaved {
        let (routing, [gate, up, act]) = self.activations(c, &n);
        ExpertsSaved { n, routing, gate, up, act }
    }

    fn add(&self, c: Context, saved: &ExpertsSaved, x: &mut Tensor, keeps: bool) -> Option<Tensor> {
        self.add_rows(c, &saved.routing, &saved.act, x, keeps)
    }

    fn run(&self, c: Context, n: Tensor, _: &mut LayerKeys, x: &mut Tensor, keeps: bool) -> Option<Tensor> {
        let (routing, [.., act]) = self.activations(c, &n);
        drop(n);
        self.add_rows(c, &routing, &act, x, keeps)
    }

    fn backward(&self, c: Context, _: &Packed, saved: ExpertsSaved, dy: &Tensor, grads: &mut Gradients) -> Tensor {
        let ExpertsSaved { n, routing, gate, up, mut act } = saved;
        let (s, f) = (gate.rows(), gate.width());
        let dy = routing.gather(dy);
        let mut dact = gate.like(s, f);
        routing.backward_input(&dy, &weights(c.w, &self.down), &mut dact, false);
        let mut dweights = routing.weigh(&mut act, &mut dact);
        c.tensor.sum_slice(dweights.slice_mut());
        Self::backward_weights(c, &self.down, &routing, &dy, &act, grads);
        // `act` and `dy` have served: their memory takes dgate and the gradient of the rows of n.
        let (mut dgate, mut dup) = (act, gate.like(s, f));
        glu::backward(self.spec.activation, &gate, &up, &dact, &mut dgate, &mut dup);
        drop((gate, up, dact));
        let mut drows = dy;
        routing.backward_input(&dgate, &weights(c.w, &self.gate), &mut drows, false);
        routing.backward_input(&dup, &weights(c.w, &self.up), &mut drows, true);
        let mut dn = n.like(n.rows(), n.width());
        routing.scatter(&drows, &mut dn);
        drop(drows);
        c.tensor.sum_slice(dn.slice_mut());
        let rows = routing.gather(&n);
        Self::backward_weights(c, &self.gate, &routing, &dgate, &rows, grads);
        Self::backward_weights(c, &self.up, &routing, &dup, &rows, grads);
        self.backward_router(c, (&n, &routing), &dweights, &mut dn, grads);
        dn
    }
}
