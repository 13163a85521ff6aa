//! Pages at the beginning of several prompts, such as a system prompt or examples. The first sequence that needs such a
//! page reads it, and the others reuse it.
//!
//! A page is identified by its tokens and all tokens before them, because keys and values depend on these. The tokens of
//! an image are equal for all images, so an image's number takes their place.

use super::blocks::BlockPools;
use super::sequence::Sequence;
use crate::experience::Image;
use crate::ops::attention::PAGE;
use std::borrow::Cow;
use std::collections::HashMap;

#[derive(Clone, Debug, Default, PartialEq)]
enum Head {
    #[default]
    Absent,
    /// Being read by a sequence.
    Pending(usize),
    /// Held for prompts that have not been read: a page of each cache group.
    Ready(Vec<u32>),
}

#[derive(Debug, Default)]
pub struct Prefixes {
    /// The pages of each group's prompt that other prompts begin with, too, by their numbers here.
    chains: Vec<Vec<usize>>,
    heads: Vec<Head>,
    /// The number of groups that have yet to read each page.
    fresh: Vec<usize>,
}

/// The tokens of prompts. Instead of the tokens of an image they have a number of its own, above all tokens; images of
/// equal hash have the same.
pub fn keys<'a>(prompts: impl IntoIterator<Item = (&'a [u32], &'a [Image])>) -> Vec<Cow<'a, [u32]>> {
    let mut numbers: HashMap<u64, u32> = HashMap::new();
    let mut key = |(tokens, images): (&'a [u32], &'a [Image])| {
        let mut tokens = Cow::Borrowed(tokens);
        for image in images {
            let next = u32::MAX - numbers.len() as u32;
            let number = *numbers.entry(image.hash).or_insert(next);
            tokens.to_mut()[image.range()].fill(number);
        }
        tokens
    };
    prompts.into_iter().map(&mut key).collect()
}

