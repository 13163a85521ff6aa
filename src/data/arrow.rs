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
use parquet::arrow::arrow_reader::{ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder};
use parquet::basic::Compression;
use parquet::file::metadata::RowGroupMetaData;
use serde_json::{Map, Number, Value};

use super::images;
use super::json::ROW_BYTES_MAX;
use crate::comm::abort;
use crate::error::{Error, Result, format_bytes};
use crate::sys::map::Map as FileMap;
use crate::sys::sandbox;

/// Rows decoded at once from a Parquet file, and handed on at once from a batch of an Arrow stream, which can have any
/// number of them.
const BATCH_ROWS: usize = 1024;
/// The memory for decoding them. Fewer rows are decoded at once if they need more.
const BATCH_BYTES_MAX: usize = 512 << 20;
/// The bytes that a value counts in addition to its text.
const VALUE_BYTES: usize = size_of::<Value>();
/// The end of a complete Arrow stream.
const END: [u8; 8] = [0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0];

/// The batches of a file, one after another.
pub struct Batches {
    decoded: Box<dyn Iterator<Item = Result<RecordBatch>>>,
    /// The rows of the last batch that were not handed on.
    rest: Option<RecordBatch>,
}

impl Batches {
    pub fn parquet(path: &Path) -> Result<Self> {
        let bytes = Bytes::from_owner(FileMap::open(path)?);
        let mut at_once = BATCH_ROWS;
        let (reader, total) = parquet_reader(&bytes, 0, at_once)?;
        let (mut reader, mut rows) = (Some(reader), 0);
        Ok(Self::until_an_error(move || {
            loop {
                let mut from = match reader.take() {
                    Some(from) => from,
                    None => parquet_reader(&bytes, rows, at_once)?.0,
                };
                let decoded = within_limits(move || {
                    let batch = guarded(|| from.next().transpose().map_err(|e| damaged(rows, None, &e)));
                    (from, batch)
                });
                match decoded {
                    Ok((from, batch)) => {
                        reader = Some(from);
                        rows += batch.as_ref().map_or(0, |batch| batch.as_ref().map_or(0, RecordBatch::num_rows));
                        return batch;
                    }
                    // A dictionary repeats large values in few bytes: fewer rows may fit.
                    Err(_) if at_once.min(total - rows) > 1 => {
                        at_once = if at_once > BATCH_ROWS / 32 { BATCH_ROWS / 32 } else { 1 };
                    }
                    Err(limit) => return Err(inflates(rows + 1, &limit)),
                }
            }
        }))
    }

    /// A stream as `save_to_disk` of Hugging Face's datasets writes it. Its columns stay in the mapped file, because
    /// compressed ones are refused: few bytes cannot decode to gigabytes.
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

    /// Batches up to the first error.
    fn until_an_error(mut next: impl FnMut() -> Result<Option<RecordBatch>> + 'static) -> Self {
        let mut is_done = false;
        let decoded = Box::new(std::iter::from_fn(move || {
            let batch = if is_done { None } else { next().transpose() };
            is_done = !matches!(batch, Some(Ok(_)));
            batch
        }));
        Self { decoded, rest: None }
    }

    /// The next rows, at most `BATCH_ROWS`. None after the last one.
    pub fn next_batch(&mut self) -> Result<Option<Arc<RecordBatch>>> {
        let has_rows = |batch: &Result<RecordBatch>| batch.as_ref().map_or(true, |batch| batch.num_rows() > 0);
        let next = self.rest.take().map(Ok).or_else(|| self.decoded.find(has_rows)).transpose()?;
        Ok(next.map(|batch| {
            let n = batch.num_rows().min(BATCH_ROWS);
            self.rest = (batch.num_rows() > n).then(|| batch.slice(n, batch.num_rows() - n));
            Arc::new(batch.slice(0, n))
        }))
    }
}

