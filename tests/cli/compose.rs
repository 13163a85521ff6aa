//! The scripts of jobs/compose: which answers they reuse.

use super::fixture::Fixture;
use crate::process::{Ended, Running, launched};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// A script instead of the program: it lists its verbs, and `select` fails until the file `ready` exists.
const STUB: &str = "#!/bin/sh\necho \"$1\" >> calls\necho \"$*\" >> lines\n[ \"$1\" != select ] || [ -e ready ] || exit 65\necho '{}'\n";

fn best_of(fixture: &Fixture, model: &str, samples: &str, keys: &[&str]) -> Ended {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("jobs/compose/best-of-n.sh");
    let mut command = launched(&script, 0);
    command.args([model, "judge", "prompts.jsonl", "best.jsonl"]).args(keys).current_dir(fixture.root());
    command.env("RLHF_HPC", "stub").env("RANKS", "1").env("SAMPLES", samples);
    Running::new(command).end()
}

#[test]
fn answers_are_reused_for_equal_inputs_and_generated_again_for_changed_ones() {
    let fixture = Fixture::new();
    fixture.write("stub", STUB);
    fs::set_permissions(fixture.path("stub"), fs::Permissions::from_mode(0o755)).expect("a program");
    for dir in ["one", "two", "judge"] {
        fixture.write(&format!("{dir}/model.safetensors"), "weights");
    }
    fixture.write("prompts.jsonl", "{}\n");
    let sampled = || fixture.text("calls").lines().filter(|verb| *verb == "generate").count();
    let mut expected = 0;
    let mut check = |model: &str, samples: &str, is_new: bool, what: &str| {
        let ended = best_of(&fixture, model, samples, &[]);
        assert_eq!(ended.code, Some(65), "{what}: {}", ended.stderr);
        expected += usize::from(is_new);
        assert_eq!(sampled(), expected, "{what}: {}", ended.stdout);
    };
    check("one", "4", true, "the first");
    check("one", "4", false, "the same");
    check("two", "4", true, "another model");
    check("two", "8", true, "more samples");
    fixture.write("judge/model.safetensors", "others");
    check("two", "8", true, "another reward model in the same folder");
    fixture.write("prompts.jsonl", "{}\n{}\n");
    check("two", "8", true, "other prompts");
    check("two", "8", false, "the same again");
    fixture.write("ready", "");
    assert_eq!(best_of(&fixture, "two", "8", &[]).code, Some(0));
    let asked = || fixture.text("lines").matches("--chat-template").count();
    assert_eq!(asked(), 0);
    assert_eq!(best_of(&fixture, "two", "8", &["data.chat_template=true"]).code, Some(0));
    assert_eq!(asked(), 1, "{}", fixture.text("lines"));
    assert!(!fixture.path("best.jsonl.scored").exists() && !fixture.path("best.jsonl.scored.inputs").exists());
}
