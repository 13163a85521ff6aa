//! Transfers of activations between neighboring stages of the pipeline axis, in the background.
//!
//! The hidden state (t, d) goes to the next stage in a forward, and its gradient to the one before in a backward. The
//! ranks of the tensor axis hold equal bits: each sends a share of them, and the receivers gather the shares. Values of
//! a GPU go through the host.
//!
//! A direction has a thread that sends and one that receives, each in the order of its calls. A send never blocks the
//! computation, and a receive that is announced by `expect` is under way before its values are needed.

use super::group::Group;
use super::stream::{Pending, Stream};
use crate::device::{Device, null};
use crate::sys::lock::lock;
use crate::tensor::{Slice, SliceMut, Tensor};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// The direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Hidden states, to the next stage. After the last stage comes the first one.
    Forward,
    /// Gradients of hidden states, to the stage before.
    Backward,
}

/// This rank's links to the neighboring stages.
pub struct Links {
    forward: Link,
    backward: Link,
    /// Nanoseconds for which this rank waited for values.
    waited: AtomicU64,
}

struct Link {
    /// A duplicate of the pipeline axis for each way, so that messages of two ways never mix.
    stages: Group,
    tensor: Group,
    sender: Stream,
    receiver: Stream,
    sending: Mutex<VecDeque<Pending<()>>>,
    expected: Mutex<VecDeque<Pending<Values>>>,
}

impl std::fmt::Debug for Links {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Links over {:?}", self.forward.stages)
    }
}

/// A share of values to send: on the CPU, or the host's copy of those of a GPU.
enum Share {
    Here(Tensor, Range<usize>),
    Staged(Vec<u16>),
}

impl Share {
    fn of(x: Tensor, share: Range<usize>) -> Self {
        match x.slice() {
            Slice::Cuda(view) => {
                let mut bits = vec![0; share.len()];
                view.part(share).read_bits(&mut bits);
                Self::Staged(bits)
            }
            _ => Self::Here(x, share),
        }
    }

    fn send(&self, stages: &Group, to: usize) {
        match self {
            Self::Here(x, share) => stages.send_to(to, &x.data()[share.clone()]),
            Self::Staged(bits) => stages.send_to(to, bits),
        }
    }
}

/// Counts a copy between a GPU and the host for a plan. Returns its bytes.
fn note_staged(len: usize) -> usize {
    let bytes = len * size_of::<u16>();
    null::note(null::OFFLOAD, 0.0, bytes as f64);
    bytes
}

/// Values to receive: on the CPU, or the host's copy of those of a GPU.
enum Values {
    Here(Tensor),
    Staged { rows: usize, width: usize, bits: Vec<u16> },
}

impl Values {
    fn room(device: Device, rows: usize, width: usize) -> Self {
        match device {
            Device::Cpu => Self::Here(Tensor::scratch(rows, width)),
            Device::Cuda => Self::Staged { rows, width, bits: vec![0; rows * width] },
        }
    }

    fn receive(&mut self, stages: &Group, from: usize, tensor: &Group, shares: &[Range<usize>]) {
        let own = shares[tensor.rank()].clone();
        match self {
            Self::Here(x) => {
                stages.receive_from(from, &mut x.data_mut()[own]);
                tensor.all_gather(x.data_mut(), shares);
            }
            Self::Staged { bits, .. } => {
                stages.receive_from(from, &mut bits[own]);
                tensor.all_gather(bits, shares);
            }
        }
    }

    fn into_tensor(self) -> Tensor {
        match self {
            Self::Here(x) => x,
            Self::Staged { rows, width, bits } => {
                let mut x = Tensor::scratch_on(Device::Cuda, rows, width);
                if let SliceMut::Cuda(mut view) = x.slice_mut() {
                    view.write_bits(&bits);
                }
                x
            }
        }
    }
}

impl Links {
    /// The links of this rank of `pipeline`, whose values the ranks of `tensor` share. All ranks of both call this.
    pub(super) fn new(pipeline: &Group, tensor: &Group) -> Self {
        let link = |sender, receiver| Link {
            stages: pipeline.duplicate(),
            tensor: if pipeline.size() > 1 { tensor.duplicate() } else { tensor.clone() },
            sender: Stream::new(sender, pipeline),
            receiver: Stream::new(receiver, pipeline),
            sending: Mutex::default(),
            expected: Mutex::default(),
        };
        Self {
            forward: link("activations sent", "activations"),
            backward: link("gradients sent", "gradients of activations"),
            waited: AtomicU64::new(0),
        }
    }

