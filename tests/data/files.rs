//! Files of rows in other forms, and folders whose names give the splits.

use std::fs::{self, File};
use std::io::Write;
use std::sync::Arc;

use arrow_array::{ArrayRef, Float64Array, ListArray, RecordBatch, StringArray};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;
use rlhf_hpc::config::data::DataConfig;
use rlhf_hpc::data::RowKind;
use rlhf_hpc::error::{Error, Kind};
use serde_json::json;

use crate::data::fixture::{Fixture, config};
use crate::data::rows::shard;

fn labels(fixture: &Fixture, file: &str) -> Result<Vec<String>, Error> {
    let shard = shard(fixture, file, RowKind::Prompt, &config(""))?;
    (0..shard.documents()).map(|i| Ok(shard.meta(i)?.label)).collect()
}

fn gzip(text: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn a_list_crlf_a_byte_order_mark_and_gzip_give_the_same_rows_as_plain_lines() {
    let fixture = Fixture::new();
    let (one, two) = (r#"{"prompt": "a ] \" }", "answer": 1}"#, r#"{"prompt": "b", "answer": 2}"#);
    let lines = format!("{one}\n{two}\n");
    let pretty = format!("[\n  {},\n  {two}\n]\n", one.replace(", ", ",\n    "));
    for (name, bytes) in [
        ("rows.jsonl", lines.clone().into_bytes()),
        ("rows.json", format!("[{one},{two}]").into_bytes()),
        ("list.jsonl", pretty.clone().into_bytes()),
        ("pretty.json", pretty.into_bytes()),
        ("objects.json", format!("{}\n{two}\n", one.replace(", ", ",\n")).into_bytes()),
        ("crlf.jsonl", lines.replace('\n', "\r\n").into_bytes()),
        ("cr.jsonl", lines.replace('\n', "\r").into_bytes()),
        ("bom.jsonl", format!("\u{feff}{lines}").into_bytes()),
        ("rows.jsonl.gz", gzip(lines.as_bytes())),
        ("unnamed.jsonl", gzip(lines.as_bytes())),
        ("list.json.gz", gzip(format!("[{one},{two}]").as_bytes())),
    ] {
        fs::write(fixture.path(name), bytes).unwrap();
        assert_eq!(labels(&fixture, fixture.path(name).to_str().unwrap()).unwrap(), ["1", "2"], "{name}");
    }
}

#[test]
fn a_file_in_another_format_is_named_with_the_command_that_helps() {
    let fixture = Fixture::new();
    let lines = "{\"prompt\": \"a\", \"answer\": 1}\n";
    let long = format!("{{\"prompt\": \"{}\"}}\n", "a".repeat(65 << 20));
    for (name, bytes, words) in [
        ("rows.csv", &b"prompt,answer\n"[..], "CSV"),
        ("rows.tsv", b"prompt\tanswer\n", "TSV"),
        ("rows.jsonl.zst", b"", "zstd -d"),
        ("zstd.jsonl", &[0x28, 0xb5, 0x2f, 0xfd, 0][..], "zstd -d"),
        ("wide.jsonl", &[0xff, 0xfe, b'{', 0][..], "UTF-16"),
        ("table.jsonl", b"PAR1", "Parquet"),
        ("latin.jsonl", b"{\"prompt\": \"caf\xe9\", \"answer\": 1}", "latin.jsonl:1: the line is not UTF-8 text"),
        ("cut.json", b"[{\"prompt\": \"a\"", "cut.json:1: the row has no end: the file was truncated"),
        ("open.json", b"[{\"prompt\": \"a\", \"answer\": 1}", "open.json:2: the list of rows has no end"),
        ("more.json", b"[{\"prompt\": \"a\", \"answer\": 1}] {}", "the list of rows must end the file"),
        (
            "long.jsonl.gz",
            &gzip(&[lines.as_bytes(), long.as_bytes()].concat()),
            "long.jsonl.gz:2: a row must have at most",
        ),
    ] {
        fs::write(fixture.path(name), bytes).unwrap();
        let error = labels(&fixture, fixture.path(name).to_str().unwrap()).unwrap_err();
        assert!(error.kind == Kind::Data && error.to_string().contains(words), "{name}: {error}");
    }
    for (name, words) in
        [("acme/questions", "rlhf-hpc download --data acme/questions"), ("rows.csv", "pandas.read_csv")]
    {
        let error = fixture.prompts(&config(name), 0).unwrap_err();
        assert!(error.hint.as_ref().is_some_and(|hint| hint.contains(words)), "{name}: {error}");
    }
}

#[test]
fn nan_counts_as_missing_and_only_matters_in_a_field_that_is_used() {
    let fixture = Fixture::new();
    let row = r#"{"prompt": "NaN and -Infinity", "answer": 1, "score": NaN, "bounds": [-Infinity, Infinity]}"#;
    assert_eq!(labels(&fixture, &fixture.text("n.jsonl", row)).unwrap(), ["1"]);
    let error = labels(&fixture, &fixture.text("n.jsonl", r#"{"prompt": "a", "answer": NaN}"#)).unwrap_err();
    assert!(error.message.contains("n.jsonl:1: the row has no field \"answer\"") && error.message.contains("NaN"));
    let text = |text: &str| Arc::new(StringArray::from(vec![text.to_owned()])) as ArrayRef;
    let nan = Arc::new(Float64Array::from(vec![f64::NAN])) as ArrayRef;
    let path = table(&fixture, vec![("prompt", text("a")), ("answer", text("1")), ("score", Arc::clone(&nan))]);
    assert_eq!(labels(&fixture, &path).unwrap(), ["1"]);
    let error = labels(&fixture, &table(&fixture, vec![("prompt", text("a")), ("answer", nan)])).unwrap_err();
    assert!(error.message.contains("NaN"), "{error}");
}

fn table(fixture: &Fixture, columns: Vec<(&str, ArrayRef)>) -> String {
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let path = fixture.path("t.parquet");
    let settings = WriterProperties::builder().set_compression(Compression::ZSTD(ZstdLevel::default())).build();
    let mut writer = ArrowWriter::try_new(File::create(&path).unwrap(), batch.schema(), Some(settings)).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_row_that_decompresses_beyond_the_limit_is_rejected_and_its_file_is_named() {
    let fixture = Fixture::new();
    let text = |text: String| Arc::new(StringArray::from(vec![text])) as ArrayRef;
    let items: Vec<Option<Vec<Option<i8>>>> = vec![Some(vec![Some(1); 4 << 20])];
    let list = Arc::new(ListArray::from_iter_primitive::<arrow_array::types::Int8Type, _, _>(items)) as ArrayRef;
    for columns in [vec![("prompt", text("a".repeat(65 << 20)))], vec![("prompt", text("a".to_owned())), ("ids", list)]]
    {
        let path = table(&fixture, columns);
        assert!(fs::metadata(&path).unwrap().len() < 1 << 20);
        let error = labels(&fixture, &path).unwrap_err();
        assert!(error.kind == Kind::Data && error.message.contains("t.parquet:1: "), "{error}");
        assert!(error.message.contains("must have at most 64.0 MiB"), "{error}");
    }
}

#[test]
fn names_of_files_and_folders_give_splits_and_a_test_split_never_trains_silently() {
    let fixture = Fixture::new();
    let rows = |n: usize| {
        (0..n).map(|i| json!({"prompt": format!("{n} {i}"), "answer": 1}).to_string() + "\n").collect::<String>()
    };
    for (folder, train, test) in [
        ("plain", "train.jsonl", "test.jsonl"),
        ("numbered", "data/train-00000-of-00001-6ef3.jsonl", "data/test-00000-of-00001-ab12.jsonl"),
        ("folders", "train/a.jsonl", "test/a.jsonl"),
    ] {
        for (name, n) in [(train, 3), (test, 2)] {
            let path = fixture.path(folder).join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, rows(n)).unwrap();
        }
        let all = config(fixture.path(folder).to_str().unwrap());
        let error = fixture.prompts(&all, 0).unwrap_err();
        assert!(
            error.message.contains("has the splits test, train: all would be used for training"),
            "{folder}: {error}"
        );
        assert!(error.hint.as_ref().is_some_and(|hint| hint.contains("data.prompt_split = \"train\"")), "{error}");
        let held_out = DataConfig { eval_split: "test".to_owned(), ..all.clone() };
        let source = fixture.prompts(&held_out, 0).unwrap();
        assert_eq!((source.epoch_rows(), source.eval_rows(0).unwrap().len()), (3, 2), "{folder}");
        let only = DataConfig { prompt_split: "train".to_owned(), ..all };
        assert_eq!(fixture.prompts(&only, 0).unwrap().epoch_rows(), 3);
    }
    for name in ["configs/main/train.jsonl", "configs/other/train.jsonl"] {
        fs::create_dir_all(fixture.path(name).parent().unwrap()).unwrap();
        fs::write(fixture.path(name), rows(1)).unwrap();
    }
    let error = fixture.prompts(&config(fixture.path("configs").to_str().unwrap()), 0).unwrap_err();
    assert!(error.message.contains("configs/main") && error.message.contains("configs/other"), "{error}");
}

#[test]
fn a_missing_label_that_a_rule_needs_is_reported_when_the_data_are_opened() {
    let fixture = Fixture::new();
    let file = fixture.text("q.jsonl", "{\"prompt\": \"a\", \"answer\": 1}\n{\"prompt\": \"b\", \"answer\": null}\n");
    let error = fixture.prompts(&config(&file), 0).unwrap_err();
    assert!(error.message.contains("q.jsonl:2: the row has no field \"answer\""), "{error}");
    let unnamed = DataConfig { label_key: String::new(), ..config(&file) };
    let error = fixture.prompts(&unnamed, 0).unwrap().check_labels().unwrap_err();
    assert!(error.message.contains("q.jsonl:1: the row has no label"), "{error}");
    assert!(error.hint.is_some_and(|hint| hint.contains("data.label_key")));
}
