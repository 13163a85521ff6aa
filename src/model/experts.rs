//! A mixture of experts: y = sum over the chosen experts e of g_e Wdown_e (act(Wgate_e n) * Wup_e n), plus that of the
//! expert that all tokens use, if there is one. The router and each matrix may have a bias. The ranks of the tensor axis
//! share the inner width of each expert, and those of the expert axis the experts; the router is whole on
//! each rank.

use super::arch::Arch;
use super::block_spec::{ExpertsSpec, Scoring};
use super::branch::Body;
use super::context::{Context, LayerKeys};
use super::expert_adapters::{ExpertAdapters, weights};
use super::expert_axis::{Exchange, own};
use super::expert_biases::Biases;
use super::expert_files::ExpertFiles;
use super::linear::Adapter;
use super::names::ROUTER;
use super::params::{ParamId, ParamTable};
use super::part::Cut;
use super::shared_expert::{SharedExpert, SharedSaved};
use super::targets::Fused;
use super::weights::Gradients;
use crate::ops::attention::Packed;
use crate::ops::experts::{self, Addend, Groups, Routing, Rule, SigmoidRule};
use crate::ops::glu;
use crate::ops::matmul::{self, Into};
use crate::tensor::{Layout, Tensor};
use std::sync::Arc;

#[derive(Clone, Debug)]
pub(super) struct Experts {
    router: ParamId,
    router_adapter: Option<Adapter>,
    /// The unit of all gates and ups, after that of the layer. All downs are the unit after it.
    unit: usize,
    /// One matrix for each expert.
    gate: Vec<ParamId>,
    up: Vec<ParamId>,
    down: Vec<ParamId>,
    /// The adapters of gates and ups, and of downs.
    adapters: [Option<ExpertAdapters>; 2],
    shared: Option<SharedExpert>,
    rule: Rule,
    biases: Option<Biases>,
    spec: ExpertsSpec,
}

/// The activations that the backward needs.
#[derive(Debug)]
pub(super) struct ExpertsSaved {
    /// The branch's input (t, d)
    n: Tensor,
    routing: Routing,
    exchange: Exchange,
    /// The results of the rows that this rank computes (s, f)
    gate: Tensor,
    up: Tensor,
    /// act(gate) * up (s, f)
    act: Tensor,
    shared: Option<SharedSaved>,
}

impl ExpertsSaved {
    /// The results with a row for each token, in the order in which they were computed.
    pub(super) fn results(&self) -> Vec<(&'static str, &Tensor)> {
        vec![("the MLP's norm", &self.n), ("the router", &self.routing.probabilities)]
    }
}

impl Experts {
    /// Declares the router of layer `layer`, the expert that all tokens use, and all biases.
    pub(super) fn declare(table: &mut ParamTable, layer: usize, arch: &Arch, spec: &ExpertsSpec) -> Self {
        let files = ExpertFiles { layer, form: arch.expert_form(), spec, width: arch.width };
        let (dims, normal) = ([Cut::Whole(spec.count), Cut::Whole(arch.width)], table.normal());
        let name = format!("model.layers.{layer}{ROUTER}");
        let router = table.add_in(files.router(), &name, &dims, Layout::Panel, normal);
        let module = files.router_module();
        let fused = Fused { module, experts: None, dims: [spec.count, arch.width], old: arch.old_names("router") };
        table.mark_fused(router, &Arc::new(fused));
        let module = files.router_module();
        let router_adapter = Adapter::declare(table, &module, (&module, None), dims);
        let shared = SharedExpert::declare(table, &format!("model.layers.{layer}.mlp"), arch.width, spec);
        let biases = spec.has_biases.then(|| Biases::declare(table, files));
        let (unit, [gate, up, down], adapters) = (0, [(); 3].map(|()| Vec::new()), [None, None]);
        let rule = rule(arch, layer, spec);
        Self { router, router_adapter, unit, gate, up, down, adapters, shared, biases, rule, spec: *spec }
    }

    /// The number of units after that of the layer.
    pub(super) const UNITS: usize = 2;

    /// Declares all gates and ups by expert, and all downs, as units after that of layer `layer`.
    pub(super) fn declare_experts(&mut self, table: &mut ParamTable, arch: &Arch, layer: usize) {
        let spec = &self.spec;
        let (hidden, inner, normal) = (Cut::Whole(arch.width), Cut::Even(spec.width), table.normal());
        let files = ExpertFiles { layer, form: arch.expert_form(), spec, width: arch.width };
        self.unit = table.units().len();
        let ([f, d], [gate_up, down]) = ([spec.width, arch.width], files.parameters());
        let fused =
            |module, dims, part| Arc::new(Fused { module, experts: Some(spec.count), dims, old: arch.old_names(part) });
        let (gate_up, down) = (fused(gate_up, [2 * f, d], "gate_up"), fused(down, [d, f], "down"));
        self.adapters = ExpertAdapters::of_layer(table, [&gate_up, &down]);
        let add = |table: &mut ParamTable, e: usize, part: &str, dims: [Cut; 2], fused: &Arc<Fused>| {
            let own = format!("model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight");
            let id = table.add_in(files.expert(e, part), &own, &dims, Layout::Panel, normal);
            table.mark_fused(id, fused);
            id
        };
        let [of_inner, of_outer] = &mut self.adapters;
        for e in 0..spec.count {
            self.gate.push(add(table, e, "gate", [inner, hidden], &gate_up));
            self.up.push(add(table, e, "up", [inner, hidden], &gate_up));
            if let Some(adapters) = of_inner {
                adapters.declare(table, files, e, &["gate", "up"], [inner, hidden]);
            }
        }
        table.end_experts();
        for e in 0..spec.count {
            self.down.push(add(table, e, "down", [hidden, inner], &down));
            if let Some(adapters) = of_outer {
                adapters.declare(table, files, e, &["down"], [hidden, inner]);
            }
        }
        table.end_experts();
    }

