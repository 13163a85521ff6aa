//! The bytes of a TensorBoard events file: TFRecord framing around hand-encoded `Event` protobufs.
//!
//! A record is `u64 length | u32 masked crc32c(length) | data | u32 masked crc32c(data)`, little-endian, with
//! `masked(c) = rotate_right(c, 15) + 0xa282ead8` (TensorFlow, `lib/io/record_writer`). Of the messages only what a
//! scalar and a text need is written: `Event { wall_time = 1, step = 2, file_version = 3, summary = 5, session_log = 7 }`,
//! `Summary.Value { tag = 1, simple_value = 2, tensor = 8, metadata = 9 }`.

#[derive(Clone, Debug, PartialEq)]
pub enum What {
    FileVersion(String),
    /// Tells a TensorBoard that has read an older file to drop everything from this step on.
    SessionStart,
    Scalar {
        tag: String,
        value: f32,
    },
    /// Markdown for the text page.
    Text {
        tag: String,
        text: String,
    },
}

/// One event. Events of a step may stand in one record or several; reading gives one `Event` a value.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Seconds since 1970.
    pub wall_time: f64,
    pub step: u64,
    pub what: What,
}

impl Event {
    pub fn scalar(wall_time: f64, step: u64, tag: String, value: f64) -> Self {
        Self { wall_time, step, what: What::Scalar { tag, value: value as f32 } }
    }

    pub fn write(&self, out: &mut Vec<u8>) {
        let mut message = Vec::with_capacity(64);
        field_f64(&mut message, 1, self.wall_time);
        if self.step > 0 {
            field_varint(&mut message, 2, self.step);
        }
        match &self.what {
            What::FileVersion(version) => field_bytes(&mut message, 3, version.as_bytes()),
            What::SessionStart => {
                let mut log = Vec::new();
                field_varint(&mut log, 1, SESSION_START);
                field_bytes(&mut message, 7, &log);
            }
            What::Scalar { tag, value } => {
                let mut entry = Vec::new();
                field_bytes(&mut entry, 1, tag.as_bytes());
                field_f32(&mut entry, 2, *value);
                summary(&mut message, &entry);
            }
            What::Text { tag, text } => summary(&mut message, &text_value(tag, text)),
        }
        record(out, &message);
    }
}

const SESSION_START: u64 = 1;
const DT_STRING: u64 = 7;

/// Bytes of a record besides its message: the length, and both checksums.
const RECORD_BYTES: usize = 16;

fn summary(message: &mut Vec<u8>, value: &[u8]) {
    let mut summary = Vec::new();
    field_bytes(&mut summary, 1, value);
    field_bytes(message, 5, &summary);
}

