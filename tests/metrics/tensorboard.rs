use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use rlhf_hpc::metrics::Line;
use rlhf_hpc::metrics::tensorboard::{EventsFile, files_in, hparams, scalar, session_start, tag, text, version};

fn line(step: u64) -> Line {
    Line::new(step, 1e9 + step as f64, &[("reward_mean", 0.5 * step as f64), ("mine", 1.0)])
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let byte = take_bytes(bytes, 1)[0];
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            break;
        }
    }
    value
}

fn take_bytes<'a>(bytes: &mut &'a [u8], n: usize) -> &'a [u8] {
    let (head, rest) = bytes.split_at(n);
    *bytes = rest;
    head
}

/// The fields of a protobuf message, by their numbers; a varint as its 8 bytes.
fn fields(mut bytes: &[u8]) -> Vec<(u64, Vec<u8>)> {
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let value = match key & 7 {
            0 => varint(&mut bytes).to_le_bytes().to_vec(),
            1 => take_bytes(&mut bytes, 8).to_vec(),
            5 => take_bytes(&mut bytes, 4).to_vec(),
            _ => {
                let n = varint(&mut bytes) as usize;
                take_bytes(&mut bytes, n).to_vec()
            }
        };
        fields.push((key >> 3, value));
    }
    fields
}

/// The bytes of scalars and texts, by step and tag.
pub type Values = BTreeMap<(u64, String), Vec<u8>>;

/// The values that TensorBoard shows for a directory.
pub fn shown(dir: &Path) -> Values {
    let mut shown = Values::new();
    for path in files_in(dir).unwrap() {
        let bytes = fs::read(path).unwrap();
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let length = u64::from_le_bytes(take_bytes(&mut rest, 12)[..8].try_into().unwrap());
            let event = fields(take_bytes(&mut rest, length as usize));
            take_bytes(&mut rest, 4);
            let step = event.iter().find(|(field, _)| *field == 2).map_or(0, |(_, step)| step[0].into());
            for (field, content) in &event {
                if *field == 7 {
                    shown.retain(|(at, _), _| *at < step);
                } else if *field == 5 {
                    let value = fields(&fields(content)[0].1);
                    shown.insert((step, String::from_utf8(value[0].1.clone()).unwrap()), value[1].1.clone());
                }
            }
        }
    }
    shown
}

#[test]
fn records_equal_tensorboards_byte_for_byte() {
    let hex = |record: Vec<u8>| record.iter().fold(String::new(), |text, byte| format!("{text}{byte:02x}"));
    // Serialised and framed by TensorBoard 2.21.0.
    let golden = "1800000000000000a37f4b2209000000000000f03f1a0d627261696e2e4576656e743a3286bf577a";
    assert_eq!(hex(version(1.0)), golden);
    let golden = concat!(
        "290000000000000037ff5f00090000000065cdcd4110ac022a1b0a190a127265776172642f7265776172645f6d65616e",
        "150000003f8ad6b049"
    );
    assert_eq!(hex(scalar(1e9, 300, "reward/reward_mean", 0.5)), golden);
    let golden = "100000000000000095fbfe1809000000000000f03f10ac023a020801560b5da5";
    assert_eq!(hex(session_start(1.0, 300)), golden);
    let golden = concat!(
        "4300000000000000b18525a0090000000065cdcd4110022a360a340a0f726f6c6c6f75742f73616d706c657342170807",
        "120412020801420d6772c3bcc39f650a7a65696c654a080a060a04746578740fa60e65"
    );
    assert_eq!(hex(text(1e9, 2, "rollout/samples", "grüße\nzeile")), golden);
}

#[test]
fn a_resume_shows_the_records_up_to_its_step_and_later_ones() {
    let dir = tempfile::tempdir().unwrap();
    let lines: Vec<Line> = (1..=4).map(line).collect();
    let mut old = EventsFile::create(dir.path(), "[job]\nseed = 5", &[], 0, 1e9).unwrap();
    for line in &lines {
        old.append(line).unwrap();
        old.append_text(1e9, line.step, "rollout/samples", &format!("of {}", line.step)).unwrap();
    }
    let before = files_in(dir.path()).unwrap();
    let mut new = EventsFile::create(dir.path(), "", &lines[..2], 2, 1e9).unwrap();
    assert!(files_in(dir.path()).unwrap().starts_with(&before), "TensorBoard continues with names that sort later");
    new.append(&Line::new(3, 1e9, &[("reward_mean", 7.0)])).unwrap();
    let shown = shown(dir.path());
    let of = |tag: &str| shown.iter().filter(|((_, t), _)| t == tag).map(|((step, _), _)| *step).collect::<Vec<_>>();
    assert_eq!(of("reward/mean"), [1, 2, 3]);
    assert_eq!(shown[&(3, "reward/mean".to_string())], 7f32.to_le_bytes());
    assert_eq!((of("extra/mine"), of("rollout/samples")), (vec![1, 2], vec![1, 2]));
}

#[test]
fn new_events_begin_with_all_existing_lines() {
    let dir = tempfile::tempdir().unwrap();
    EventsFile::create(dir.path(), "", &[line(1), line(2), line(3)], 2, 1e9).unwrap();
    let steps: Vec<u64> = shown(dir.path()).keys().map(|(step, _)| *step).collect();
    assert_eq!(steps, [0, 0, 1, 1, 2, 2], "the job as hyperparameters and as text, then its lines");
}

#[test]
fn tags_name_their_section_once_and_the_job_is_shown_as_hyperparameters() {
    for (key, shown) in [
        ("reward_mean", "reward/mean"),
        ("reward/style", "reward/style"),
        ("time_step_s", "time/step_s"),
        ("loss", "loss/loss"),
        ("policy_loss", "loss/policy_loss"),
        ("eval_pass_at_8", "eval/pass_at_8"),
        ("eval/math/pass_at_8", "eval/math/pass_at_8"),
        ("mine", "extra/mine"),
    ] {
        assert_eq!(tag(key), shown);
    }
    let record = hparams(1.0, "[ppo]\nclip_low = 0.5\nadvantage = \"grpo\"\n[eval]\non = true");
    let event = fields(&record[12..record.len() - 4]);
    let inner =
        |bytes: &[u8], field: u64| fields(bytes).into_iter().filter(move |(n, _)| *n == field).map(|(_, value)| value);
    let one = |bytes: &[u8], field: u64| inner(bytes, field).next().expect("a field");
    let value = one(&event.iter().find(|(field, _)| *field == 5).expect("a summary").1, 1);
    assert_eq!(one(&value, 1), b"_hparams_/session_start_info");
    let plugin = one(&one(&value, 9), 1);
    assert_eq!(one(&plugin, 1), b"hparams");
    let info = one(&one(&plugin, 2), 3);
    let named = |entry: Vec<u8>| (String::from_utf8(one(&entry, 1)).expect("a name"), fields(&one(&entry, 2)));
    let all: Vec<_> = inner(&info, 1).map(named).collect();
    let want = [
        ("eval.on", 4, 1u64.to_le_bytes().to_vec()),
        ("ppo.advantage", 3, b"grpo".to_vec()),
        ("ppo.clip_low", 2, 0.5f64.to_le_bytes().to_vec()),
    ];
    assert_eq!(all, want.map(|(key, field, value)| (key.to_string(), vec![(field, value)])));
}