    /// Chooses the experts of each row of n.
    fn route(&self, c: Context, n: &Tensor) -> Routing {
        let mut logits = n.statistics(n.rows(), self.spec.count);
        let bias = self.biases.as_ref().map(|biases| biases.of_router(c.w));
        matmul::forward(n, c.w.operand(self.router, n.rows()), bias, &mut logits, Into::Overwrite);
        if let Some(adapter) = &self.router_adapter {
            adapter.forward(c.w, n, &mut logits);
        }
        let routing = Routing::new(logits, self.spec.top_k, self.rule.clone());
        c.routers.note(&routing);
        routing
    }

    /// The experts of each row of n, where their rows are computed, and the rows of gate, up and act.
    fn activations(&self, c: Context, n: &Tensor) -> (Routing, Exchange, [Tensor; 3]) {
        let routing = self.route(c, n);
        let exchange = Exchange::new(c.expert, &routing);
        let rows = exchange.there(routing.gather(n));
        let unit = c.weights.unit(self.unit);
        let [gate, up] = [&self.gate, &self.up].map(|ids| weights(&unit, own(c, ids)));
        let [mut gate, mut up] = exchange.groups.forward_each(&rows, [&gate, &up]);
        if let Some(biases) = &self.biases {
            biases.add_inner(c, &exchange.groups, [&mut gate, &mut up]);
        }
        if let Some(adapters) = &self.adapters[0] {
            adapters.add_inner(c, &unit, &exchange.groups, &rows, [&mut gate, &mut up]);
        }
        let mut act = gate.like(gate.rows(), gate.width());
        glu::forward(self.spec.activation, &gate, &up, &mut act);
        (routing, exchange, [gate, up, act])
    }

    /// x += y of the expert that all tokens use, if there is one. Then the previous x is returned, with `keeps`.
    fn add_shared(&self, c: Context, saved: Option<&SharedSaved>, x: &mut Tensor, keeps: bool) -> Option<Tensor> {
        let (shared, saved) = self.shared.as_ref().zip(saved)?;
        shared.add(c, saved, x, keeps)
    }

