//! Parquet files and folders of `save_to_disk`, compared with JSONL of the same rows (`tests/golden/rows.py`).

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::{ArrayRef, NullArray, RecordBatch};
use arrow_ipc::writer::StreamWriter;
use rlhf_hpc::config::data::DataConfig;
use rlhf_hpc::data::input::{RawRow, RowReader, input_files};
use rlhf_hpc::data::{PairRow, RowKind};
use rlhf_hpc::error::{Error, Kind};
use serde_json::{Map, Value};

use crate::data::fixture::{Fixture, config};
use crate::data::rows::shard;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/rows").join(name)
}

fn name(file: &str) -> String {
    golden(file).to_str().unwrap().to_owned()
}

fn read(path: &Path) -> Result<Vec<Map<String, Value>>, Error> {
    let mut rows = Vec::new();
    for file in input_files(path)? {
        let mut reader = RowReader::open(&file.path)?;
        loop {
            let batch = reader.next_rows()?;
            if batch.is_empty() {
                break;
            }
            rows.extend(batch.iter().map(RawRow::parse).collect::<Result<Vec<_>, _>>()?);
        }
    }
    Ok(rows)
}

#[test]
fn a_row_of_parquet_or_arrow_equals_the_row_of_jsonl() {
    let rows = read(&golden("rows.jsonl")).unwrap();
    assert!(rows.len() == 10 && rows[1]["messages"][1]["tool_calls"].is_array() && !rows[1].contains_key("note"));
    for file in ["rows.parquet", "saved", "splits"] {
        assert_eq!(read(&golden(file)).unwrap(), rows, "{file}");
    }
    for file in ["zstd.parquet", "gzip.parquet"] {
        let few = read(&golden(file)).unwrap();
        assert_eq!(few.len(), 3);
        assert!(few.iter().zip(&rows).all(|(few, row)| few.iter().all(|(key, value)| row[key] == *value)), "{file}");
    }
}

#[test]
fn tokens_fields_and_lines_of_rows_do_not_depend_on_the_format() {
    let fixture = Fixture::new();
    for (kind, sequences) in [(RowKind::Prompt, 1), (RowKind::Demonstration, 2)] {
        let of = |file: &str| {
            let shard = shard(&fixture, &name(file), kind, &config("")).unwrap();
            let row = |i| (shard.document(i).unwrap(), shard.meta(i).unwrap());
            (0..shard.documents()).map(row).collect::<Vec<_>>()
        };
        let (jsonl, parquet, saved) = (of("rows.jsonl"), of("rows.parquet"), of("saved"));
        assert!(jsonl.len() == 10 && jsonl.iter().all(|(document, _)| document.len() == sequences));
        for (i, (document, meta)) in jsonl.iter().enumerate() {
            assert_eq!((document, &meta.label), (&parquet[i].0, &parquet[i].1.label));
            assert_eq!((document, &meta.label), (&saved[i].0, &saved[i].1.label));
            assert!(parquet[i].1.source.ends_with(&format!("rows.parquet:{}", i + 1)));
            let part = format!("saved/data-0000{}-of-00002.arrow:{}", i / 5, i % 5 + 1);
            assert!(saved[i].1.source.ends_with(&part), "{}", saved[i].1.source);
        }
    }
}

#[test]
fn splits_of_a_folder_train_and_evaluate_and_a_row_of_parquet_is_named() {
    let fixture = Fixture::new();
    let [prompt_split, eval_split] = ["train", "test"].map(str::to_owned);
    let of_splits = DataConfig { prompt_split, eval_split, ..config(&name("splits")) };
    let source = fixture.prompts(&of_splits, 1).unwrap();
    assert_eq!((source.epoch_rows(), source.eval_rows(0).unwrap().len()), (7, 3));
    let [chosen_key, rejected_key] = ["response", "note"].map(str::to_owned);
    let pairs = DataConfig { chosen_key, rejected_key, label_key: String::new(), ..config(&name("rows.parquet")) };
    let error = fixture.rows::<PairRow>(&pairs, 3).unwrap_err();
    assert!(error.message.contains("rows.parquet:2: ") && error.message.contains("no field \"note\""), "{error}");
}