/// A reader of the rows after the first `skipped`, and the number of rows in the file.
fn parquet_reader(bytes: &Bytes, skipped: usize, at_once: usize) -> Result<(ParquetRecordBatchReader, usize)> {
    let (bytes, size) = (bytes.clone(), bytes.len());
    let wrong = move |e: &dyn std::fmt::Display| {
        Error::data(format!("not a complete Parquet file ({size} bytes): {e}"))
            .hint("copy the file again: it may be truncated, damaged or in another format")
    };
    let open = move || {
        let builder = ParquetRecordBatchReaderBuilder::try_new(bytes).map_err(|e| wrong(&e))?;
        usable(builder.schema().fields(), "")?;
        let metadata = builder.metadata();
        let total = usize::try_from(metadata.file_metadata().num_rows()).unwrap_or(0);
        for column in metadata.row_groups().iter().flat_map(RowGroupMetaData::columns) {
            if let codec @ (Compression::BROTLI(_) | Compression::LZ4 | Compression::LZ4_RAW | Compression::LZO) =
                column.compression()
            {
                let codec = codec.to_string();
                let codec = codec.split('(').next().unwrap_or_default().to_lowercase();
                return Err(Error::data(format!(
                    "column {:?} is compressed with {codec}, but it must be snappy, gzip, zstd or uncompressed",
                    column.column_path().string()
                ))
                .hint("write it again: pyarrow.parquet.write_table(TABLE, FILE, compression=\"zstd\")"));
            }
        }
        let reader = builder.with_offset(skipped).with_batch_size(at_once).build().map_err(|e| wrong(&e))?;
        Ok((reader, total))
    };
    within_limits(move || guarded(open)).unwrap_or_else(|limit| Err(inflates(skipped + 1, &limit)))
}

/// Runs `decode` with limited memory: few bytes of a file can decode to gigabytes.
fn within_limits<T: Send + 'static>(decode: impl FnOnce() -> T + Send + 'static) -> std::result::Result<T, String> {
    sandbox::run_within(BATCH_BYTES_MAX, f64::INFINITY, decode)
}

fn inflates(row: usize, limit: &str) -> Error {
    Error::data(format!("row {row}: decoding it {limit}")).hint("write the file again with smaller values and pages")
}

/// Runs `body`, which may panic on damaged bytes.
fn guarded<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    abort::caught(body).map_err(|e| if e.kind == crate::error::Kind::Fault { Error::data(e.message) } else { e })
}

fn damaged(rows: usize, byte: Option<usize>, error: &ArrowError) -> Error {
    if error.to_string().contains("IPC decompression requires") {
        return Error::data("the Arrow stream is compressed").hint(
            "write it without the option `compression`, with save_to_disk of Hugging Face's datasets, or as Parquet",
        );
    }
    let at = byte.map_or(String::new(), |byte| format!(", byte {byte}"));
    Error::data(format!("damaged after row {rows}{at}: {error}"))
}

