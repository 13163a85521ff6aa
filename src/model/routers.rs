//! What the routers of a model chose in its forwards, and the slope of a loss of their probabilities.

use crate::device::Device;
use crate::ops::experts::Routing;
use crate::tensor::Tensor;
use std::cell::{Cell, Ref, RefCell};

/// Sums over (token, layer) pairs, of all layers with experts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RouterSums {
    /// The number of pairs.
    pub pairs: u64,
    /// How often each expert was chosen.
    pub chosen: Vec<u64>,
    /// The sum of the probability of each expert.
    pub probabilities: Vec<f64>,
    /// The sum of the entropies of the probabilities, in nats.
    pub entropy: f64,
}

impl RouterSums {
    /// Adds the sums that a GPU computed of a layer with `rows` rows.
    fn add_from_gpu(&mut self, rows: usize, sums: &Tensor) {
        let (experts, sums) = (sums.width(), sums.to_host());
        self.chosen.resize(experts, 0);
        self.probabilities.resize(experts, 0.0);
        self.pairs += rows as u64;
        for (e, (chosen, p)) in self.chosen.iter_mut().zip(&mut self.probabilities).enumerate() {
            *chosen += sums[e] as u64;
            *p += f64::from(sums[experts + e]);
            self.entropy += f64::from(sums[2 * experts + e]);
        }
    }

    fn add(&mut self, routing: &Routing) {
        let experts = routing.probabilities.width();
        self.chosen.resize(experts, 0);
        self.probabilities.resize(experts, 0.0);
        self.pairs += routing.probabilities.rows() as u64;
        for (sum, count) in self.chosen.iter_mut().zip(routing.groups.counts()) {
            *sum += count as u64;
        }
        for row in routing.probabilities.data().chunks_exact(experts) {
            // Sigmoids count by their shares.
            let total: f32 = if routing.is_softmax() { 1.0 } else { row.iter().sum() };
            for (sum, p) in self.probabilities.iter_mut().zip(row.iter().map(|p| p / total)) {
                *sum += f64::from(p);
                self.entropy -= f64::from(p) * if p > 0.0 { f64::from(p.ln()) } else { 0.0 };
            }
        }
    }
}

/// The routers of a model.
#[derive(Clone, Debug, Default)]
pub struct Routers {
    is_counting: Cell<bool>,
    sums: RefCell<RouterSums>,
    /// Rows and sums of layers on a GPU, which the host has not read yet.
    unread: RefCell<Vec<(usize, Tensor)>>,
    /// The slope of a loss by the probability of each expert, the same for all tokens and layers.
    slope: RefCell<Option<Vec<f32>>>,
    /// A hash of the experts of each row in the layers so far, in a forward that is traced.
    traced: RefCell<Option<Vec<u32>>>,
}

/// Start and factor of the hash FNV-1a (RFC 9923).
const FNV: [u32; 2] = [0x811c_9dc5, 0x0100_0193];

impl Routers {
    /// Calls `forward`, whose choices are added to the sums. Other forwards are not counted, nor the repeated ones of a
    /// backward.
    pub fn counted<R>(&self, forward: impl FnOnce() -> R) -> R {
        self.is_counting.set(true);
        let result = forward();
        self.is_counting.set(false);
        result
    }

    /// The sums so far.
    pub fn sums(&self) -> Ref<'_, RouterSums> {
        self.read();
        self.sums.borrow()
    }

    /// Takes the sums so far, and begins new ones.
    pub fn take(&self) -> RouterSums {
        self.read();
        self.sums.take()
    }

    fn read(&self) {
        for (rows, sums) in self.unread.take() {
            self.sums.borrow_mut().add_from_gpu(rows, &sums);
        }
    }

    /// Calls `backward`, which adds the gradient of a loss with this slope.
    pub fn with_slope<R>(&self, slope: Option<Vec<f32>>, backward: impl FnOnce() -> R) -> R {
        self.slope.replace(slope);
        let result = backward();
        self.slope.replace(None);
        result
    }

    /// Calls `forward`. Also returns a hash of the experts that each row chose in all layers, which is not 0; nothing if
    /// no layer has experts, or on a GPU.
    pub fn traced<R>(&self, forward: impl FnOnce() -> R) -> (R, Vec<u32>) {
        self.traced.replace(Some(Vec::new()));
        let result = forward();
        let hashes = self.traced.take().unwrap_or_default();
        (result, hashes.into_iter().map(|hash| hash.max(1)).collect())
    }

    /// Counts the choices of one layer.
    pub(super) fn note(&self, routing: &Routing) {
        // A graph that is captured cannot wait for the choices of a GPU.
        let is_known = routing.probabilities.device() == Device::Cpu;
        if let Some(hashes) = self.traced.borrow_mut().as_mut().filter(|_| is_known) {
            hashes.resize(routing.probabilities.rows(), FNV[0]);
            for (hash, chosen) in hashes.iter_mut().zip(routing.chosen().chunks(routing.weights.width())) {
                *hash = chosen.iter().fold(*hash, |hash, expert| (hash ^ expert).wrapping_mul(FNV[1]));
            }
        }
        if self.is_counting.get() {
            match routing.sums_on_gpu() {
                Some(sums) => self.unread.borrow_mut().push((routing.probabilities.rows(), sums)),
                None => self.sums.borrow_mut().add(routing),
            }
        }
    }

    /// The gradient of the logits of one layer's router from that of its weights.
    pub(super) fn backward(&self, routing: &Routing, dweights: &Tensor) -> Tensor {
        routing.backward(dweights, self.slope.borrow().as_deref())
    }
}
