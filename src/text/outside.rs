//! Additions of the files next to `tokenizer.json`: tokens, the names of special tokens, and settings of the
//! tokenizer's class. The rules are those of transformers 5.

use std::path::Path;

use serde_json::{Map, Value};
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence as Decoders;
use tokenizers::decoders::strip::Strip;
use tokenizers::models::ModelWrapper;
use tokenizers::normalizers::Replace;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};
use tokenizers::{AddedToken, NormalizerWrapper, Tokenizer};

use super::chat::{self, token_text};
use crate::error::{Error, Result};
use crate::sys::{files, stderr};

const SETTINGS: &str = "tokenizer_config.json";
const SPECIAL: &str = "special_tokens_map.json";
const ADDED: &str = "added_tokens.json";
/// Tokens by id, in `tokenizer_config.json`.
const DECODER: &str = "added_tokens_decoder";
/// Lists of special tokens without a name, or objects of named ones.
const LISTS: [&str; 3] = ["extra_special_tokens", "additional_special_tokens", "model_specific_special_tokens"];
/// The names of special tokens, in the order in which new tokens get their ids.
const NAMES: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Keys of `tokenizer_config.json` that the program uses.
const USED: [&str; 8] = [
    DECODER,
    "tokenizer_class",
    "add_prefix_space",
    "legacy",
    "split_special_tokens",
    "add_bos_token",
    "add_eos_token",
    "chat_template",
];
/// Keys that change no token of a text.
const IRRELEVANT: [&str; 41] = [
    // Truncation and padding: this program does both itself.
    "model_max_length",
    "max_length",
    "max_len",
    "max_model_input_sizes",
    "stride",
    "truncation",
    "truncation_side",
    "truncation_strategy",
    "padding",
    "padding_side",
    "pad_to_multiple_of",
    "pad_token_type_id",
    "pad_token_id",
    // The text that `decode` returns. transformers 5 ignores the first for tokenizers with tokenizer.json, too.
    "clean_up_tokenization_spaces",
    "spaces_between_special_tokens",
    "errors",
    // The slow tokenizer, which tokenizer.json replaces.
    "sp_model_kwargs",
    "tokenizer_file",
    "vocab_file",
    "merges_file",
    "added_tokens_file",
    "special_tokens_map_file",
    "slow_tokenizer_class",
    "from_slow",
    "use_fast",
    // The origin of the tokenizer, and the code to load it.
    "name_or_path",
    "tokenizer_type",
    "processor_class",
    "auto_map",
    "init_inputs",
    "backend",
    "is_local",
    "local_files_only",
    "device_map",
    "trust_remote_code",
    "transformers_version",
    "unsloth_fixed",
    // The form of results, and the inputs of templates and of answer parsers.
    "model_input_names",
    "use_default_system_prompt",
    "response_schema",
    "response_template",
];

/// A token that another file defines.
struct Outside {
    token: AddedToken,
    /// Its id, if the file names one.
    id: Option<u32>,
    file: &'static str,
}

/// The small files of a model directory that complete `tokenizer.json`.
pub(super) struct SmallFiles {
    pub settings: Map<String, Value>,
    special: Map<String, Value>,
    added: Map<String, Value>,
    pub generation: Map<String, Value>,
    pub config: Map<String, Value>,
}

impl SmallFiles {
    pub fn read(dir: &Path) -> Result<Self> {
        let [settings, special, added, generation, config] =
            [SETTINGS, SPECIAL, ADDED, "generation_config.json", "config.json"]
                .map(|name| files::read_object(&dir.join(name)).map(Option::unwrap_or_default));
        Ok(Self { settings: settings?, special: special?, added: added?, generation: generation?, config: config? })
    }

