//! Prompts with two responses, one of which was preferred. Documents are [prompt, chosen, rejected].

use serde_json::{Map, Value};

use super::spec::{Row, RowSpec};
use crate::config::data::DataConfig;
use crate::config::method::RowKind;
use crate::data::cut::{Entries, Entry, cut};
use crate::data::fields::{field, named};
use crate::data::rows::Reading;
use crate::data::shape::{self, Content, Fields};
use crate::data::source::Document;
use crate::error::{Error, Result};
use crate::experience::Image;
use crate::text::Tokenizer;
use crate::text::images::Sequences;

/// Two responses to a prompt, one of which was preferred. Both hold the prompt.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PairRow {
    /// Identity of the row over the whole run.
    pub id: u64,
    pub prompt_tokens: usize,
    pub chosen: Vec<u32>,
    pub rejected: Vec<u32>,
    /// The margin by which the chosen response is better; 0 if the data has none.
    pub margin: f32,
    /// The images among the tokens of the prompt, in order.
    pub images: Vec<Image>,
    /// The margin as written in the data.
    label: String,
}

pub struct Pairs;

impl RowSpec for Pairs {
    fn fields(&self) -> Fields {
        Fields::Sides
    }

    fn names_shards(&self) -> bool {
        false
    }

    /// Prompt, chosen and rejected. If a row has no prompt, both sides contain it: the prompt is their common
    /// beginning, which is the messages before the last answer, or tokens.
    fn encode(&self, row: &Map<String, Value>, reading: Reading) -> Result<Sequences> {
        let config = reading.config;
        let (prompt, sides) = shape::prompt_and_sides(row, config)?;
        let Some(sides) = &sides else {
            let key = if field(row, &config.chosen_key).is_none() { &config.chosen_key } else { &config.rejected_key };
            return Err(shape::missing(row, config, self.fields(), key));
        };
        let [key, other_key] = [sides[0].key, sides[1].key];
        let are_chats = sides.iter().all(|side| matches!(side.content, Content::Messages(_)));
        let is_whole = prompt.is_none() && !are_chats;
        let side = |i: usize| reading.side(row, prompt.as_ref(), &sides[i]);
        let [mut one, other] = [side(0)?, side(1)?];
        if one.images != other.images {
            return Err(Error::data(format!("fields {key:?} and {other_key:?} have different images"))
                .hint("put images into the prompt, which both sides have"));
        }
        let images = std::mem::take(&mut one.images);
        let (chosen, rejected) = (&one.answer, &other.answer);
        let sequences = if is_whole {
            let is_text = matches!(sides[0].content, Content::Text(_));
            let known = if is_text { reading.tokenizer.encode("", true)?.len() } else { 0 };
            let sequences = separate(chosen, rejected);
            // Tokens that the tokenizer puts before every text are not a prompt.
            if sequences[0].len() <= known && chosen != rejected {
                return Err(Error::data(format!(
                    "fields {key:?} and {other_key:?} have no common beginning that could be the prompt"
                ))
                .hint(format!("put the prompt into its own field {:?} (data.prompt_key)", config.prompt_key)));
            }
            sequences
        } else if one.prompt == other.prompt {
            [one.prompt, one.answer, other.answer]
        } else if one.before.is_some() && one.before == other.before {
            // The template begins the two answers differently, so their common beginning is the prompt.
            let [one, other] = [one, other].map(|side| [side.prompt, side.answer].concat());
            separate(&one, &other)
        } else {
            return Err(Error::data(format!("fields {key:?} and {other_key:?} answer different prompts"))
                .hint("give both sides in the same form; conversations may differ only in the last answer"));
        };
        if sequences[1] == sequences[2] {
            return Err(Error::data(format!("fields {key:?} and {other_key:?} must differ (got equal responses)")));
        }
        Ok(Sequences { tokens: sequences.to_vec(), images })
    }

    /// The margin by which the chosen response is better.
    fn label(&self, row: &Map<String, Value>, config: &DataConfig) -> Result<String> {
        let key = &config.margin_key;
        if key.is_empty() {
            return Ok(String::new());
        }
        let value = named(row, key, "margin")?;
        let margin = value.as_f64().filter(|margin| margin.is_finite());
        let margin = margin.ok_or_else(|| Error::data(format!("field {key:?} must be a number (got {value})")))?;
        Ok(margin.to_string())
    }

