//! Files of rows: JSONL, JSON, Parquet and Arrow, up to the tokens of the rows.

use crate::place;
use rlhf_hpc::config::data::DataConfig;
use rlhf_hpc::data::{RowKind, Reading, shard_rows};
use rlhf_hpc::text::Tokenizer;
use serde_json::{Map, Value, json};
use std::path::Path;
use std::sync::LazyLock;

/// A tokenizer of bytes, so that every text has tokens.
static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
    let vocabulary: Map<String, Value> = (0..256).map(|byte| (format!("<0x{byte:02X}>"), json!(byte))).collect();
    let model = json!({"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": true, "fuse_unk": false,
        "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null});
    let json = json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": null, "post_processor": null, "decoder": null, "model": model});
    place::write("bytes/tokenizer.json", json.to_string().as_bytes());
    place::write("bytes/chat_template.jinja", b"{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}");
    Tokenizer::load(&place::path("bytes")).expect("a good tokenizer")
});

/// Converts a file in the ways of jobs and of the shard verb.
fn convert(path: &Path) {
    for (kind, chat_template, label_key) in [
        (RowKind::Prompt, false, ""),
        (RowKind::Demonstration, true, ""),
        (RowKind::Pair, true, ""),
        (RowKind::Labelled, false, "label"),
        (RowKind::Steps, false, "labels"),
    ] {
        let config = DataConfig { chat_template, label_key: label_key.to_owned(), ..DataConfig::default() };
        let reading = Reading { config: &config, kind, tokenizer: &TOKENIZER, vocabulary: TOKENIZER.vocabulary() };
        drop(shard_rows(reading, &[(path, None)], &["all".to_owned()], &place::path("out")));
    }
}

pub fn json(data: &[u8]) {
    convert(&place::write("rows.json", data));
}

pub fn jsonl(data: &[u8]) {
    convert(&place::write("rows.jsonl", data));
}

pub fn parquet(data: &[u8]) {
    convert(&place::write("rows.parquet", data));
}

pub fn arrow(data: &[u8]) {
    convert(&place::write("rows.arrow", data));
}

const ROWS: &str = include_str!("../../golden/rows/rows.jsonl");

pub fn jsonl_seeds() -> Vec<Vec<u8>> {
    let short: String = ROWS.lines().take(2).map(|line| format!("{line}\n")).collect();
    let plain = "{\"prompt\": \"a\", \"response\": \"b\", \"label\": true, \"labels\": [1, 0]}\r\n\n\
                 {\"prompt\": [1, 2], \"response\": [3], \"chosen\": \"c\", \"rejected\": \"d\", \"x\": NaN}\n";
    vec![short.into_bytes(), plain.as_bytes().to_vec(), b"\xef\xbb\xbf{\"prompt\": \"\\ud83d\\ude00\"}".to_vec()]
}

pub fn json_seeds() -> Vec<Vec<u8>> {
    let lines: Vec<&str> = ROWS.lines().take(2).collect();
    let list = format!("[{}]", lines.join(",\n"));
    vec![list.into_bytes(), b"[{\"prompt\": \"a\", \"response\": \"}]\\\"\"}, {\"prompt\": -1e5}]".to_vec()]
}

pub fn parquet_seeds() -> Vec<Vec<u8>> {
    let files: [&[u8]; 4] = [
        include_bytes!("../../golden/rows/zstd.parquet"),
        include_bytes!("../../golden/rows/gzip.parquet"),
        include_bytes!("../../golden/rows/image.parquet"),
        include_bytes!("../../golden/rows/rows.parquet"),
    ];
    files.map(<[u8]>::to_vec).into()
}

pub fn arrow_seeds() -> Vec<Vec<u8>> {
    let files: [&[u8]; 2] = [
        include_bytes!("../../golden/rows/saved/data-00001-of-00002.arrow"),
        include_bytes!("../../golden/rows/splits/test/data-00000-of-00001.arrow"),
    ];
    files.map(<[u8]>::to_vec).into()
}
