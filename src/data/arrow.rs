//! Record batches of Parquet files and of Arrow streams, and their rows as JSON.

use std::path::Path;
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{Float16Type, Float32Type, Float64Type};
use arrow_array::{Array, ArrayRef, RecordBatch, downcast_integer_array};
use arrow_buffer::Buffer;
use arrow_ipc::reader::StreamDecoder;
use arrow_schema::{ArrowError, DataType, Field, Fields};
use bytes::Bytes;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::{Map, Number, Value};

use crate::comm::abort;
use crate::error::{Error, Result};
use crate::sys::map::Map as FileMap;

/// Rows decoded at once from a Parquet file. The writer of an Arrow stream sets its batch size.
const BATCH_ROWS: usize = 1024;
/// The end of a complete Arrow stream.
const END: [u8; 8] = [0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0];

/// The batches of a file, one after another.
pub struct Batches(Box<dyn Iterator<Item = Result<RecordBatch>>>);

impl Batches {
    pub fn parquet(path: &Path) -> Result<Self> {
        let bytes = Bytes::from_owner(FileMap::open(path)?);
        let wrong = |e: &dyn std::fmt::Display| {
            Error::data(format!("not a complete Parquet file ({} bytes): {e}", bytes.len()))
                .hint("copy the file again: it may be truncated, damaged or in another format")
        };
        let reader = guarded(|| {
            let builder = ParquetRecordBatchReaderBuilder::try_new(bytes.clone()).map_err(|e| wrong(&e))?;
            usable(builder.schema().fields(), "")?;
            builder.with_batch_size(BATCH_ROWS).build().map_err(|e| wrong(&e))
        });
        let mut reader = reader?;
        let mut rows = 0;
        Ok(Self::until_an_error(move || {
            let batch = guarded(|| reader.next().transpose().map_err(|e| damaged(rows, None, &e)));
            rows += batch.as_ref().map_or(0, |batch| batch.as_ref().map_or(0, RecordBatch::num_rows));
            batch
        }))
    }

    /// A stream as `save_to_disk` of Hugging Face's datasets writes it.
    pub fn arrow(path: &Path) -> Result<Self> {
        let map = FileMap::open(path)?;
        let bytes = map.len();
        if map.starts_with(b"ARROW1") {
            return Err(Error::data("must be an Arrow stream (got the Arrow file format)")
                .hint("write it with save_to_disk of Hugging Face's datasets, or as Parquet"));
        }
        if !map.starts_with(&END[..4]) {
            return Err(Error::data(format!("not an Arrow stream ({bytes} bytes)")));
        }
        if !map.ends_with(&END) {
            return Err(Error::data(format!(
                "the Arrow stream has no end marker at the end of the file, byte {bytes}"
            ))
            .hint("copy the file again: it was truncated"));
        }
        let (mut left, mut decoder) = (Buffer::from(Bytes::from_owner(map)), StreamDecoder::new());
        let (mut rows, mut is_checked) = (0, false);
        Ok(Self::until_an_error(move || {
            let at = bytes - left.len();
            let batch = guarded(|| {
                let decoded = decoder.decode(&mut left);
                if let (false, Some(schema)) = (is_checked, decoder.schema()) {
                    usable(schema.fields(), "")?;
                    is_checked = true;
                }
                let batch = decoded.map_err(|e| damaged(rows, Some(at), &e))?;
                if batch.is_none() {
                    decoder.finish().map_err(|e| damaged(rows, Some(at), &e))?;
                }
                Ok(batch)
            })?;
            rows += batch.as_ref().map_or(0, RecordBatch::num_rows);
            Ok(batch)
        }))
    }

    fn until_an_error(mut next: impl FnMut() -> Result<Option<RecordBatch>> + 'static) -> Self {
        let mut is_done = false;
        Self(Box::new(std::iter::from_fn(move || {
            let batch = if is_done { None } else { next().transpose() };
            is_done = !matches!(batch, Some(Ok(_)));
            batch
        })))
    }

    /// The next batch that has rows.
    pub fn next_batch(&mut self) -> Result<Option<Arc<RecordBatch>>> {
        let has_rows = |batch: &Result<RecordBatch>| batch.as_ref().map_or(true, |batch| batch.num_rows() > 0);
        Ok(self.0.find(has_rows).transpose()?.map(Arc::new))
    }
}

