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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shared_page_is_free_only_after_its_last_holder_lets_go() {
        let mut pool = BlockPool::new(2);
        let page = pool.allocate().expect("two pages are free");
        pool.retain(page);
        pool.release(page);
        assert_eq!(pool.free(), 1);
        pool.release(page);
        assert_eq!(pool.free(), 2);
    }

    #[test]
    fn a_full_pool_gives_none_and_recycles_what_comes_back() {
        let mut pool = BlockPool::new(3);
        let pages: Vec<u32> = std::iter::from_fn(|| pool.allocate()).collect();
        assert_eq!(pages, [0, 1, 2]);
        assert_eq!(pool.allocate(), None);
        pool.release(1);
        assert_eq!(pool.allocate(), Some(1));
    }

    #[test]
    fn pages_are_counted_up_to_the_last_partial_one() {
        assert_eq!([0, 1, PAGE, PAGE + 1].map(pages_of), [0, 1, 1, 2]);
    }
}
