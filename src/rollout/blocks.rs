//! Pages of the KV cache with reference counts. Samples of one prompt share its full pages.

use crate::ops::attention::PAGE;

/// The number of pages for `tokens` cached tokens.
pub fn pages_of(tokens: usize) -> usize {
    tokens.div_ceil(PAGE)
}

/// A free list over pages `0..total` with a count of holders for each page.
#[derive(Debug)]
pub struct BlockPool {
    free: Vec<u32>,
    holders: Vec<u32>,
}

impl BlockPool {
    pub fn new(total: usize) -> Self {
        // Low page numbers first, so a small load uses little memory.
        Self { free: (0..total as u32).rev().collect(), holders: vec![0; total] }
    }

    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Allocates a page with one holder, or `None` if all are held.
    pub fn allocate(&mut self) -> Option<u32> {
        let page = self.free.pop()?;
        self.holders[page as usize] = 1;
        Some(page)
    }

    /// Whether the page has several holders.
    pub fn is_shared(&self, page: u32) -> bool {
        self.holders[page as usize] > 1
    }

    /// Adds a holder.
    ///
    /// # Panics
    /// If the page has no holder.
    pub fn retain(&mut self, page: u32) {
        let holders = &mut self.holders[page as usize];
        assert!(*holders > 0, "page {page} is free and cannot be shared");
        *holders += 1;
    }

    /// Removes a holder. The last one frees the page.
    ///
    /// # Panics
    /// If the page has no holder.
    pub fn release(&mut self, page: u32) {
        let holders = &mut self.holders[page as usize];
        assert!(*holders > 0, "page {page} is free already");
        *holders -= 1;
        if *holders == 0 {
            self.free.push(page);
        }
    }
}
