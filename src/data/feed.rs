//! The order in which rows are handed out, and the cursor that stores the position.

use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use super::cut::Entry;
use super::ledger::Ledger;
use crate::config::data::{DataConfig, Order};
use crate::error::{Error, Result};
use crate::rng::{Purpose, Rng};

/// The position of a source: enough to continue it exactly, on any number of ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    /// Entries handed out from each stratum since the start (one stratum, or one per weighted source).
    pub drawn: Vec<u64>,
    /// XXH3 of all entries that can be handed out. A cursor is valid only for the rows it was made on.
    pub rows_xxh3: u64,
}

/// Rows that are handed out in one order: all rows, or the rows of one weighted source.
#[derive(Debug, Default)]
pub(super) struct Stratum {
    /// Pieces of a row are adjacent.
    pub entries: Vec<Entry>,
    /// First entry of each row.
    pub rows: Vec<u32>,
    /// The curriculum value of each row. Empty in other orders.
    pub keys: Vec<f64>,
    pub weight: f64,
    /// The current epoch, and the order of its entries.
    pub order: Option<(u32, Vec<u32>)>,
}

/// Hands out entries and keeps the ledger.
#[derive(Debug)]
pub(super) struct Feed {
    strata: Vec<Stratum>,
    order: Order,
    length_group_rows: usize,
    seed: u64,
    pub cursor: Cursor,
    pub ledger: Ledger,
}

impl Feed {
    pub fn new(config: &DataConfig, strata: Vec<Stratum>, seed: u64, mut ledger: Ledger) -> Result<Self> {
        if !config.only_evaluates && strata.iter().any(|stratum| stratum.entries.is_empty()) {
            let hint = match ledger.losses() {
                (0, _) => "check data.prompts, data.prompt_split and data.eval_split".to_string(),
                (_, rules) => rules.join("; "),
            };
            return Err(Error::data(format!("no rows are left to train on: {ledger}")).hint(hint));
        }
        ledger.deferred = strata.iter().map(|stratum| stratum.rows.len() as u64).sum();
        ledger.check()?;
        let cursor = Cursor { drawn: vec![0; strata.len()], rows_xxh3: fingerprint(&strata) };
        Ok(Self { strata, order: config.order, length_group_rows: config.length_group_rows, seed, cursor, ledger })
    }

    /// Entries of one epoch.
    pub fn epoch_entries(&self) -> u64 {
        self.strata.iter().map(|stratum| stratum.entries.len() as u64).sum()
    }

    /// Every entry that can be handed out.
    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.strata.iter().flat_map(|stratum| &stratum.entries)
    }

    /// The next entry. Epochs follow each other without end.
    pub fn next(&mut self) -> Entry {
        let s = self.choose();
        let entries = self.strata[s].entries.len() as u64;
        let drawn = self.cursor.drawn[s];
        let epoch = (drawn / entries) as u32;
        if self.strata[s].order.as_ref().is_none_or(|(of, _)| *of != epoch) {
            self.strata[s].order = Some((epoch, self.epoch_order(s, epoch)));
        }
        let Stratum { entries: all, order, .. } = &self.strata[s];
        let order = order.as_ref().map_or(&[][..], |(_, order)| order);
        let entry = all[order[(drawn % entries) as usize] as usize];
        self.cursor.drawn[s] += 1;
        self.account(&entry, epoch);
        entry
    }

    /// The `n` entries after the first `position` entries of the only stratum.
    pub fn at(&mut self, position: u64, n: usize) -> Vec<Entry> {
        self.cursor.drawn[0] = position;
        self.ahead(n)
    }

    pub fn ahead(&mut self, n: usize) -> Vec<Entry> {
        let (cursor, ledger) = (self.cursor.clone(), self.ledger.clone());
        let entries = (0..n).map(|_| self.next()).collect();
        (self.cursor, self.ledger) = (cursor, ledger);
        entries
    }

    /// Continues at `cursor`.
    pub fn restore(&mut self, cursor: &Cursor, ledger: &Ledger) -> Result<()> {
        if cursor.rows_xxh3 != self.cursor.rows_xxh3
            || cursor.drawn.len() != self.cursor.drawn.len()
            || ledger.rows != self.ledger.rows
        {
            return Err(Error::data(format!(
                "rows have changed in number or length since the checkpoint, which had {} rows; now there are {}",
                ledger.rows, self.ledger.rows
            ))
            .hint("resume with the data and the [data] keys of the checkpoint, or set another job.dir"));
        }
        ledger.check()?;
        self.cursor = cursor.clone();
        self.ledger = ledger.clone();
        Ok(())
    }

    /// The stratum of the next entry: random by weight, keyed by the number of entries so far.
    fn choose(&self) -> usize {
        if self.strata.len() == 1 {
            return 0;
        }
        let total: u64 = self.cursor.drawn.iter().sum();
        let random = Rng::new(self.seed, Purpose::Shuffle).uniform([total as u32, (total >> 32) as u32, 0, 1]);
        let mut below = f64::from(random) * self.strata.iter().map(|s| s.weight).sum::<f64>();
        for (s, stratum) in self.strata.iter().enumerate() {
            if below < stratum.weight {
                return s;
            }
            below -= stratum.weight;
        }
        self.strata.len() - 1
    }

    /// The entries of a stratum in the order of one epoch.
    fn epoch_order(&self, s: usize, epoch: u32) -> Vec<u32> {
        let stratum = &self.strata[s];
        let rows = stratum.rows.len();
        // Each stratum has its own permutations. The golden ratio spreads neighboring numbers over the seeds.
        let seed = self.seed.wrapping_add((s as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let shuffled = || Rng::new(seed, Purpose::Shuffle).permutation(rows, epoch);
        let order = match self.order {
            Order::Sequential => (0..rows).collect(),
            Order::Shuffled => shuffled(),
            Order::LengthGrouped => {
                let mut order = shuffled();
                for group in order.chunks_mut(self.length_group_rows) {
                    group.sort_by_key(|row| stratum.entries[stratum.rows[*row] as usize].tokens());
                }
                order
            }
            Order::Curriculum => {
                let mut order = shuffled();
                order.sort_by(|a, b| stratum.keys[*a].total_cmp(&stratum.keys[*b]));
                order
            }
        };
        let pieces = |row: usize| {
            let first = stratum.rows[row];
            first..first + stratum.entries[first as usize].pieces
        };
        order.into_iter().flat_map(pieces).collect()
    }

    /// Counts a row once, when the last of its pieces is handed out for the first time.
    fn account(&mut self, entry: &Entry, epoch: u32) {
        let ledger = &mut self.ledger;
        ledger.handed_out += 1;
        if epoch > 0 || entry.piece + 1 != entry.pieces {
            return;
        }
        ledger.deferred -= 1;
        if entry.cut > 0 {
            ledger.truncated.rows += 1;
            ledger.truncated.tokens += u64::from(entry.cut);
        } else {
            ledger.trained += 1;
        }
        if entry.pieces > 1 {
            ledger.windowed.rows += 1;
            ledger.windowed.pieces += u64::from(entry.pieces);
        }
    }
}

fn fingerprint(strata: &[Stratum]) -> u64 {
    let mut bytes = Vec::new();
    for (s, stratum) in strata.iter().enumerate() {
        for entry in &stratum.entries {
            bytes.extend_from_slice(&(s as u32).to_le_bytes());
            bytes.extend_from_slice(&entry.document.to_le_bytes());
            for part in [entry.source, entry.start, entry.end, entry.rest] {
                bytes.extend_from_slice(&part.to_le_bytes());
            }
        }
    }
    XxHash3_64::oneshot(&bytes)
}
