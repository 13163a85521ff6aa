use std::fs;

use rlhf_hpc::error::Kind;
use rlhf_hpc::text::{StreamDecoder, Tokenizer, train_bpe};
use serde_json::{Value, json};

use crate::data::fixture::Fixture;
use crate::names;

#[test]
fn training_a_tokenizer_twice_gives_the_same_bytes() {
    let texts: Vec<String> = (0..3000_u64)
        .map(|i| {
            let words = ["sum", "aaaa", "difference", "aaab", "over", "under", "banana", "naïve", "große"];
            (0..6)
                .map(|j| words[((i * 2654435761 + j * 40503) >> 7) as usize % words.len()])
                .collect::<Vec<_>>()
                .join(" ")
        })
        .collect();
    let dir = tempfile::tempdir().unwrap();
    let train = |name: &str| {
        train_bpe(&texts, 340, &dir.path().join(name), &[]).unwrap();
        fs::read(dir.path().join(name).join("tokenizer.json")).unwrap()
    };
    let first = train("a");
    for name in ["b", "c", "d"] {
        assert!(train(name) == first);
    }
}

#[test]
fn decoding_inverts_encoding_digits_are_single_tokens_and_no_text_has_two_bos() {
    let fixture = Fixture::new();
    for text in ["what is 12+34?", "", " héllo — 日本語 🙂\n\t", "1234567890"] {
        let tokens = fixture.tokenizer.encode(text, true).unwrap();
        assert_eq!(tokens[0], fixture.tokenizer.bos_id().unwrap());
        assert_eq!(fixture.tokenizer.decode(&tokens, true).unwrap(), text);
        assert_eq!(fixture.tokenizer.decode_prompt(&tokens).unwrap(), text);
        assert_eq!(fixture.tokenizer.encode(text, false).unwrap(), tokens[1..]);
    }
    assert_eq!(fixture.tokenizer.encode("1234567890", false).unwrap().len(), 10);
    // A text with its own BOS is rejected.
    let error = fixture.tokenizer.encode("<|begin|>what", true).unwrap_err();
    assert_eq!(error.kind, Kind::Data);
    assert!(error.message.contains("two BOS"), "{error}");
    assert!(fixture.tokenizer.encode("<|begin|>what", false).is_ok());
}

#[test]
fn streamed_text_is_whole_characters_and_joins_to_the_decoded_text() {
    let fixture = Fixture::new();
    let text = "sum 🙂 of 日本語 and é, please? <|user|> x";
    let mut tokens = fixture.tokenizer.encode(text, true).unwrap();
    // The last character stays incomplete.
    tokens.extend(&fixture.tokenizer.encode("🙂", false).unwrap()[..2]);
    let mut stream = StreamDecoder::default();
    let mut pieces = Vec::new();
    for token in &tokens {
        pieces.push(stream.push(&fixture.tokenizer, *token).unwrap());
    }
    assert!(pieces.iter().all(|piece| !piece.contains('\u{fffd}')), "{pieces:?}");
    assert!(pieces.contains(&"🙂".to_owned()));
    pieces.push(stream.finish(&fixture.tokenizer).unwrap());
    assert_eq!(pieces.concat(), fixture.tokenizer.decode(&tokens, false).unwrap());
}