    /// x += y from the rows of act. The sum over ranks starts from the first rank's x.
    fn add_rows(
        &self,
        c: Context,
        (routing, exchange): (&Routing, &Exchange),
        act: &Tensor,
        x: &mut Tensor,
        keeps: bool,
    ) -> Option<Tensor> {
        let unit = c.weights.unit(self.unit + 1);
        let [mut rows] = exchange.groups.forward_each(act, [&weights(&unit, own(c, &self.down))]);
        if let Some(biases) = &self.biases {
            biases.add_outer(c, &exchange.groups, &mut rows);
        }
        if let Some(adapters) = &self.adapters[1] {
            adapters.add_outer(c, &unit, &exchange.groups, act, &mut rows);
        }
        let rows = exchange.back(rows);
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

    /// dW += dy^T x for the rows of each expert of this rank, unless the experts are frozen.
    fn backward_weights(c: Context, ids: &[ParamId], groups: &Groups, dy: &Tensor, x: &Tensor, grads: &mut Gradients) {
        let ids = own(c, ids);
        if ids.iter().all(|id| !id.is_frozen) {
            groups.backward_weight(dy, x, grads.weights_mut(ids), c.w.dtype());
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
        if let Some(biases) = &self.biases {
            biases.backward_router(&dlogits, grads);
        }
        if !self.router.is_frozen {
            matmul::backward_weight(&dlogits, n, grads.weight_mut(self.router), c.w.dtype());
        }
        matmul::backward_input(&dlogits, c.w.weight(self.router), dn, Into::Add);
        if let Some(adapter) = &self.router_adapter {
            adapter.backward(c.w, [n, &dlogits], dn, grads);
        }
    }
}

/// How the router of a layer weighs its experts.
fn rule(arch: &Arch, layer: usize, spec: &ExpertsSpec) -> Rule {
    let renormalizes = spec.renormalizes;
    match spec.scoring {
        Scoring::Softmax => Rule::Softmax { renormalizes },
        Scoring::Sigmoid { groups, top_groups, scale } => {
            let correction = arch.corrections.of(layer, spec.count);
            Rule::Sigmoid(SigmoidRule { correction, groups, top_groups, renormalizes, scale })
        }
    }
}

impl Body for Experts {
    type Saved = ExpertsSaved;

    fn forward(&self, c: Context, n: Tensor, _: &mut LayerKeys) -> ExpertsSaved {
        let (routing, exchange, [gate, up, act]) = self.activations(c, &n);
        let shared = self.shared.as_ref().map(|shared| shared.forward(c, &n));
        ExpertsSaved { n, routing, exchange, gate, up, act, shared }
    }

    fn add(&self, c: Context, saved: &ExpertsSaved, x: &mut Tensor, keeps: bool) -> Option<Tensor> {
        let before = self.add_shared(c, saved.shared.as_ref(), x, keeps);
        let keeps = keeps && before.is_none();
        before.or(self.add_rows(c, (&saved.routing, &saved.exchange), &saved.act, x, keeps))
    }

    fn run(&self, c: Context, n: Tensor, _: &mut LayerKeys, x: &mut Tensor, keeps: bool) -> Option<Tensor> {
        let shared = self.shared.as_ref().map(|shared| shared.forward(c, &n));
        let before = self.add_shared(c, shared.as_ref(), x, keeps);
        drop(shared);
        let (routing, exchange, [.., act]) = self.activations(c, &n);
        drop(n);
        let keeps = keeps && before.is_none();
        before.or(self.add_rows(c, (&routing, &exchange), &act, x, keeps))
    }

    /// The caller has begun the gradients of the last unit. Those of the layer are begun here.
    fn backward(&self, c: Context, _: &Packed, saved: ExpertsSaved, dy: &Tensor, grads: &mut Gradients) -> Tensor {
        let ExpertsSaved { n, routing, exchange, gate, up, mut act, shared } = saved;
        let (groups, s, f) = (&exchange.groups, gate.rows(), gate.width());
        let mut drows = exchange.there(routing.gather(dy));
        let mut dact = gate.like(s, f);
        let unit = c.weights.unit(self.unit + 1);
        groups.backward_input(&drows, &weights(&unit, own(c, &self.down)), &mut dact, false);
        let [of_inner, of_outer] = self.adapters.each_ref().map(Option::as_ref);
        let of_outer = of_outer.map(|of| (of, of.backward_input(c, &unit, groups, &[&drows], &mut dact)));
        let weights_of_rows = exchange.there(routing.row_weights());
        let mut slopes = experts::weigh(&mut act, &mut dact, &weights_of_rows);
        let outer = self.biases.as_ref().and_then(|of| of.outer(c, groups, [&drows, &weights_of_rows], &mut slopes));
        let mut dweights = routing.of_row_weights(&exchange.back(slopes));
        c.tensor.sum_slice(dweights.slice_mut());
        Self::backward_weights(c, &self.down, groups, &drows, &act, grads);
        if let Some((of, dinner)) = of_outer {
            of.backward_weights(c, groups, (&act, true), &[&drows], dinner, (&unit, grads));
        }
        drop(unit);
        grads.finish(self.unit + 1);
        grads.begin(self.unit);
        // `act` and `drows` have served: their memory takes dgate and the gradient of the rows of n.
        let (mut dgate, mut dup) = (act, gate.like(s, f));
        glu::backward(self.spec.activation, &gate, &up, &dact, &mut dgate, &mut dup);
        drop((gate, up, dact));
        let unit = c.weights.unit(self.unit);
        groups.backward_input(&dgate, &weights(&unit, own(c, &self.gate)), &mut drows, false);
        groups.backward_input(&dup, &weights(&unit, own(c, &self.up)), &mut drows, true);
        let of_inner = of_inner.map(|of| (of, of.backward_input(c, &unit, groups, &[&dgate, &dup], &mut drows)));
        let mut dn = n.like(n.rows(), n.width());
        routing.scatter(&exchange.back(drows), &mut dn);
        let rows = exchange.there(routing.gather(&n));
        Self::backward_weights(c, &self.gate, groups, &dgate, &rows, grads);
        Self::backward_weights(c, &self.up, groups, &dup, &rows, grads);
        if let Some((of, dinner)) = of_inner {
            of.backward_weights(c, groups, (&rows, false), &[&dgate, &dup], dinner, (&unit, grads));
        }
        drop(unit);
        grads.finish(self.unit);
        grads.begin(self.unit - 1);
        if let Some(biases) = &self.biases {
            biases.backward(c, groups, [&dgate, &dup], outer, grads);
        }
        let shared = self.shared.as_ref().zip(shared);
        let shared = shared.and_then(|(of, saved)| Some((of, of.backward(c, &n, saved, dy, &mut dn, grads)?)));
        c.tensor.sum_slice(dn.slice_mut());
        self.backward_router(c, (&n, &routing), &dweights, &mut dn, grads);
        if let Some((of, dlogits)) = shared {
            of.backward_gate(c, &n, &dlogits, &mut dn, grads);
        }
        dn
    }
}
