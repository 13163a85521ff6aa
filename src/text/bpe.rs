//! Training of a byte-level BPE, written as a directory that `transformers` loads as well.
//!
//! Sennrich et al., arXiv:1508.07909; bytes as the alphabet as in GPT-2. Each digit is its own token, as in Llama, so
//! that numbers of any length use the same ten tokens.

use std::fs;
use std::io::{ErrorKind, Write};
use std::path::Path;

use serde_json::json;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, TokenizerBuilder};

use crate::error::{Error, Result};
use crate::sys::files;

/// The token that begins every text; id 0.
pub const BOS: &str = "<|begin|>";
/// The token that ends every text; id 1.
pub const EOS: &str = "<|end|>";
/// The tokens that begin a turn of a chat; ids 2 to 4.
pub const ROLES: [&str; 3] = ["<|system|>", "<|user|>", "<|assistant|>"];

/// The smallest vocabulary: special tokens and the 256 bytes.
pub const VOCABULARY_MIN: usize = 5 + 256;

const TEMPLATE: &str = "{{ bos_token }}{% for message in messages %}\
    {% if message['role'] not in ['system', 'user', 'assistant'] %}\
    {{ raise_exception('a role is system, user or assistant, got ' + message['role']) }}{% endif %}\
    {{ '<|' + message['role'] + '|>' + message['content'] }}\
    {% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}";

const TOKENIZER: &str = "tokenizer.json";
const SETTINGS: &str = "tokenizer_config.json";

/// Learns at most `vocabulary` tokens from `texts` and writes `tokenizer.json` and `tokenizer_config.json` (with a chat
/// template) to `out`. Files there with the names `others` belong to a replaced tokenizer, and are removed. The same
/// texts in the same order result in the same bytes. Returns the size of the vocabulary, which is smaller if the texts
/// have no more pairs to merge.
pub fn train_bpe(texts: &[String], vocabulary: usize, out: &Path, others: &[&str]) -> Result<usize> {
    if vocabulary < VOCABULARY_MIN {
        return Err(Error::usage(format!(
            "the vocabulary must have at least {VOCABULARY_MIN} tokens for bytes and special tokens (got {vocabulary})"
        ))
        .hint("raise the size of the vocabulary"));
    }
    if texts.iter().all(String::is_empty) {
        return Err(Error::data("no text to train a tokenizer on"));
    }
    let refused = |e: tokenizers::Error| Error::data(format!("cannot train the tokenizer: {e}"));
    let pieces = || ByteLevel::new(false, true, true);
    let split: Vec<PreTokenizerWrapper> = vec![Digits::new(true).into(), pieces().into()];
    let mut tokenizer = TokenizerBuilder::<BPE, _, _, _, _>::new()
        .with_model(BPE::default())
        .with_normalizer(None::<tokenizers::NormalizerWrapper>)
        .with_pre_tokenizer(Some(Sequence::new(split)))
        .with_post_processor(None::<TemplateProcessing>)
        .with_decoder(Some(pieces()))
        .build()
        .map_err(refused)?;
    let special: Vec<AddedToken> =
        [BOS, EOS].iter().chain(&ROLES).map(|token| AddedToken::from(*token, true)).collect();
    let mut trainer = BpeTrainer::builder()
        .show_progress(false)
        .vocab_size(vocabulary)
        .min_frequency(2)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .special_tokens(special)
        .build();
    tokenizer.train(&mut trainer, texts.iter()).map_err(refused)?;
    let bos = tokenizer.token_to_id(BOS).ok_or_else(|| Error::fault("the trained tokenizer lost its BOS"))?;
    let begin = TemplateProcessing::builder()
        .try_single(format!("{BOS} $A"))
        .map_err(Error::data)?
        .special_tokens(vec![(BOS.to_owned(), bos)])
        .build()
        .map_err(|e| Error::fault(format!("the template of BOS: {e}")))?;
    tokenizer.with_post_processor(Some(begin));

    let settings = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "clean_up_tokenization_spaces": false,
        "chat_template": TEMPLATE,
    });
    write(out, &format!("{settings:#}\n"), &tokenizer.to_string(true).map_err(refused)?, others)?;
    Ok(tokenizer.get_vocab_size(true))
}

/// Replaces the tokenizer in `out`, and removes its `others`. At each moment the directory has the old tokenizer, none
/// or the new one: `tokenizer.json` is removed first and appears last, and a directory without it has no tokenizer.
fn write(out: &Path, settings: &str, tokenizer: &str, others: &[&str]) -> Result<()> {
    fs::create_dir_all(out).map_err(|e| Error::io("create", out, &e))?;
    let path = out.join(TOKENIZER);
    files::replace_with(&path, |file| {
        // Nothing old is removed before the new one is on the disk.
        let written = file.write_all(tokenizer.as_bytes()).and_then(|()| file.flush());
        written.and_then(|()| file.get_ref().sync_all()).map_err(|e| Error::io("write", &path, &e))?;
        for name in [TOKENIZER].iter().chain(others) {
            let old = out.join(name);
            match fs::remove_file(&old) {
                Err(e) if e.kind() != ErrorKind::NotFound => return Err(Error::io("remove", &old, &e)),
                _ => {}
            }
        }
        files::fsync_dir(out)?;
        files::write_atomic(&out.join(SETTINGS), settings.as_bytes())
    })
}