#[test]
fn the_first_end_token_is_the_tokenizers_own_and_those_of_the_model_follow() {
    let fixture = Fixture::new();
    let dir = fixture.path("tokenizer");
    assert_eq!(fixture.tokenizer.eos_ids(), [1]);
    fs::write(dir.join("config.json"), r#"{"eos_token_id": 4}"#).unwrap();
    assert_eq!(Tokenizer::load(&dir).unwrap().eos_ids(), [1, 4]);
    fs::write(dir.join("generation_config.json"), r#"{"eos_token_id": [3, 1]}"#).unwrap();
    assert_eq!(Tokenizer::load(&dir).unwrap().eos_ids(), [1, 3]);
    for wrong in ["\"1\"", "[1, \"3\"]", "1.5", "-2"] {
        fs::write(dir.join("generation_config.json"), format!("{{\"eos_token_id\": {wrong}}}")).unwrap();
        let error = Tokenizer::load(&dir).unwrap_err();
        assert!(error.message.contains("generation_config.json: eos_token_id must be"), "{error}");
    }
}

#[test]
fn tokens_and_settings_outside_tokenizer_json_give_the_ids_of_transformers() {
    let golden: Value = serde_json::from_str(include_str!("../golden/token_files.json")).unwrap();
    let texts: Vec<&str> = golden["texts"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    for case in golden["cases"].as_array().unwrap() {
        let dir = tempfile::tempdir().unwrap();
        let json = &golden["tokenizers"][case["tokenizer"].as_str().unwrap()];
        fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
        for (name, value) in case["files"].as_object().unwrap() {
            fs::write(dir.path().join(name), value.to_string()).unwrap();
        }
        match (Tokenizer::load(dir.path()), case["ids"].as_array()) {
            (Ok(tokenizer), Some(ids)) => {
                let own: Vec<_> = texts.iter().map(|text| tokenizer.encode(text, true).unwrap()).collect();
                assert_eq!(json!(own), json!(ids), "{}", case["files"]);
            }
            (Err(error), None) => assert!(error.message.contains("the token \"<|a|>\" has the id"), "{error}"),
            (own, ids) => panic!("{}: {ids:?}, but {own:?}", case["files"]),
        }
    }
}

#[test]
fn a_vocabulary_without_room_for_the_bytes_and_a_text_without_words_are_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let error = train_bpe(&["x".to_owned()], 100, dir.path(), &[]).unwrap_err();
    assert_eq!(error.kind, Kind::Usage);
    assert_eq!(train_bpe(&[String::new()], 300, dir.path(), &[]).unwrap_err().kind, Kind::Data);
}

#[test]
fn a_tokenizer_that_cannot_be_replaced_as_a_whole_leaves_no_mixture() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let train = |text: &str| train_bpe(&[text.to_owned()], 300, dir.path(), &["special_tokens_map.json"]);
    train("one one one").unwrap();
    fs::write(at("special_tokens_map.json"), "{}").unwrap();
    train("two two two").unwrap();
    assert!(!at("special_tokens_map.json").exists() && at("tokenizer.json").exists());
    // It cannot be removed.
    fs::create_dir(at("special_tokens_map.json")).unwrap();
    assert_eq!(train("three three three").unwrap_err().kind, Kind::Io);
    assert!(!at("tokenizer.json").exists(), "a new one next to a file of the old one");
    assert_eq!(names(dir.path()), ["special_tokens_map.json", "tokenizer_config.json"]);
}

/// A tokenizer of whole words with the spaces of SentencePiece, where the first space of a text is dropped.
#[test]
fn streamed_text_keeps_the_spaces_between_words_that_a_decoder_drops_in_front() {
    let space = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
    let special = json!([{"id": 4, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true}]);
    let words = json!({"type": "WordLevel", "unk_token": "?",
        "vocab": {"▁a": 0, "▁b": 1, "c": 2, "▁": 3, "<s>": 4, "?": 5}});
    let parts = [("added_tokens", special), ("pre_tokenizer", space.clone()), ("decoder", space), ("model", words)];
    let tokenizer = Tokenizer::load(by_hand(&parts).path()).unwrap();
    for tokens in [vec![0, 1, 1, 2, 0], vec![4, 0, 4, 1], vec![3, 0, 3, 3, 1, 2]] {
        let mut stream = StreamDecoder::default();
        let text: String = tokens.iter().map(|t| stream.push(&tokenizer, *t).unwrap()).collect();
        assert_eq!(text, tokenizer.decode(&tokens, false).unwrap(), "{tokens:?}");
        assert!(text.contains(" b"), "{text:?}");
    }
}

/// A tokenizer.json with a few words, and with `parts` of it replaced.
pub fn by_hand(parts: &[(&str, serde_json::Value)]) -> tempfile::TempDir {
    let mut tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": null, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"aa": 0, "?": 1}, "unk_token": "?"},
    });
    for (key, value) in parts {
        tokenizer[*key] = value.clone();
    }
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    dir
}