#[test]
fn a_truncated_or_damaged_file_is_named_and_stops_nothing_else() {
    let fixture = Fixture::new();
    let stream = "saved/data-00000-of-00002.arrow";
    for (from, to) in [("rows.parquet", "cut.parquet"), (stream, "cut.arrow")] {
        let whole = fs::read(golden(from)).unwrap();
        let path = fixture.path(to);
        let read = |bytes: &[u8]| {
            fs::write(&path, bytes).unwrap();
            read(&path)
        };
        for end in (0..whole.len()).step_by(61).chain(whole.len() - 9..whole.len()) {
            let error = read(&whole[..end]).unwrap_err();
            assert!(error.kind == Kind::Data && error.message.contains(to), "{end} of {}: {error}", whole.len());
        }
        for at in (0..whole.len()).step_by(37) {
            let mut damaged = whole.clone();
            damaged[at] ^= 0xff;
            if let Err(error) = read(&damaged) {
                assert!(error.kind == Kind::Data && error.message.contains(to), "byte {at}: {error}");
            }
        }
    }
}

#[test]
fn inputs_without_rows_of_text_are_rejected_and_the_error_names_them() {
    let fixture = Fixture::new();
    let copy = |from: &str, to: &str| fs::copy(golden(from), fixture.path(to)).map(|_| ()).unwrap();
    fs::create_dir(fixture.path("empty")).unwrap();
    fs::create_dir(fixture.path("foreign")).unwrap();
    fs::create_dir(fixture.path("lacking")).unwrap();
    fixture.text("foreign/state.json", "{\"_data_files\": [{\"filename\": \"../rows.arrow\"}]}");
    copy("saved/state.json", "lacking/state.json");
    copy("saved/data-00000-of-00002.arrow", "lacking/data-00000-of-00002.arrow");
    copy("rows.parquet", "other.arrow");
    copy("rows.jsonl", "other.parquet");
    fixture.text("none.parquet", "");
    fixture.text("random.arrow", "ARROW1\0\0");
    for (path, words) in [
        (golden("image.parquet"), &["image.parquet:1: ", "the model reads text only"][..]),
        (fixture.path("empty"), &["empty: ", "has no dataset_dict.json"]),
        (fixture.path("foreign"), &["foreign: ", "\"../rows.arrow\" is not the name of a file in this folder"]),
        (fixture.path("lacking"), &["data-00001-of-00002.arrow"]),
        (fixture.path("other.arrow"), &["other.arrow: ", "not an Arrow stream"]),
        (golden("zstd.arrow"), &["zstd.arrow: ", "the Arrow stream is compressed"]),
        (fixture.path("other.parquet"), &["other.parquet: ", "not a complete Parquet file"]),
        (fixture.path("none.parquet"), &["none.parquet: ", "not a complete Parquet file (0 bytes)"]),
        (fixture.path("random.arrow"), &["random.arrow: ", "must be an Arrow stream (got the Arrow file format)"]),
    ] {
        let error = shard(&fixture, path.to_str().unwrap(), RowKind::Prompt, &config("")).unwrap_err();
        assert!(words.iter().all(|words| error.message.contains(words)), "{error}");
    }
}

#[test]
fn a_batch_of_any_number_of_rows_is_read_in_parts() {
    let fixture = Fixture::new();
    let path = fixture.path("nulls.arrow");
    let columns = [("text", Arc::new(NullArray::new(1 << 40)) as ArrayRef)];
    let batch = RecordBatch::try_from_iter_with_nullable(columns.map(|(name, column)| (name, column, true))).unwrap();
    let mut writer = StreamWriter::try_new(File::create(&path).unwrap(), &batch.schema()).unwrap();
    writer.write(&batch).unwrap();
    writer.finish().unwrap();
    assert!(fs::metadata(&path).unwrap().len() < 1000);
    let mut rows = RowReader::open(&path).unwrap();
    assert!((0..3).all(|_| rows.next_rows().unwrap().len() == 1024));
}
