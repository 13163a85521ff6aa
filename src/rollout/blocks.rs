//! Pages of the KV cache with reference counts. Samples of one prompt share its full pages.
//!
//! Each cache group has pages and block tables of its own. With a window of w keys, the query at position p sees the
//! keys j with p - w < j <= p. So page b is free when PAGE b + PAGE - 1 <= p - w for the next query p.
//!
//! A group of states has one page for a sequence, at the last entry of its table: its tokens are read in place. If others
//! hold the page, too, the sequence first gets a copy.

use crate::model::Kept;
use crate::ops::attention::PAGE;

/// The pages of a cache group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupPages {
    pub kept: Kept,
    pub pages: usize,
}

/// The number of pages for `tokens` cached tokens.
pub fn pages_of(tokens: usize) -> usize {
    tokens.div_ceil(PAGE)
}

/// The first page that the query at `position` sees.
fn first_page(kept: Kept, position: usize) -> usize {
    if let Kept::Window(window) = kept { (position + 1).saturating_sub(window) / PAGE } else { 0 }
}

/// The maximum number of pages that a sequence of up to `tokens` tokens holds in a group, if a forward reads up to
/// `chunk` of them. A decode step counts as two, because the next one gets its page while the first one runs.
pub fn held_max(kept: Kept, tokens: usize, chunk: usize) -> usize {
    let most = match kept {
        Kept::All => usize::MAX,
        Kept::Window(window) => pages_of(window.saturating_add(chunk.max(2) - 2)) + 1,
        Kept::State => 1,
    };
    most.min(pages_of(tokens))
}

/// The pages of a sequence in one group. Entry b is the page of tokens PAGE b .. PAGE b + PAGE - 1.
#[derive(Clone, Debug, Default)]
struct BlockTable {
    pages: Vec<u32>,
    /// The number of leading entries that no later query sees. They name some page, which is not the sequence's.
    freed: usize,
}

impl BlockTable {
    /// The last page, if the sequence holds it.
    fn held(&self) -> Option<u32> {
        self.pages[self.freed.min(self.pages.len())..].last().copied()
    }
}

/// The pages of a sequence in each group. All tables have the same length.
#[derive(Clone, Debug)]
pub struct BlockTables(Vec<BlockTable>);

impl BlockTables {
    pub fn new(groups: usize) -> Self {
        Self(vec![BlockTable::default(); groups])
    }

    /// Entries of each table.
    pub fn len(&self) -> usize {
        self.0.iter().map(|table| table.pages.len()).min().unwrap_or(0)
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The table of a group.
    pub fn of_group(&self, group: usize) -> &[u32] {
        &self.0[group].pages
    }

    /// Makes room for `pages` entries.
    pub fn reserve(&mut self, pages: usize) {
        self.0.iter_mut().for_each(|table| table.pages.reserve(pages));
    }

    /// Entry `b` of each table.
    pub fn pages_at(&self, b: usize) -> Vec<u32> {
        self.0.iter().map(|table| table.pages[b]).collect()
    }
}

/// The pages of a group that are copied before the next forward: (group, from, to).
pub type PageCopy = (usize, u32, u32);

/// The pages of all groups.
#[derive(Debug)]
pub struct BlockPools {
    groups: Vec<BlockPool>,
    copies: Vec<PageCopy>,
}

impl BlockPools {
    pub fn new(groups: &[GroupPages]) -> Self {
        Self { groups: groups.iter().map(|group| BlockPool::new(*group)).collect(), copies: Vec::new() }
    }

    /// The copies that `cover` needs before the next forward, in this order.
    pub fn take_copies(&mut self) -> Vec<PageCopy> {
        std::mem::take(&mut self.copies)
    }

    /// The number of groups.
    pub fn len(&self) -> usize {
        self.groups.len()
    }

    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    pub fn kept(&self, group: usize) -> Kept {
        self.groups[group].kept
    }

    /// Free pages of a group.
    pub fn free(&self, group: usize) -> usize {
        self.groups[group].free.len()
    }

    /// Makes the tables cover `tokens`.
    ///
    /// # Errors
    /// The group that has no free page left.
    pub fn cover(&mut self, tables: &mut BlockTables, tokens: usize) -> Result<(), usize> {
        for (group, (pool, table)) in self.groups.iter_mut().zip(&mut tables.0).enumerate() {
            if pool.kept == Kept::State {
                let [from, to] = pool.cover_state(table, pages_of(tokens)).ok_or(group)?;
                if from != to {
                    self.copies.push((group, from, to));
                }
                continue;
            }
            while table.pages.len() < pages_of(tokens) {
                table.pages.push(pool.allocate().ok_or(group)?);
            }
        }
        Ok(())
    }

    /// Releases the pages that no query from `position` on sees. Pages that were never needed get no entry of their
    /// own.
    pub fn slide(&mut self, tables: &mut BlockTables, position: usize) {
        for (pool, table) in self.groups.iter_mut().zip(&mut tables.0) {
            let first = first_page(pool.kept, position);
            if first > table.freed {
                let held = first.min(table.pages.len());
                table.pages[table.freed..held].iter().for_each(|page| pool.release(*page));
                table.pages.resize(table.pages.len().max(first), 0);
                table.freed = first;
            }
        }
    }