impl Prefixes {
    /// `prompts`: the prompt of each group. The page with a prompt's last token is not shared, because the logits after
    /// it are needed.
    pub fn new<'a>(prompts: impl IntoIterator<Item = &'a [u32]>) -> Self {
        let mut numbers: HashMap<(Option<usize>, &[u32]), usize> = HashMap::new();
        let mut groups = Vec::new();
        let chain = |prompt: &'a [u32]| {
            let pages = prompt[..prompt.len().saturating_sub(1)].chunks_exact(PAGE);
            let number = |before: &mut Option<usize>, page| {
                let next = numbers.len();
                *before = Some(*numbers.entry((*before, page)).or_insert(next));
                groups.resize(numbers.len(), 0);
                groups[before.expect("it was numbered")] += 1;
                *before
            };
            pages.scan(None, number).collect::<Vec<usize>>()
        };
        let mut chains: Vec<Vec<usize>> = prompts.into_iter().map(chain).collect();
        // A group that shares a page also shares the pages before it.
        let shared: Vec<usize> = (0..groups.len()).filter(|&page| groups[page] > 1).collect();
        for chain in &mut chains {
            chain.truncate(chain.partition_point(|&page| groups[page] > 1));
            for page in chain {
                *page = shared.partition_point(|&other| other < *page);
            }
        }
        let fresh: Vec<usize> = shared.iter().map(|&page| groups[page]).collect();
        Self { chains, heads: vec![Head::Absent; fresh.len()], fresh }
    }

    fn chain(&self, group: usize) -> &[usize] {
        self.chains.get(group).map_or(&[], Vec::as_slice)
    }

    /// The number of pages that prompts of other groups begin with, too, until the group's prompt is read.
    pub(super) fn common(&self, group: usize) -> usize {
        self.chain(group).len()
    }

    /// The number of pages that a sequence of the group does not need to read.
    pub(super) fn held(&self, group: usize) -> usize {
        self.chain(group).iter().take_while(|&&page| self.heads[page] != Head::Absent).count()
    }

    /// Gives sequence `s` the available pages after its own. Returns false if another sequence is reading the next one.
    pub(super) fn take_pages(&mut self, s: usize, sequence: &mut Sequence, pools: &mut BlockPools) -> bool {
        let pages = self.chain(sequence.spec.group);
        while sequence.past == PAGE * sequence.tables.len()
            && let Some(&page) = pages.get(sequence.tables.len())
        {
            match &self.heads[page] {
                Head::Absent => return true,
                Head::Pending(reader) => return *reader == s,
                Head::Ready(blocks) => {
                    pools.push(&mut sequence.tables, blocks);
                    sequence.past += PAGE;
                    pools.slide(&mut sequence.tables, sequence.past);
                }
            }
        }
        true
    }

    /// Records that sequence `s` will read up to `tokens`.
    pub(super) fn begin(&mut self, s: usize, sequence: &Sequence, tokens: usize) {
        let pages = self.chains.get(sequence.spec.group).map_or(&[][..], Vec::as_slice);
        for &page in pages.iter().take(tokens / PAGE).skip(sequence.past / PAGE) {
            if self.heads[page] == Head::Absent {
                self.heads[page] = Head::Pending(s);
            }
        }
    }

    /// Records that sequence `s` has read its tokens up to `past`, or the whole prompt if it `is_read`. It still holds
    /// all pages that it has just read.
    pub(super) fn end(&mut self, s: usize, sequence: &Sequence, is_read: bool, pools: &mut BlockPools) {
        let Some(pages) = self.chains.get_mut(sequence.spec.group) else { return };
        for (b, &page) in pages.iter().enumerate().take(sequence.past / PAGE) {
            if self.heads[page] == Head::Pending(s) {
                let blocks = sequence.tables.pages_at(b);
                pools.retain(&blocks);
                self.heads[page] = Head::Ready(blocks);
            }
        }
        if !is_read {
            return;
        }
        for page in std::mem::take(pages) {
            self.fresh[page] -= 1;
            if self.fresh[page] == 0 {
                self.drop_page(page, pools);
            }
        }
    }

    /// Records that sequence `s` reads no more.
    pub(super) fn cancel(&mut self, s: usize) {
        self.heads.iter_mut().filter(|head| **head == Head::Pending(s)).for_each(|head| *head = Head::Absent);
    }

    /// The pages whose blocks in a cache group no sequence uses.
    fn unused<'a>(&'a self, pools: &'a BlockPools, group: usize) -> impl Iterator<Item = usize> + 'a {
        let is_unused =
            move |head: &Head| matches!(head, Head::Ready(blocks) if !pools.is_shared(group, blocks[group]));
        self.heads.iter().enumerate().filter(move |(_, head)| is_unused(head)).map(|(page, _)| page)
    }

    /// The number of pages of a cache group that are free after `drop_unused`.
    pub(super) fn droppable(&self, pools: &BlockPools, group: usize) -> usize {
        self.unused(pools, group).count()
    }

    /// Releases the pages that no sequence uses in a cache group, and returns whether there were any.
    pub(super) fn drop_unused(&mut self, pools: &mut BlockPools, group: usize) -> bool {
        let pages: Vec<usize> = self.unused(pools, group).collect();
        for &page in &pages {
            self.drop_page(page, pools);
        }
        !pages.is_empty()
    }

    fn drop_page(&mut self, page: usize, pools: &mut BlockPools) {
        if let Head::Ready(blocks) = std::mem::take(&mut self.heads[page]) {
            pools.release(&blocks);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_share_pages_only_up_to_the_first_image_that_differs() {
        let tokens: Vec<u32> = vec![7; 4 * PAGE];
        let image = |hash, at| Image { at, tokens: PAGE, hash, ..Image::default() };
        let images = [vec![image(1, 4)], vec![image(1, 4), image(2, 2 * PAGE)], vec![image(3, 4)], Vec::new()];
        let keys = keys(images.iter().map(|images| (&tokens[..], &images[..])));
        assert_eq!(keys[0][4 + PAGE..], tokens[4 + PAGE..], "only the tokens of an image change");
        let prefixes = Prefixes::new(keys.iter().map(|key| &key[..]));
        let shared: Vec<usize> = prefixes.chains.iter().map(Vec::len).collect();
        assert_eq!(shared, [2, 2, 0, 0]);
    }
}
