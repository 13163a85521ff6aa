//! Checks of a model directory by itself: its files, its values and its tokenizer.

use super::page::Check;
use crate::error::{Error, Result, format_bytes};
use crate::metrics::counted;
use crate::model::load::ModelFiles;
use crate::model::{Arch, OnDisk};
use crate::text::Tokenizer;
use std::path::Path;

/// A text that shows how a tokenizer treats words, digits, signs and other scripts.
pub const TEXT: &str = "The quick brown fox counts: 12 + 345 = 357, then 3.5% of 1,000.\n\nfn main() { let x = [1, 2]; }\n\
                        Grüße, 你好, мир! \"Are the logits equal?\" he asked; she computed them again.";

/// Checks that config.json describes a known model, and that the files hold all of its tensors.
pub fn check(dir: &Path) -> Vec<Check> {
    let read = Arch::read(dir);
    let (arch, warnings) = match read {
        Ok(read) => read,
        Err(error) => return vec![Check::of("files", Err(error))],
    };
    let complete = || -> Result<String> {
        ModelFiles { dir, adapter: None, arch: &arch, head: arch.head }.source()?;
        let found = OnDisk::read(dir, &arch)?.ok_or_else(|| Error::data("there are no safetensors files"))?;
        let types = found.by_type.iter().map(|(dtype, tensors)| {
            format!("{} in {dtype} ({})", counted(tensors.count, "tensor"), format_bytes(tensors.bytes))
        });
        let types = types.collect::<Vec<_>>().join(", ");
        Ok(format!("{}, complete; {}, {types}", counted(found.files, "file"), arch.family.causal))
    };
    let with_warnings = |text: String| std::iter::once(text).chain(warnings).collect::<Vec<_>>().join("\n");
    let files = Check::of("files", complete().map(with_warnings));
    if files.has_failed() { vec![files] } else { vec![files, of_tokenizer(dir, &arch)] }
}

/// Compares a directory's tokenizer with the model's vocabulary and special tokens.
fn of_tokenizer(dir: &Path, arch: &Arch) -> Check {
    const NAME: &str = "tokenizer";
    let tokenizer = match Tokenizer::find(dir) {
        Ok(Some(tokenizer)) => tokenizer,
        Ok(None) => return Check::skipped(NAME, "there is no tokenizer.json"),
        Err(error) => return Check::of(NAME, Err(error)),
    };
    let (tokens, embedded) = (tokenizer.vocabulary(), arch.vocabulary);
    if tokens > embedded {
        let text = format!("foreign: the tokenizer has {tokens} tokens, but the model embeds {embedded}");
        return Check::failed(NAME, text);
    }
    // The first of them is the tokenizer's own.
    let own_end = tokenizer.eos_ids().first().copied();
    let has_other_end = own_end.is_some_and(|end| !arch.eos_tokens.is_empty() && !arch.eos_tokens.contains(&end));
    let has_other_begin = tokenizer.bos_id().zip(arch.bos_token).is_some_and(|(own, of_model)| own != of_model);
    let ends = || {
        let [own, model] =
            [own_end.into_iter().collect::<Vec<_>>(), arch.eos_tokens.clone()].map(|ids| format!("{ids:?}"));
        format!("its end token is {own}, the model's {model}")
    };
    if has_other_end && has_other_begin {
        let begins = [tokenizer.bos_id(), arch.bos_token].map(|id| id.map_or(String::new(), |id| id.to_string()));
        let [own, model] = begins;
        let text = format!("foreign: its begin token is {own}, the model's {model}; {}", ends());
        return Check::failed(NAME, text);
    }
    let more = match embedded - tokens {
        0 => "as many as the model embeds".to_owned(),
        more => format!("the model embeds {more} more"),
    };
    let other_end = if has_other_end { format!("; {}", ends()) } else { String::new() };
    Check::ok(NAME, format!("{} ({more}){other_end}", counted(tokens, "token")))
}

/// Compares two tokenizers on shared tokens, and on a text.
///
/// # Errors
/// The errors of `Tokenizer::find`.
pub fn compare_tokenizers(a: &Path, b: &Path) -> Result<Option<Check>> {
    const NAME: &str = "tokenizers";
    let (Some(own), Some(other)) = (Tokenizer::find(a)?, Tokenizer::find(b)?) else { return Ok(None) };
    if own.sha256() == other.sha256() {
        return Ok(Some(Check::ok(NAME, "equal")));
    }
    if !own.agrees_with(&other) {
        return Ok(Some(Check::failed(NAME, format!("foreign: {} has other ids for the same tokens", b.display()))));
    }
    let [x, y] = [own.encode(TEXT, true)?, other.encode(TEXT, true)?];
    Ok(Some(match differs(&x, &y) {
        None => Check::ok(NAME, "they differ, but give the same tokens to a text with words, numbers and code"),
        Some(at) => {
            Check::failed(NAME, format!("foreign: a text has other tokens from token {at} on: {}", shown(&x, &y, at)))
        }
    }))
}

/// Compares the tokens of a text with those of a dump.
///
/// # Errors
/// The errors of `Tokenizer::encode`.
pub fn compare_text(dir: &Path, text: &str, ids: &[u32]) -> Result<Option<Check>> {
    const NAME: &str = "tokenizer";
    let Some(tokenizer) = Tokenizer::find(dir)? else { return Ok(None) };
    let own = tokenizer.encode(text, true)?;
    Ok(Some(match differs(&own[..own.len().min(ids.len())], ids) {
        None => Check::ok(NAME, format!("the dump's text has the same {} tokens here", ids.len())),
        Some(at) => Check::failed(
            NAME,
            format!("foreign: the dump's text has other tokens here from token {at} on: {}", shown(&own, ids, at)),
        ),
    }))
}

fn differs(a: &[u32], b: &[u32]) -> Option<usize> {
    let same = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    (same < a.len().max(b.len())).then_some(same)
}

fn shown(a: &[u32], b: &[u32], at: usize) -> String {
    let of = |ids: &[u32]| format!("{:?}", &ids[at.min(ids.len())..(at + 3).min(ids.len())]);
    format!("{} and {}", of(a), of(b))
}