    /// `special_tokens_map.json` replaces the names of `tokenizer_config.json`, unless that file lists its tokens.
    fn by_precedence(&self) -> [(&'static str, &Map<String, Value>); 2] {
        let (settings, special) = ((SETTINGS, &self.settings), (SPECIAL, &self.special));
        if self.settings.contains_key(DECODER) { [settings, special] } else { [special, settings] }
    }

    /// The file that names a special token, and the value there. Null means that there is none.
    fn named(&self, name: &str) -> Option<(&'static str, &Value)> {
        self.by_precedence().into_iter().find_map(|(file, object)| Some((file, object.get(name)?)))
    }

    /// The text of a special token, such as `eos_token`.
    pub fn special_token(&self, name: &str) -> Option<String> {
        self.named(name).and_then(|(_, token)| token_text(token))
    }

    /// The special tokens by their names, as variables of a chat template.
    pub fn special_tokens(&self) -> Map<String, Value> {
        chat::special_tokens(self.by_precedence().into_iter().rev().map(|(_, file)| file))
    }

    /// Changes `inner`, which was read from `json`, to the tokenizer that transformers makes of the whole directory.
    /// Returns a description of the changes, which is empty if there are none.
    ///
    /// # Errors
    /// `Data` if a token cannot have the id that a file names.
    pub fn complete(&self, inner: &mut Tokenizer, json: &[u8]) -> Result<String> {
        let failed = |e: tokenizers::Error| Error::data(e.to_string());
        let mut changes = self.apply_class(inner, json).map_err(failed)?;
        let (listed, outside) = (inner.get_added_tokens_decoder(), self.tokens()?);
        let is_new = |outside: &&Outside| {
            let found = inner.token_to_id(&outside.token.content).and_then(|id| listed.get(&id));
            // A name without an id changes no flag of a token that is listed.
            found.is_none_or(|found| outside.id.is_some() && *found != outside.token)
        };
        let new: Vec<AddedToken> = outside.iter().filter(is_new).map(|outside| outside.token.clone()).collect();
        if !new.is_empty() {
            inner.add_tokens(new.clone()).map_err(failed)?;
            changes.extend(new.iter().map(|token| format!("{token:?}")));
        }
        for Outside { token: AddedToken { content, .. }, id, file } in &outside {
            let got = inner.token_to_id(content);
            if let Some(id) = id.filter(|id| got != Some(*id)) {
                let got = got.map_or("none".to_owned(), |got| got.to_string());
                return Err(Error::data(format!("{file}: the token {content:?} has the id {id}, but it gets {got}"))
                    .hint(
                        "save the tokenizer again with `save_pretrained`, which writes all tokens to tokenizer.json",
                    ));
            }
        }
        if self.settings.get("split_special_tokens") == Some(&Value::Bool(true)) {
            inner.set_encode_special_tokens(true);
            changes += "split";
        }
        Ok(changes)
    }

    /// The tokens of all files, in the order in which new ones get their ids.
    fn tokens(&self) -> Result<Vec<Outside>> {
        let wrong = |file: &str, what: String| Error::data(format!("{file}: {what}"));
        let mut unlisted = Vec::new();
        for name in NAMES {
            unlisted.extend(self.named(name));
        }
        for (file, object) in self.by_precedence() {
            let is_token = |(key, value): &(&String, &Value)| {
                key.ends_with("_token") && value.is_string() && !NAMES.contains(&key.as_str())
            };
            unlisted.extend(object.iter().filter(is_token).map(|(_, token)| (file, token)));
            for list in LISTS.iter().filter_map(|list| object.get(*list)) {
                let named = list.as_object().into_iter().flat_map(Map::values);
                unlisted.extend(list.as_array().into_iter().flatten().chain(named).map(|token| (file, token)));
            }
        }
        let special: Vec<Outside> = unlisted
            .into_iter()
            .filter_map(|(file, value)| Some(Outside { token: added(value, true)?, id: None, file }))
            .collect();
        let is_special = |text: &str| special.iter().any(|outside| outside.token.content == text);

        let mut listed = Vec::new();
        for (key, value) in self.settings.get(DECODER).and_then(Value::as_object).into_iter().flatten() {
            let id = key
                .parse()
                .map_err(|_| wrong(SETTINGS, format!("{DECODER} has the key {key:?}, which is no token id")))?;
            let token = added(value, value.as_str().is_some_and(&is_special));
            let token =
                token.ok_or_else(|| wrong(SETTINGS, format!("{DECODER}: the token of id {key} has no content")))?;
            let special = token.special || is_special(&token.content);
            listed.push(Outside { token: AddedToken { special, ..token }, id: Some(id), file: SETTINGS });
        }
        for (text, id) in &self.added {
            let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
            let id = id.ok_or_else(|| wrong(ADDED, format!("the id of {text:?} must be a token id")))?;
            if !listed.iter().any(|outside| outside.token.content == *text) {
                listed.push(Outside {
                    token: AddedToken::from(text.as_str(), is_special(text)),
                    id: Some(id),
                    file: ADDED,
                });
            }
        }
        listed.sort_by_key(|outside| outside.id);
        Ok(listed.into_iter().chain(special).collect())
    }

    /// The settings of a class that change the parts of `tokenizer.json`.
    fn apply_class(&self, inner: &mut Tokenizer, json: &[u8]) -> tokenizers::Result<String> {
        let text = |object: &Map<String, Value>, key: &str| object.get(key).and_then(Value::as_str).map(str::to_owned);
        let class = text(&self.settings, "tokenizer_class").or_else(|| text(&self.config, "tokenizer_class"));
        let class = class.as_deref().map(|class| class.trim_end_matches("Fast"));
        let model_type = text(&self.config, "model_type");
        let prefix = self.settings.get("add_prefix_space").and_then(Value::as_bool);
        let is_byte_level = || json.windows(11).any(|word| word == b"\"ByteLevel\"");
        match (model_type.as_deref(), class) {
            (Some("mistral"), _) => Ok(String::new()),
            (Some("qwen2"), _) | (Some("qwen3"), None) | (_, Some("GPT2Tokenizer" | "Qwen2Tokenizer")) => {
                Ok(set_prefix_space(inner, prefix.unwrap_or(false)))
            }
            (_, Some("LlamaTokenizer")) if matches!(inner.get_model(), ModelWrapper::BPE(_)) && !is_byte_level() => {
                let is_legacy = self.settings.get("legacy").and_then(Value::as_bool).unwrap_or(false);
                let scheme = match (prefix.unwrap_or(true), is_legacy) {
                    (false, _) => PrependScheme::Never,
                    (true, true) => PrependScheme::Always,
                    (true, false) => PrependScheme::First,
                };
                as_llama(inner, scheme)?;
                Ok(format!("llama {scheme:?}"))
            }
            _ => Ok(String::new()),
        }
    }

    /// Warns about keys that nothing reads, and about files that disagree.
    pub fn warn(&self, dir: &Path) {
        let is_token = |key: &str| key.ends_with("_token") || LISTS.contains(&key);
        let known = |key: &str| is_token(key) || USED.contains(&key) || IRRELEVANT.contains(&key);
        stderr::warn_of_keys(&dir.join(SETTINGS), &self.settings, known);
        stderr::warn_of_keys(&dir.join(SPECIAL), &self.special, is_token);
        for name in ["bos_token", "eos_token"] {
            let [first, second] =
                self.by_precedence().map(|(file, object)| (file, object.get(name).and_then(token_text)));
            if let ((file, Some(used)), (other, Some(unused))) = (first, second)
                && used != unused
            {
                let dir = dir.display();
                stderr::warn_once(&format!(
                    "{dir}: {name} is {used:?} in {file} and {unused:?} in {other}; using {used:?}"
                ));
            }
        }
    }
}

/// A token as a text, or as an object with flags.
fn added(value: &Value, is_special: bool) -> Option<AddedToken> {
    let flag = |name: &str| value.get(name).and_then(Value::as_bool);
    let special = is_special || flag("special").unwrap_or(false);
    Some(AddedToken {
        content: token_text(value).filter(|text| !text.is_empty())?,
        single_word: flag("single_word").unwrap_or(false),
        lstrip: flag("lstrip").unwrap_or(false),
        rstrip: flag("rstrip").unwrap_or(false),
        normalized: flag("normalized").unwrap_or(!special),
        special,
    })
}

/// Sets `add_prefix_space` of the byte-level parts. Returns a description of the change.
fn set_prefix_space(inner: &mut Tokenizer, value: bool) -> String {
    let Some(mut parts) = inner.get_pre_tokenizer().cloned() else { return String::new() };
    let mut changed = false;
    let mut set = |part: &mut PreTokenizerWrapper| {
        if let PreTokenizerWrapper::ByteLevel(bytes) = part {
            changed |= bytes.add_prefix_space != value;
            bytes.add_prefix_space = value;
        }
    };
    match &mut parts {
        PreTokenizerWrapper::Sequence(all) => all.as_mut().iter_mut().for_each(&mut set),
        one => set(one),
    }
    if !changed {
        return String::new();
    }
    inner.with_pre_tokenizer(Some(parts));
    format!("prefix {value}")
}

/// Sets the parts that the class `LlamaTokenizer` sets, regardless of `tokenizer.json`.
fn as_llama(inner: &mut Tokenizer, scheme: PrependScheme) -> tokenizers::Result<()> {
    inner.with_normalizer(None::<NormalizerWrapper>)?;
    inner.with_pre_tokenizer(Some(Metaspace::new('▁', scheme, false)));
    let mut decoders = vec![Replace::new("▁", " ")?.into(), ByteFallback::new().into(), Fuse::new().into()];
    if scheme != PrependScheme::Never {
        decoders.push(Strip::new(' ', 1, 0).into());
    }
    inner.with_decoder(Some(Decoders::new(decoders)));
    Ok(())
}
