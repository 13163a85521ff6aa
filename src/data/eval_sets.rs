//! The rows of a job together with the rows of `data.eval_sets`: opened together, and distinguished by their ids.

use super::cut::PIECE_SHIFT;
use super::rows::{Reading, row_fields};
use super::source::{Document, Source};
use super::sources::{Prepared, Rows};
use crate::config::data::DataConfig;
use crate::error::Result;
use crate::experience::RowFields;

/// The first row id of the first of `data.eval_sets`. The next set starts at twice this id, and so on. So the random
/// numbers of a set do not depend on other rows.
const SET_ROWS: u64 = 1 << 40;

impl Rows {
    /// Opens the rows of `data.prompts` and of all sets.
    pub(super) fn open(reading: Reading<'_>, prepared: &Prepared, seed: u64) -> Result<Self> {
        let (config, mut sets, mut first_id) = (reading.config, prepared.eval_sets.iter(), 0);
        let eval_sets = config.each_eval_set(|config| {
            first_id += SET_ROWS;
            let shards =
                sets.next().map(|shards| Self::open_from(first_id, Reading { config, ..reading }, shards, seed, &[]));
            shards.transpose()
        })?;
        let named = config.eval_sets.iter().map(|set| set.name.clone()).zip(eval_sets);
        let eval_sets: Vec<_> = named.filter_map(|(name, rows)| Some((name, rows?))).collect();
        let rows = Self::open_from(0, reading, prepared, seed, &eval_sets)?;
        Ok(Self { eval_sets, ..rows })
    }

    /// Returns a function from `Prompt::id` to the row as its file has it, with its images as data URLs. `config` is the configuration that the rows
    /// were opened with.
    pub fn lookup(&self, config: &DataConfig) -> impl Fn(u64) -> Result<RowFields> + Send + Sync + 'static {
        let sets = self.eval_sets.iter().zip(config.of_eval_sets()).map(|((_, rows), config)| (rows, config));
        let all = std::iter::once((self, config.clone())).chain(sets);
        let all: Vec<_> = all.map(|(rows, config)| (rows.sources.clone(), config)).collect();
        move |id| {
            let found = |(sources, config)| Some((document_of(sources, id)?, config));
            let found = all.iter().rev().find_map(|(sources, config)| found((sources, config)));
            let Some((document, config)) = found else { return Ok(RowFields::default()) };
            let mut fields = row_fields(document.meta()?.fields, config);
            let images = document.images()?;
            if !images.is_empty() {
                let urls = images.iter().map(|image| image.file.data_url()).collect::<Vec<_>>();
                fields.columns.insert("images".to_owned(), urls.into());
            }
            Ok(fields)
        }
    }

    /// Names of the fields that the first row of each source has besides the prompt.
    pub fn columns(&self, config: &DataConfig) -> Result<Vec<String>> {
        let rows = self.lookup(config);
        let of = |source: &Source| Ok(rows(source.first_id)?.columns.into_iter().map(|(name, _)| name));
        let all: Vec<_> = self.with_sets().flat_map(|rows| &*rows.sources).map(of).collect::<Result<_>>()?;
        Ok(all.into_iter().flatten().collect())
    }
}

/// The document of a prompt's row, by `Prompt::id`.
pub(super) fn document_of(sources: &[Source], id: u64) -> Option<Document<'_>> {
    let row = id & ((1 << PIECE_SHIFT) - 1);
    let source = sources.iter().rfind(|source| source.first_id <= row)?;
    Some(source.document(row - source.first_id))
}
