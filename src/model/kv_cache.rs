//! The KV cache of a transformer: its layers' caches, and their pages.

use super::arch::Arch;
use super::block::Block;
use super::block_spec;
use super::layer_cache::{CacheGroup, LayerCache};
use super::transformer::Transformer;
use crate::dtype::{DType, KvDtype};

impl Arch {
    /// The same with keys and values rounded to `kv`: those of a policy that samples, and of what is compared with it.
    #[must_use]
    pub fn with_keys_in(mut self, kv: KvDtype) -> Self {
        for block in &mut self.blocks {
            if let block_spec::Mixer::Attention(spec) = &mut block.mixer {
                spec.kv = kv;
            }
        }
        self
    }
}

impl Transformer {
    /// Rounds keys and values to `kv` from now on, and keeps them so in caches.
    pub fn keep_keys_in(&mut self, kv: KvDtype) {
        self.blocks.iter_mut().for_each(|block| block.mixer_mut().keep_keys_in(kv));
    }

    /// The layers with the same need of keys.
    pub fn cache_groups(&self) -> &[CacheGroup] {
        &self.cache_groups
    }

    /// An empty KV cache for weights of `dtype`, with `pages` pages for the layers of each cache group.
    pub fn kv_cache(&self, dtype: DType, pages: &[usize]) -> Vec<LayerCache> {
        let pages = |layer: usize| pages[self.group_of(layer)];
        let layer = |(i, block): (usize, &Block)| block.mixer().cache(self.device, dtype, pages(i));
        self.blocks.iter().enumerate().map(layer).collect()
    }

    /// Copies page `from` to page `to` in every layer of a cache group.
    pub fn kv_copy_page(&self, cache: &mut [LayerCache], group: usize, from: u32, to: u32) {
        for &layer in &self.cache_groups[group].layers {
            self.blocks[layer].mixer().copy_page(&mut cache[layer], from, to);
        }
    }

    /// The bytes of one page over all layers of each cache group, for weights of `dtype` and the heads of this rank.
    pub fn kv_page_bytes(&self, dtype: DType) -> Vec<usize> {
        let of_layer = |layer: &usize| self.blocks[*layer].mixer().page_bytes(self.device, dtype);
        self.cache_groups.iter().map(|group| group.layers.iter().map(of_layer).sum()).collect()
    }
}
