//! Pages of the KV cache with reference counts: samples of one prompt share its full pages.

use crate::ops::attention::PAGE;

/// Pages that `tokens` cached tokens take.
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
        // Low page numbers first: a small load touches little memory.
        Self { free: (0..total as u32).rev().collect(), holders: vec![0; total] }
    }

    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// A page with one holder, or `None` where all are held.
    pub fn allocate(&mut self) -> Option<u32> {
        let page = self.free.pop()?;
        self.holders[page as usize] = 1;
        Some(page)
    }

    /// Whether the page has several holders.
    pub fn is_shared(&self, page: u32) -> bool {
        self.holders[page as usize] > 1
    }

    /// One holder more.
    ///
    /// # Panics
    /// If nobody holds the page.
    pub fn retain(&mut self, page: u32) {
        let holders = &mut self.holders[page as usize];
        assert!(*holders > 0, "page {page} is free and cannot be shared");
        *holders += 1;
    }

    /// One holder less; the last one frees the page.
    ///
    /// # Panics
    /// If nobody holds the page.
    pub fn release(&mut self, page: u32) {
        let holders = &mut self.holders[page as usize];
        assert!(*holders > 0, "page {page} is free already");
        *holders -= 1;
        if *holders == 0 {
            self.free.push(page);
        }
    }
}