    fn link(&self, way: Way) -> &Link {
        match way {
            Way::Forward => &self.forward,
            Way::Backward => &self.backward,
        }
    }

    /// Starts to send `x` along `way`. At most `pending` transfers are then under way: a rank that only sends waits for
    /// its neighbor instead of filling its memory.
    pub fn send(&self, way: Way, x: Tensor, pending: usize) {
        let link = self.link(way);
        let (rank, size) = (link.stages.rank(), link.stages.size());
        let to = if way == Way::Forward { rank + 1 } else { rank + size - 1 } % size;
        let share = shares(x.rows() * x.width(), &link.tensor)[link.tensor.rank()].clone();
        if null::is_active() {
            return link.note(x.device(), share.len());
        }
        let (values, stages) = (Share::of(x, share), link.stages.clone());
        let mut sending = lock(&link.sending);
        sending.push_back(link.sender.submit(move |_| values.send(&stages, to)));
        while sending.len() > pending {
            sending.pop_front().expect("some are under way").wait();
        }
    }

    /// Runs `wait`, which counts as a wait for other stages.
    pub fn wait<R>(&self, wait: impl FnOnce() -> R) -> R {
        let start = Instant::now();
        let done = wait();
        self.waited.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        done
    }

    /// The seconds so far for which this rank waited for values.
    pub fn waited_s(&self) -> f64 {
        self.waited.load(Ordering::Relaxed) as f64 / 1e9
    }

    /// Starts to receive (rows, width) values along `way`, for a later `receive` of the same shape. Calls are in the
    /// order in which the neighbor sends.
    pub fn expect(&self, way: Way, device: Device, rows: usize, width: usize) {
        let link = self.link(way);
        if null::is_active() {
            return;
        }
        lock(&link.expected).push_back(link.start(way, device, rows, width));
    }

    /// The next (rows, width) values along `way`.
    pub fn receive(&self, way: Way, device: Device, rows: usize, width: usize) -> Tensor {
        let link = self.link(way);
        if null::is_active() {
            link.note_gathered(device, rows * width);
            return Tensor::scratch_on(device, rows, width);
        }
        let expected = lock(&link.expected).pop_front();
        let values = self.wait(|| expected.unwrap_or_else(|| link.start(way, device, rows, width)).wait());
        let x = values.into_tensor();
        assert_eq!((x.rows(), x.width()), (rows, width), "values of another stage");
        x
    }
}

impl Link {
    /// Counts the transfer of `len` values of a device for a plan.
    fn note(&self, device: Device, len: usize) {
        let bytes = if device == Device::Cuda { note_staged(len) } else { size_of::<f32>() * len };
        null::hidden(|| self.stages.note_send(bytes));
    }

    /// Counts the rest of it on the receiver, which gathers the shares of the tensor ranks.
    fn note_gathered(&self, device: Device, len: usize) {
        let bytes = if device == Device::Cuda { note_staged(len) } else { size_of::<f32>() * len };
        if self.tensor.size() > 1 {
            null::hidden(|| self.tensor.note_all_gather(bytes));
        }
    }

    fn start(&self, way: Way, device: Device, rows: usize, width: usize) -> Pending<Values> {
        let (rank, size) = (self.stages.rank(), self.stages.size());
        let from = if way == Way::Forward { rank + size - 1 } else { rank + 1 } % size;
        let (stages, tensor) = (self.stages.clone(), self.tensor.clone());
        let (mut values, shares) = (Values::room(device, rows, width), shares(rows * width, &tensor));
        self.receiver.submit(move |_| {
            values.receive(&stages, from, &tensor, &shares);
            values
        })
    }
}

/// Even shares of `len` values for the ranks of the tensor axis.
fn shares(len: usize, tensor: &Group) -> Vec<Range<usize>> {
    let size = tensor.size();
    (0..size).map(|rank| rank * len / size..(rank + 1) * len / size).collect()
}
