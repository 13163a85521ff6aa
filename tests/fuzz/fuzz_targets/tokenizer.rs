//! `tokenizer.json` and the small files next to it.

use crate::place;
use rlhf_hpc::text::Tokenizer;
use serde_json::{Value, json};

const FILES: [&str; 4] =
    ["t/tokenizer.json", "t/tokenizer_config.json", "t/special_tokens_map.json", "t/added_tokens.json"];

/// Loads the input, and converts a text to tokens and back.
pub fn run(data: &[u8]) {
    place::write_all(FILES, place::cut(data));
    let Ok(tokenizer) = Tokenizer::load(&place::path("t")) else { return };
    let tokens = tokenizer.encode("Hello, aab  <s> ﷺ é\t1234 + 5?\n", true);
    drop(tokens.and_then(|tokens| tokenizer.decode(&tokens, false)));
    let ids: Vec<u32> = (0..tokenizer.vocabulary().min(50) as u32).collect();
    drop(tokenizer.decode(&ids, true));
    drop(tokenizer.marked([(&ids[..], true)]));
    tokenizer.turn_end(&ids);
}

fn tokenizer(model: Value, parts: &[(&str, Value)]) -> Vec<u8> {
    let added = |id: u32, content: &str, special: bool| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": true,
            "normalized": !special, "special": special})
    };
    let mut tokenizer = json!({"version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [added(8, "<s>", true), added(9, "</s>", true), added(10, "aab", false)], "normalizer": null,
        "pre_tokenizer": null, "post_processor": null, "decoder": null, "model": model});
    for (name, part) in parts {
        tokenizer[*name] = part.clone();
    }
    tokenizer.to_string().into_bytes()
}

/// One tokenizer for each kind of model, with different parts.
pub fn seeds() -> Vec<Vec<u8>> {
    let bpe = json!({"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": true, "ignore_merges": false,
        "vocab": {"a": 0, "b": 1, "▁": 2, "aa": 3, "ab": 4, "▁a": 5, "<0x31>": 6, "H": 7}, "merges": [["a", "a"], ["▁", "a"]]});
    let words = json!({"type": "WordPiece", "vocab": {"a": 0, "##b": 1, "?": 2}, "unk_token": "?",
        "continuing_subword_prefix": "##", "max_input_chars_per_word": 100});
    let unigram = json!({"type": "Unigram", "unk_id": 0, "vocab": [["?", -1.0], ["a", -2.5], ["▁", -3.0]], "byte_fallback": false});
    let level = json!({"type": "WordLevel", "vocab": {"a": 0, "?": 1, "Hello": 2}, "unk_token": "?"});
    let replace = |from: Value, to: &str| json!({"type": "Replace", "pattern": from, "content": to});
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true});
    let split = json!({"type": "Split", "pattern": {"Regex": "\\d{1,3}|\\s+(?!\\S)|\\w+"}, "behavior": "Isolated", "invert": false});
    let space = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true});
    let begin = json!({"SpecialToken": {"id": "<s>", "type_id": 0}});
    let text = json!({"Sequence": {"id": "A", "type_id": 0}});
    let around = json!({"type": "TemplateProcessing", "single": [begin, text], "pair": [text],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [8], "tokens": ["<s>"]}}});
    let sequence = |list: &str, parts: Value| json!({"type": "Sequence", list: parts});
    let charsmap = json!({"type": "Precompiled", "precompiled_charsmap": "DAAAAAAEAAAAAAAAYQAAAGEA"});
    let llama = [
        (
            "normalizer",
            sequence("normalizers", json!([{"type": "Prepend", "prepend": "▁"}, replace(json!({"String": " "}), "▁")])),
        ),
        ("post_processor", around),
        (
            "decoder",
            sequence(
                "decoders",
                json!([replace(json!({"String": "▁"}), " "), {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]),
            ),
        ),
    ];
    let qwen = [
        ("normalizer", json!({"type": "NFC"})),
        ("pre_tokenizer", sequence("pretokenizers", json!([split, bytes.clone()]))),
        ("decoder", bytes),
    ];
    let bert = [
        (
            "normalizer",
            json!({"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true}),
        ),
        ("pre_tokenizer", json!({"type": "BertPreTokenizer"})),
        ("decoder", json!({"type": "WordPiece", "prefix": "##", "cleanup": true})),
    ];
    let t5 = [
        (
            "normalizer",
            sequence("normalizers", json!([charsmap, {"type": "NFKC"}, replace(json!({"Regex": " {2,}"}), " ")])),
        ),
        ("pre_tokenizer", space.clone()),
        ("decoder", space),
    ];
    let settings = json!({"eos_token": "</s>", "bos_token": {"content": "<s>", "special": true}, "tokenizer_class": "LlamaTokenizer",
        "added_tokens_decoder": {"8": {"content": "<s>", "special": true}}, "chat_template": "{{ messages[0].content }}"});
    let more = json!({"additional_special_tokens": ["<x>"], "pad_token": "</s>"});
    vec![
        place::join(&[
            &tokenizer(bpe.clone(), &llama),
            settings.to_string().as_bytes(),
            more.to_string().as_bytes(),
            br#"{"<y>": 11}"#,
        ]),
        tokenizer(bpe, &qwen),
        tokenizer(words, &bert),
        tokenizer(unigram, &t5),
        tokenizer(level, &[("pre_tokenizer", json!({"type": "Whitespace"}))]),
    ]
}