    fn entries(&self, document: Document, prompt: usize, config: &DataConfig) -> Result<Entries> {
        let [_, chosen, rejected] = document.lengths_of("prompt, chosen and rejected", "--pairs")?;
        let longer = chosen.max(rejected);
        let mut entries = match cut(config, document, prompt, longer) {
            Ok(entries) => entries,
            Err(rule) => return Ok(Err(rule)),
        };
        if let [entry] = &entries[..]
            && (entry.rest as usize) < longer
        {
            let sides = document.sequences()?;
            let [one, other] = [1, 2].map(|side| sides[side].iter().take(entry.rest as usize));
            if one.eq(other) {
                return Ok(Err("pair_equal_when_cut"));
            }
        }
        for entry in &mut entries {
            // Each side is cut like the longer one.
            let both = chosen.min(entry.rest as usize) + rejected.min(entry.rest as usize);
            entry.cut += (chosen + rejected - both) as u32 - (longer as u32 - entry.rest);
            entry.rest = both as u32;
        }
        Ok(Ok(entries))
    }
}

/// The common beginning of two sequences, and the rests, which both have at least one token.
fn separate(one: &[u32], other: &[u32]) -> [Vec<u32>; 3] {
    let alike = one.iter().zip(other).take_while(|(a, b)| a == b).count();
    let prompt = alike.min(one.len() - 1).min(other.len() - 1);
    [&one[..prompt], &one[prompt..], &other[prompt..]].map(<[u32]>::to_vec)
}

/// The numbers of tokens of the chosen and the rejected response that are kept of an entry.
fn kept(entry: &Entry, document: Option<Document>) -> Result<[usize; 2]> {
    let rest = entry.rest as usize;
    let Some(document) = document else { return Ok([rest - rest / 2, rest / 2]) };
    let lengths = document.lengths()?;
    // Longer responses were both cut to the same length.
    let short = lengths[1].min(lengths[2]).min(rest / 2);
    Ok(if lengths[1] <= lengths[2] { [short, rest - short] } else { [rest - short, short] })
}

impl Row for PairRow {
    const KIND: RowKind = RowKind::Pair;

    fn longest(entry: &Entry, document: Option<Document>) -> Result<usize> {
        let [chosen, rejected] = kept(entry, document)?;
        Ok((entry.end - entry.start) as usize + chosen.max(rejected))
    }

    fn parts(&self) -> Vec<(&[u32], bool)> {
        let (prompt, chosen) = self.chosen.split_at(self.prompt_tokens);
        vec![(prompt, false), (chosen, true), (&self.rejected[self.prompt_tokens..], false)]
    }

    fn label(&self) -> String {
        self.label.clone()
    }

    fn sequences(&self) -> Vec<usize> {
        vec![self.chosen.len(), self.rejected.len()]
    }

    fn read(entry: &Entry, document: Option<Document>, _tokenizer: &Tokenizer) -> Result<Self> {
        let (prompt_tokens, [chosen, rejected]) = ((entry.end - entry.start) as usize, kept(entry, document)?);
        let Some(document) = document else {
            let side = |tokens| vec![0; prompt_tokens + tokens];
            let (chosen, rejected, images) = (side(chosen), side(rejected), entry.images(None)?);
            return Ok(Self { prompt_tokens, chosen, rejected, images, ..Self::default() });
        };
        let sequences = document.sequences()?;
        let prompt = &sequences[0][entry.start as usize..entry.end as usize];
        let side = |i: usize, tokens: usize| [prompt, &sequences[i][..tokens]].concat();
        let label = document.label()?;
        let margin = label.parse().unwrap_or(0.0);
        let [chosen, rejected] = [side(1, chosen), side(2, rejected)];
        Ok(Self {
            id: document.id(),
            prompt_tokens,
            chosen,
            rejected,
            margin,
            images: entry.images(Some(document))?,
            label,
        })
    }
}