#[test]
fn a_tokenizer_that_panics_is_an_error_that_names_its_file() {
    let longer_than_its_tokens = json!({"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]],
        "continuing_subword_prefix": "####", "dropout": null, "unk_token": null, "end_of_word_suffix": null,
        "fuse_unk": false, "byte_fallback": false, "ignore_merges": false});
    let loads = by_hand(&[("model", longer_than_its_tokens)]);
    let encodes = by_hand(&[("pre_tokenizer", json!({"type": "FixedLength", "length": 0}))]);
    let decodes = by_hand(&[("decoder", json!({"type": "Strip", "content": "a", "start": 0, "stop": 100}))]);
    for (dir, words, error) in [
        (&loads, "is not a tokenizer", Tokenizer::load(loads.path()).map(drop).unwrap_err()),
        (&encodes, "cannot tokenize \"aa\"", Tokenizer::load(encodes.path()).unwrap().encode("aa", true).unwrap_err()),
        (&decodes, "cannot decode", Tokenizer::load(decodes.path()).unwrap().decode(&[0], true).unwrap_err()),
    ] {
        assert_eq!(error.kind, Kind::Data);
        let file = dir.path().join("tokenizer.json").display().to_string();
        assert!(error.message.starts_with(&file) && error.message.contains(words), "{error}");
    }
}

#[test]
fn a_pattern_whose_time_doubles_with_each_character_is_an_error() {
    let text = "a".repeat(1000) + "!";
    for pattern in ["(a|aa)+$", "(a+)+$", "(?:a|ab?|aa)*$"] {
        let split = json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
        let replace = json!({"type": "Replace", "pattern": {"Regex": pattern}, "content": "c"});
        for part in [("pre_tokenizer", split), ("normalizer", replace)] {
            let tokenizer = Tokenizer::load(by_hand(&[part]).path()).unwrap();
            let error = tokenizer.encode(&text, false).expect_err(pattern);
            assert_eq!(error.kind, Kind::Data);
            assert!(error.message.contains("retry-limit"), "{pattern}: {error}");
        }
    }
    // Each position of the text is within the limit of one match, their sum is not.
    let split = json!({"type": "Split", "pattern": {"Regex": "a*a*$"}, "behavior": "Isolated", "invert": false});
    let error = Tokenizer::load(by_hand(&[("pre_tokenizer", split)]).path()).unwrap().encode(&text, false).unwrap_err();
    assert!(error.message.contains("retry-limit"), "{error}");
}

#[test]
fn parts_that_describe_gigabytes_are_an_error_that_names_the_file() {
    let part = |list: &str, part: serde_json::Value| json!({"type": "Sequence", list: vec![part; 40]});
    let twice = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"});
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    let added = json!([{"id": 2, "content": "aaa", "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": true, "special": false}]);
    // The first four bytes are the length of a table of 2^30 units, of which there is none.
    let table = json!({"type": "Precompiled", "precompiled_charsmap": "/////w=="});
    for (at, parts) in [
        ("load", vec![("normalizer", table)]),
        ("load", vec![("normalizer", part("normalizers", twice.clone())), ("added_tokens", added)]),
        ("encode", vec![("normalizer", part("normalizers", twice.clone()))]),
        ("encode", vec![("pre_tokenizer", part("pretokenizers", bytes))]),
        ("decode", vec![("decoder", part("decoders", twice))]),
    ] {
        let (dir, name) = (by_hand(&parts), parts[0].0);
        let loaded = Tokenizer::load(dir.path());
        let error = match at {
            "load" => loaded.map(drop).unwrap_err(),
            "encode" => loaded.unwrap().encode("aä", true).map(drop).unwrap_err(),
            _ => loaded.unwrap().decode(&[0], false).map(drop).unwrap_err(),
        };
        let file = dir.path().join("tokenizer.json").display().to_string();
        assert_eq!(error.kind, Kind::Data, "{at} {name}");
        assert!(error.message.starts_with(&file) && error.message.contains("of memory"), "{at} {name}: {error}");
    }
}

#[test]
fn a_long_text_of_a_tokenizer_that_can_make_it_longer_gets_its_tokens() {
    let prepend = json!({"type": "Prepend", "prepend": "a".repeat(20)});
    let tokenizer = Tokenizer::load(by_hand(&[("normalizer", prepend)]).path()).unwrap();
    assert_eq!(tokenizer.encode(&"a".repeat(2 << 20), false).unwrap(), [1]);
}