/// Runs `body`, which may panic on damaged bytes.
fn guarded<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    abort::caught(body).map_err(|e| if e.kind == crate::error::Kind::Fault { Error::data(e.message) } else { e })
}

fn damaged(rows: usize, byte: Option<usize>, error: &ArrowError) -> Error {
    let at = byte.map_or(String::new(), |byte| format!(", byte {byte}"));
    Error::data(format!("damaged after row {rows}{at}: {error}"))
}

/// Rejects columns that have no JSON form.
fn usable(fields: &Fields, within: &str) -> Result<()> {
    for field in fields {
        let name = format!("{within}{}", field.name());
        let mut of_type = field.data_type();
        if let DataType::Dictionary(_, values) = of_type {
            of_type = values;
        }
        match of_type {
            DataType::List(item) | DataType::LargeList(item) | DataType::FixedSizeList(item, _) => {
                usable(&vec![Field::clone(item).with_name("")].into(), &name)?;
            }
            DataType::Struct(fields) => usable(fields, &format!("{name}."))?,
            DataType::Null | DataType::Boolean | DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => {}
            known if known.is_integer() || known.is_floating() => {}
            other => {
                return Err(Error::data(format!("column {name:?} has the unsupported type {other}")).hint(
                    "remove the column with Dataset.remove_columns of Hugging Face's datasets, or DataFrame.drop \
                     of pandas",
                ));
            }
        }
    }
    Ok(())
}

/// Row `i` of a batch, as its line in a JSONL file would be. A null is a missing field.
pub fn row(batch: &RecordBatch, i: usize) -> Result<Map<String, Value>> {
    object(batch.schema_ref().fields(), batch.columns(), i)
}

fn object(fields: &Fields, columns: &[ArrayRef], i: usize) -> Result<Map<String, Value>> {
    let mut row = Map::new();
    for (field, column) in fields.iter().zip(columns) {
        let value = cell(column, field, i).map_err(|e| e.within(format!("column {:?}", field.name())))?;
        row.extend(value.map(|value| (field.name().clone(), value)));
    }
    Ok(row)
}

/// A value, `None` for null.
fn cell(column: &ArrayRef, field: &Field, i: usize) -> Result<Option<Value>> {
    if column.is_null(i) {
        return Ok(None);
    }
    let real =
        |x: f64| Number::from_f64(x).map(Value::Number).ok_or_else(|| Error::data(format!("{x} is not a JSON number")));
    Ok(Some(downcast_integer_array!(
        column => column.value(i).into(),
        DataType::Boolean => column.as_boolean().value(i).into(),
        DataType::Float16 => real(column.as_primitive::<Float16Type>().value(i).into())?,
        DataType::Float32 => real(column.as_primitive::<Float32Type>().value(i).into())?,
        DataType::Float64 => real(column.as_primitive::<Float64Type>().value(i))?,
        DataType::Utf8 => text(column.as_string::<i32>().value(i), field)?,
        DataType::LargeUtf8 => text(column.as_string::<i64>().value(i), field)?,
        DataType::Utf8View => text(column.as_string_view().value(i), field)?,
        DataType::List(item) => list(&column.as_list::<i32>().value(i), item)?,
        DataType::LargeList(item) => list(&column.as_list::<i64>().value(i), item)?,
        DataType::FixedSizeList(item, _) => list(&column.as_fixed_size_list().value(i), item)?,
        DataType::Struct(fields) => object(fields, column.as_struct().columns(), i)?.into(),
        DataType::Dictionary(..) => {
            let (words, keys) = (column.as_any_dictionary().values(), column.as_any_dictionary().keys());
            let key = cell(&keys.slice(i, 1), field, 0)?.and_then(|key| key.as_u64());
            return key.map_or(Ok(None), |key| cell(words, field, key as usize));
        }
        // Columns of other types were rejected.
        _ => return Ok(None),
    )))
}

fn list(items: &ArrayRef, field: &Field) -> Result<Value> {
    (0..items.len())
        .map(|i| Ok(cell(items, field, i)?.unwrap_or_default()))
        .collect::<Result<Vec<_>>>()
        .map(Value::Array)
}

/// A string, or the JSON value written in it if the column's type is JSON.
fn text(text: &str, field: &Field) -> Result<Value> {
    if field.extension_type_name() == Some("arrow.json") {
        return serde_json::from_str(text).map_err(|e| Error::data(format!("not JSON: {e}")));
    }
    Ok(text.into())
}
