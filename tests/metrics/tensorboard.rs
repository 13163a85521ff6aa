use std::fs;

use rlhf_hpc::metrics::Line;
use rlhf_hpc::metrics::events::{self, Event, What};
use rlhf_hpc::metrics::tensorboard::{EventsFile, files_in, tag};

fn line(step: u64) -> Line {
    Line::new(step, 1e9 + step as f64, &[("reward_mean", 0.5 * step as f64), ("kl_mean", f64::NAN), ("mine", 1.0)])
}

fn scalars(events: &[Event]) -> Vec<(u64, String, f32)> {
    let scalar = |e: &Event| match &e.what {
        What::Scalar { tag, value } if !value.is_nan() => Some((e.step, tag.clone(), *value)),
        _ => None,
    };
    events.iter().filter_map(scalar).collect()
}

#[test]
fn events_read_back_with_their_steps_times_tags_and_values() {
    let dir = tempfile::tempdir().unwrap();
    let mut file = EventsFile::create(dir.path(), [Ok(line(1))], u64::MAX, 1e9).unwrap();
    file.append(&line(2)).unwrap();
    file.append_text(1e9 + 3.0, 2, "rollout/samples", "grüße\nzeile").unwrap();
    let bytes = fs::read(file.path()).unwrap();
    let (events, read) = events::read(&bytes);
    assert_eq!(read, bytes.len());
    assert_eq!(events[0].what, What::FileVersion("brain.Event:2".into()));
    assert_eq!(events[1].what, What::SessionStart);
    let expected = [
        (1, "reward/reward_mean".to_owned(), 0.5),
        (1, "extra/mine".to_owned(), 1.0),
        (2, "reward/reward_mean".to_owned(), 1.0),
        (2, "extra/mine".to_owned(), 1.0),
    ];
    assert_eq!(scalars(&events), expected);
    assert_eq!(events[2].wall_time, 1e9 + 1.0);
    assert!(
        events
            .iter()
            .any(|e| matches!(&e.what, What::Scalar { tag, value } if tag == "policy/kl_mean" && value.is_nan()))
    );
    let text = What::Text { tag: "rollout/samples".into(), text: "grüße\nzeile".into() };
    assert_eq!(events.last().unwrap(), &Event { wall_time: 1e9 + 3.0, step: 2, what: text });
}

#[test]
fn records_are_byte_for_byte_those_of_tensorboard() {
    // Printed by `read_back.py --golden` with TensorBoard 2.21.0.
    let version = "1800000000000000a37f4b2209000000000000f03f1a0d627261696e2e4576656e743a3286bf577a";
    let scalar = concat!(
        "290000000000000037ff5f00090000000065cdcd4110ac022a1b0a190a127265776172642f7265776172645f6d65616e",
        "150000003f8ad6b049"
    );
    let record = |event: Event| {
        let mut bytes = Vec::new();
        event.write(&mut bytes);
        bytes
    };
    let bytes = |hex: &str| -> Vec<u8> {
        (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect()
    };
    let first = Event { wall_time: 1.0, step: 0, what: What::FileVersion("brain.Event:2".into()) };
    assert_eq!(record(first), bytes(version));
    assert_eq!(record(Event::scalar(1e9, 300, "reward/reward_mean".into(), 0.5)), bytes(scalar));
}

#[test]
fn one_changed_bit_is_found_and_reading_stops_before_it() {
    let mut bytes = Vec::new();
    Event::scalar(1.0, 1, "a/b".into(), 2.0).write(&mut bytes);
    let first = bytes.len();
    Event::scalar(1.0, 2, "a/b".into(), 3.0).write(&mut bytes);
    for at in first..bytes.len() {
        for bit in 0..8 {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1 << bit;
            let (events, read) = events::read(&damaged);
            assert_eq!((events.len(), read), (1, first), "byte {at}, bit {bit}");
        }
    }
    for len in first..bytes.len() {
        assert_eq!(events::read(&bytes[..len]).1, first, "torn at {len}");
    }
}

#[test]
fn a_resume_leaves_one_file_that_ends_at_its_step() {
    let dir = tempfile::tempdir().unwrap();
    let mut old = EventsFile::create(dir.path(), [], 0, 1e9).unwrap();
    for step in 1..=4 {
        old.append(&line(step)).unwrap();
        old.append_text(1e9, step, "rollout/samples", &format!("of {step}")).unwrap();
    }
    let old_path = old.path().to_owned();
    let mut file = EventsFile::create(dir.path(), (1..=4).map(|step| Ok(line(step))), 2, 1e9).unwrap();
    file.append(&line(3)).unwrap();
    assert_eq!(files_in(dir.path()).unwrap(), [file.path()]);
    assert!(file.path() > old_path.as_path(), "a running TensorBoard goes on to names that sort behind");
    let (events, _) = events::read(&fs::read(file.path()).unwrap());
    let steps: Vec<u64> = scalars(&events).iter().filter(|(_, t, _)| *t == tag("reward_mean")).map(|s| s.0).collect();
    assert_eq!(steps, [1, 2, 3]);
    let texts: Vec<u64> = events.iter().filter(|e| matches!(e.what, What::Text { .. })).map(|e| e.step).collect();
    assert_eq!(texts, [1, 2]);
    assert!(events.windows(2).all(|w| w[0].step <= w[1].step), "steps never go back within a file");
}