fn is_image(fields: &Fields) -> bool {
    let is = |name: &str, known: fn(&DataType) -> bool| {
        fields.iter().any(|field| field.name() == name && known(field.data_type()))
    };
    fields.len() == 2 && is("bytes", DataType::is_binary) && is("path", DataType::is_string)
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
            // An image of Hugging Face's datasets.
            DataType::Struct(fields) if is_image(fields) => {}
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

/// Row `i` of a batch, as its line in a JSONL file would be. A null is a missing field, and so is NaN.
pub fn row(batch: &RecordBatch, i: usize) -> Result<Map<String, Value>> {
    let mut left = ROW_BYTES_MAX;
    object(batch.schema_ref().fields(), batch.columns(), i, &mut left)
}

/// Whether row `i` has NaN or an infinity outside of lists.
pub fn has_nan(batch: &RecordBatch, i: usize) -> bool {
    let is_nan = |column: &ArrayRef| match column.data_type() {
        _ if column.is_null(i) => false,
        DataType::Float16 => !column.as_primitive::<Float16Type>().value(i).is_finite(),
        DataType::Float32 => !column.as_primitive::<Float32Type>().value(i).is_finite(),
        DataType::Float64 => !column.as_primitive::<Float64Type>().value(i).is_finite(),
        _ => false,
    };
    batch.columns().iter().any(is_nan)
}

/// Counts `bytes` of a row.
fn count(bytes: usize, left: &mut usize) -> Result<()> {
    *left = left.checked_sub(bytes).ok_or_else(|| {
        Error::data(format!("a row must have at most {} of text and values", format_bytes(ROW_BYTES_MAX as u64)))
    })?;
    Ok(())
}

fn object(fields: &Fields, columns: &[ArrayRef], i: usize, left: &mut usize) -> Result<Map<String, Value>> {
    let mut row = Map::new();
    for (field, column) in fields.iter().zip(columns) {
        let value = cell(column, field, i, left).map_err(|e| e.within(format!("column {:?}", field.name())))?;
        row.extend(value.map(|value| (field.name().clone(), value)));
    }
    Ok(row)
}

/// A value, `None` for null.
fn cell(column: &ArrayRef, field: &Field, i: usize, left: &mut usize) -> Result<Option<Value>> {
    if column.is_null(i) {
        return Ok(None);
    }
    count(VALUE_BYTES, left)?;
    // NaN and infinities are missing.
    let real = |x: f64| Number::from_f64(x).map(Value::Number);
    Ok(Some(downcast_integer_array!(
        column => column.value(i).into(),
        DataType::Boolean => column.as_boolean().value(i).into(),
        DataType::Float16 => return Ok(real(column.as_primitive::<Float16Type>().value(i).into())),
        DataType::Float32 => return Ok(real(column.as_primitive::<Float32Type>().value(i).into())),
        DataType::Float64 => return Ok(real(column.as_primitive::<Float64Type>().value(i))),
        DataType::Utf8 => text(column.as_string::<i32>().value(i), field, left)?,
        DataType::LargeUtf8 => text(column.as_string::<i64>().value(i), field, left)?,
        DataType::Utf8View => text(column.as_string_view().value(i), field, left)?,
        DataType::Binary => bytes(column.as_binary::<i32>().value(i), left)?,
        DataType::LargeBinary => bytes(column.as_binary::<i64>().value(i), left)?,
        DataType::BinaryView => bytes(column.as_binary_view().value(i), left)?,
        DataType::List(item) => list(&column.as_list::<i32>().value(i), item, left)?,
        DataType::LargeList(item) => list(&column.as_list::<i64>().value(i), item, left)?,
        DataType::FixedSizeList(item, _) => list(&column.as_fixed_size_list().value(i), item, left)?,
        DataType::Struct(fields) => object(fields, column.as_struct().columns(), i, left)?.into(),
        DataType::Dictionary(..) => {
            let (words, keys) = (column.as_any_dictionary().values(), column.as_any_dictionary().keys());
            let key = cell(&keys.slice(i, 1), field, 0, left)?.and_then(|key| key.as_u64());
            return key.map_or(Ok(None), |key| cell(words, field, key as usize, left));
        }
        // Columns of other types were rejected.
        _ => return Ok(None),
    )))
}

fn list(items: &ArrayRef, field: &Field, left: &mut usize) -> Result<Value> {
    // Before the list is allocated.
    count(items.len().saturating_mul(VALUE_BYTES), &mut left.clone())?;
    (0..items.len())
        .map(|i| Ok(cell(items, field, i, left)?.unwrap_or_default()))
        .collect::<Result<Vec<_>>>()
        .map(Value::Array)
}

/// The file of an image, in base64.
fn bytes(bytes: &[u8], left: &mut usize) -> Result<Value> {
    count(bytes.len(), left)?;
    Ok(images::base64(bytes).into())
}

/// A string, or the JSON value written in it if the column's type is JSON.
fn text(text: &str, field: &Field, left: &mut usize) -> Result<Value> {
    count(text.len(), left)?;
    if field.extension_type_name() == Some("arrow.json") {
        return serde_json::from_str(text).map_err(|e| Error::data(format!("not JSON: {e}")));
    }
    Ok(text.into())
}
