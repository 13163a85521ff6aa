//! The layers of a model, grouped by the keys that they need from a KV cache.

use super::arch::Arch;

/// Layers that see the same keys of a sequence, so they share block tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheGroup {
    /// The number of keys that a query sees, itself included. `None`: all earlier keys.
    pub window: Option<usize>,
    /// Layer numbers, ascending.
    pub layers: Vec<usize>,
}

impl CacheGroup {
    /// The groups of an architecture. A window as long as the context hides nothing.
    pub(super) fn of_arch(arch: &Arch) -> Vec<Self> {
        let mut groups: Vec<Self> = Vec::new();
        for (layer, attention) in arch.attentions().enumerate() {
            let window = attention.window.filter(|window| *window < arch.context);
            match groups.iter_mut().find(|group| group.window == window) {
                Some(group) => group.layers.push(layer),
                None => groups.push(Self { window, layers: vec![layer] }),
            }
        }
        groups
    }
}
