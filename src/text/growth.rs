//! The factor by which the parts of a `tokenizer.json` can lengthen a text.

use serde::Serialize;
use serde_json::Value;

/// The most bytes that `part` (a normalizer, pre-tokenizer, post-processor or decoder) makes of one byte. An upper
/// bound, so it is large for parts that follow each other and cannot in fact grow together.
pub(super) fn growth_of(part: Option<&impl Serialize>) -> f64 {
    part.map_or(1.0, |part| serde_json::to_value(part).map_or(f64::INFINITY, |part| of_value(&part)))
}

fn of_value(part: &Value) -> f64 {
    let length = |text: &Value| text.as_str().map_or(0, str::len) as f64;
    match part["type"].as_str().unwrap_or_default() {
        "Sequence" => part
            .as_object()
            .into_iter()
            .flat_map(|fields| fields.values())
            .filter_map(Value::as_array)
            .flatten()
            .map(of_value)
            .product(),
        // A regex can match nothing, and then the content is added to each byte.
        "Replace" => match &part["pattern"]["String"] {
            Value::String(pattern) if !pattern.is_empty() => (length(&part["content"]) / pattern.len() as f64).max(1.0),
            _ => 1.0 + length(&part["content"]),
        },
        "BPEDecoder" | "BertPreTokenizer" | "ByteFallback" | "Digits" | "Fuse" | "Punctuation" | "Split" | "Strip"
        | "StripAccents" | "Whitespace" | "WhitespaceSplit" => 1.0,
        // `ByteLevel`: a byte becomes a letter of two bytes, and a space may precede the text. The others: the maximum
        // in Unicode, for compositions by canonical equivalence, and for letters in lower case.
        "ByteLevel" | "NFC" | "NFD" | "Lowercase" => 3.0,
        "Prepend" => 1.0 + length(&part["prepend"]),
        // A space becomes one character, and the text may get another.
        "Metaspace" => 8.0,
        // Everything that these parts add is in the file.
        _ => 16.0 + part.to_string().len() as f64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn growth_factors_of_consecutive_parts_multiply() {
        let replace = |from: &str, to: &str| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
        let twice = json!({"type": "Sequence", "normalizers": [replace("a", "aa"), replace("a", "aa")]});
        assert_eq!(growth_of(Some(&twice)), 4.0);
        assert_eq!(growth_of(Some(&replace("aa", "a"))), 1.0);
        assert_eq!(growth_of(Some(&json!({"type": "Replace", "pattern": {"Regex": "x*"}, "content": "yyy"}))), 4.0);
        assert_eq!(growth_of(None::<&Value>), 1.0);
        assert!(growth_of(Some(&json!({"type": "Prepend", "prepend": "x".repeat(100)}))) > 100.0);
    }
}