/// `Value { tag, tensor { dtype: string, shape: [1], string_val }, metadata { plugin_data { plugin_name: "text" } } }`.
fn text_value(tag: &str, text: &str) -> Vec<u8> {
    let mut dim = Vec::new();
    field_varint(&mut dim, 1, 1);
    let mut shape = Vec::new();
    field_bytes(&mut shape, 2, &dim);
    let mut tensor = Vec::new();
    field_varint(&mut tensor, 1, DT_STRING);
    field_bytes(&mut tensor, 2, &shape);
    field_bytes(&mut tensor, 8, text.as_bytes());
    let mut plugin = Vec::new();
    field_bytes(&mut plugin, 1, b"text");
    let mut metadata = Vec::new();
    field_bytes(&mut metadata, 1, &plugin);
    let mut value = Vec::new();
    field_bytes(&mut value, 1, tag.as_bytes());
    field_bytes(&mut value, 8, &tensor);
    field_bytes(&mut value, 9, &metadata);
    value
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn field_varint(out: &mut Vec<u8>, field: u64, value: u64) {
    varint(out, field << 3);
    varint(out, value);
}

fn field_f64(out: &mut Vec<u8>, field: u64, value: f64) {
    varint(out, field << 3 | 1);
    out.extend_from_slice(&value.to_le_bytes());
}

fn field_f32(out: &mut Vec<u8>, field: u64, value: f32) {
    varint(out, field << 3 | 5);
    out.extend_from_slice(&value.to_le_bytes());
}

fn field_bytes(out: &mut Vec<u8>, field: u64, value: &[u8]) {
    varint(out, field << 3 | 2);
    varint(out, value.len() as u64);
    out.extend_from_slice(value);
}

fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

fn record(out: &mut Vec<u8>, message: &[u8]) {
    let length = (message.len() as u64).to_le_bytes();
    out.extend_from_slice(&length);
    out.extend_from_slice(&masked_crc(&length).to_le_bytes());
    out.extend_from_slice(message);
    out.extend_from_slice(&masked_crc(message).to_le_bytes());
}

/// The events of a file up to the first record that is torn or fails its checksum, and the bytes that those took.
pub fn read(bytes: &[u8]) -> (Vec<Event>, usize) {
    let (mut events, mut taken) = (Vec::new(), 0);
    while let Some(message) = first_message(&bytes[taken..]) {
        if read_event(message, &mut events).is_err() {
            break;
        }
        taken += RECORD_BYTES + message.len();
    }
    (events, taken)
}

fn first_message(bytes: &[u8]) -> Option<&[u8]> {
    let length = u64::from_le_bytes(checked(bytes, 8)?.try_into().ok()?);
    checked(&bytes[12..], usize::try_from(length).ok()?)
}

/// The first `length` bytes, if their checksum follows.
fn checked(bytes: &[u8], length: usize) -> Option<&[u8]> {
    let (content, rest) = bytes.split_at_checked(length)?;
    (rest.get(..4)? == masked_crc(content).to_le_bytes()).then_some(content)
}

/// A message that is no protobuf of the expected shape.
struct Damaged;

type Decoded<T> = std::result::Result<T, Damaged>;

/// A field's payload: fixed and length-delimited ones as bytes.
enum Field<'a> {
    Varint(u64),
    Bytes(&'a [u8]),
}

struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn varint(&mut self) -> Decoded<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let (&byte, rest) = self.0.split_first().ok_or(Damaged)?;
            self.0 = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(Damaged)
    }

    fn take(&mut self, len: usize) -> Decoded<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(len).ok_or(Damaged)?;
        self.0 = rest;
        Ok(head)
    }

    fn next(&mut self) -> Decoded<Option<(u64, Field<'a>)>> {
        if self.0.is_empty() {
            return Ok(None);
        }
        let key = self.varint()?;
        let field = match key & 7 {
            0 => Field::Varint(self.varint()?),
            1 => Field::Bytes(self.take(8)?),
            2 => {
                let len = usize::try_from(self.varint()?).map_err(|_| Damaged)?;
                Field::Bytes(self.take(len)?)
            }
            5 => Field::Bytes(self.take(4)?),
            _ => return Err(Damaged),
        };
        Ok(Some((key >> 3, field)))
    }
}

fn text_of(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn fixed<const N: usize>(bytes: &[u8]) -> Decoded<[u8; N]> {
    bytes.try_into().map_err(|_| Damaged)
}

fn read_event(message: &[u8], events: &mut Vec<Event>) -> Decoded<()> {
    let (mut wall_time, mut step) = (0.0, 0);
    let mut whats = Vec::new();
    let mut fields = Fields(message);
    while let Some((number, field)) = fields.next()? {
        match (number, field) {
            (1, Field::Bytes(b)) => wall_time = f64::from_le_bytes(fixed(b)?),
            (2, Field::Varint(v)) => step = v,
            (3, Field::Bytes(b)) => whats.push(What::FileVersion(text_of(b))),
            (5, Field::Bytes(b)) => read_summary(b, &mut whats)?,
            (7, Field::Bytes(_)) => whats.push(What::SessionStart),
            _ => {}
        }
    }
    events.extend(whats.into_iter().map(|what| Event { wall_time, step, what }));
    Ok(())
}

fn read_summary(message: &[u8], whats: &mut Vec<What>) -> Decoded<()> {
    let mut summary = Fields(message);
    while let Some((number, field)) = summary.next()? {
        let (1, Field::Bytes(value)) = (number, field) else { continue };
        let (mut tag, mut scalar, mut text) = (String::new(), None, None);
        let mut fields = Fields(value);
        while let Some((number, field)) = fields.next()? {
            match (number, field) {
                (1, Field::Bytes(b)) => tag = text_of(b),
                (2, Field::Bytes(b)) => scalar = Some(f32::from_le_bytes(fixed(b)?)),
                (8, Field::Bytes(b)) => text = read_string(b)?,
                _ => {}
            }
        }
        if let Some(value) = scalar {
            whats.push(What::Scalar { tag, value });
        } else if let Some(text) = text {
            whats.push(What::Text { tag, text });
        }
    }
    Ok(())
}

fn read_string(tensor: &[u8]) -> Decoded<Option<String>> {
    let mut text = None;
    let mut fields = Fields(tensor);
    while let Some((number, field)) = fields.next()? {
        if let (8, Field::Bytes(b)) = (number, field) {
            text = Some(text_of(b));
        }
    }
    Ok(text)
}