    /// Another holder's tables of the first `entries` pages.
    pub fn share(&mut self, tables: &BlockTables, entries: usize) -> BlockTables {
        let share = |(pool, table): (&mut BlockPool, &BlockTable)| {
            let (pages, freed) = (table.pages[..entries].to_vec(), table.freed.min(entries));
            pages[freed..].iter().for_each(|page| pool.retain(*page));
            BlockTable { pages, freed }
        };
        BlockTables(self.groups.iter_mut().zip(&tables.0).map(share).collect())
    }

    /// Adds one page of each group to the tables, as another holder.
    pub fn push(&mut self, tables: &mut BlockTables, pages: &[u32]) {
        self.retain(pages);
        tables.0.iter_mut().zip(pages).for_each(|(table, page)| table.pages.push(*page));
    }

    /// Gives the tables pages of their own instead of shared ones at entry `b`, if it exists. Returns the pages to
    /// copy, (group, from, to), or `None` if a group has no free page.
    pub fn unshare(&mut self, tables: &mut BlockTables, b: usize) -> Option<Vec<(usize, u32, u32)>> {
        let mut copies = Vec::new();
        for (group, (pool, table)) in self.groups.iter_mut().zip(&mut tables.0).enumerate() {
            if let Some(page) = table.pages.get_mut(b).filter(|page| pool.is_shared(**page)) {
                let own = pool.allocate()?;
                pool.release(*page);
                copies.push((group, std::mem::replace(page, own), own));
            }
        }
        Some(copies)
    }

    /// Releases all pages of the tables.
    pub fn clear(&mut self, tables: &mut BlockTables) {
        for (pool, table) in self.groups.iter_mut().zip(&mut tables.0) {
            table.pages.drain(..).skip(table.freed).for_each(|page| pool.release(page));
            table.freed = 0;
        }
    }

    /// The number of a group's pages that only these tables hold. Only the first `shared` entries may have other holders.
    pub fn own(&self, group: usize, tables: &BlockTables, shared: usize) -> usize {
        let (pool, table) = (&self.groups[group], &tables.0[group]);
        let is_shared = |page: &&u32| pool.is_shared(**page);
        if pool.kept == Kept::State {
            return usize::from(table.held().is_some_and(|page| !is_shared(&&page)));
        }
        let held = table.pages.len().saturating_sub(table.freed);
        held - table.pages.iter().take(shared).skip(table.freed).filter(is_shared).count()
    }

    /// Whether the page has several holders.
    pub fn is_shared(&self, group: usize, page: u32) -> bool {
        self.groups[group].is_shared(page)
    }

    /// Adds a holder to one page of each group.
    pub fn retain(&mut self, pages: &[u32]) {
        self.groups.iter_mut().zip(pages).for_each(|(pool, page)| pool.retain(*page));
    }

    /// Removes a holder from one page of each group.
    pub fn release(&mut self, pages: &[u32]) {
        self.groups.iter_mut().zip(pages).for_each(|(pool, page)| pool.release(*page));
    }
}

/// A free list over the pages of a group, with a count of holders for each page.
#[derive(Debug)]
struct BlockPool {
    kept: Kept,
    free: Vec<u32>,
    holders: Vec<u32>,
}

impl BlockPool {
    fn new(group: GroupPages) -> Self {
        let GroupPages { kept, pages } = group;
        // Low page numbers first, so a small load uses little memory.
        Self { kept, free: (0..pages as u32).rev().collect(), holders: vec![0; pages] }
    }

    /// Allocates a page with one holder, or `None` if all are held.
    fn allocate(&mut self) -> Option<u32> {
        let page = self.free.pop()?;
        self.holders[page as usize] = 1;
        Some(page)
    }

    fn is_shared(&self, page: u32) -> bool {
        self.holders[page as usize] > 1
    }

    /// Puts the page of a state at the last of `entries` entries. Returns the page that had the state, and the one that
    /// gets it, or `None` if a page is needed and none is free.
    fn cover_state(&mut self, table: &mut BlockTable, entries: usize) -> Option<[u32; 2]> {
        let (held, entries) = (table.held(), entries.max(table.pages.len()));
        let page = match held {
            Some(page) if !self.is_shared(page) => page,
            _ => self.allocate()?,
        };
        if let Some(held) = held.filter(|held| *held != page) {
            self.release(held);
        }
        table.pages.resize(entries, 0);
        (table.pages[entries - 1], table.freed) = (page, entries - 1);
        Some([held.unwrap_or(page), page])
    }

    /// Adds a holder.
    ///
    /// # Panics
    /// If the page has no holder.
    fn retain(&mut self, page: u32) {
        let holders = &mut self.holders[page as usize];
        assert!(*holders > 0, "page {page} is free and cannot be shared");
        *holders += 1;
    }

    /// Removes a holder. The last one frees the page.
    ///
    /// # Panics
    /// If the page has no holder.
    fn release(&mut self, page: u32) {
        let holders = &mut self.holders[page as usize];
        assert!(*holders > 0, "page {page} is free already");
        *holders -= 1;
        if *holders == 0 {
            self.free.push(page);
        }
    }
}
