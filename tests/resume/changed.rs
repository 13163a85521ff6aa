//! A run that goes on with another configuration than it was saved with.

use crate::cli::command;
use crate::process::Running;
use crate::resume::job::{Job, place, verb};

#[test]
fn what_the_state_was_made_with_cannot_change() {
    let job = Job::ppo("changed").with("job.steps=1");
    job.clone().done();
    let shards = place().join("demonstrations");
    let refused = [
        ("job.seed=7", "job.seed = 7 (was 42)"),
        ("ppo.advantage=rloo", "ppo.advantage = \"rloo\" (was \"gae\")"),
        ("data.order=sequential", "data.order = \"sequential\" (was \"shuffled\")"),
        ("data.prompt_tokens_max=20", "data.prompt_tokens_max = 20 (was 1024)"),
    ];
    for (change, words) in refused {
        let ended = job.clone().with(change).with("job.steps=2").run();
        ended.assert(2, &["holds a run that cannot go on with", words, "another job.dir"]);
        assert!(!ended.stderr.contains("job.steps ="), "{}", ended.stderr);
    }
    let ended = job.clone().set(format!("data.prompts=[\"{}\"]", shards.display())).run();
    ended.assert(2, &["cannot go on with data.prompts = "]);
    let ended = job.clone().with("model.reference=other").run();
    assert_eq!(ended.code, Some(65), "no such model: {}", ended.stderr);
    assert_eq!(job.committed(), [1]);
}

#[test]
fn what_only_steers_may_change_and_is_told() {
    let job = Job::ppo("steered");
    job.clone().with("job.steps=1").done();
    let sets = "job.steps=2 optim.actor.lr=5e-4 ppo.clip_low=0.1 checkpoint.keep_last=2 eval.every_steps=2";
    let ended = job.clone().with(sets).run();
    ended.assert(0, &["goes on with changes: ", "optim.actor.lr = 0.0005 (was 0.001)", "ppo.clip_low = 0.1 (was 0.2)"]);
    let ended = job.clone().with(sets).run();
    assert!(ended.code == Some(0) && !ended.stderr.contains("changes"), "{}", ended.stderr);
}

#[test]
fn an_interrupted_step_goes_on_as_it_began() {
    let job = Job::ppo("half-done").with("job.steps=2");
    job.clone().with("checkpoint.max_hours=1e-9").run().assert(85, &["stopped at step 0"]);
    for change in ["rollout.temperature=0.7", "ppo.minibatch_samples=4"] {
        let ended = job.clone().with(change).run();
        ended.assert(2, &["cannot go on with", change.split('=').next().expect("a key"), "until the step that was"]);
    }
    job.clone().with("rollout.batch_max=3").run().assert(0, &["rollout.batch_max = 3 (was 256)"]);
    job.with("job.steps=3 rollout.temperature=0.7").run().assert(0, &["rollout.temperature = "]);
}

/// A copy of the model under another name.
fn copied(name: &str) -> std::path::PathBuf {
    let copy = place().join(name);
    let _ = std::fs::remove_dir_all(&copy);
    command::copy(place(), "model/.", &copy);
    copy
}

#[test]
fn a_run_goes_on_without_the_weights_that_the_models_which_learn_began_with() {
    let remove = |copy: &std::path::Path| std::fs::remove_file(copy.join("model.safetensors")).expect("there");
    let once = "checkpoint.max_hours=1e-9";
    for (i, sets) in ["model.dtype=f32", "model.dtype=bf16 mesh.zero=3"].into_iter().enumerate() {
        let (learns, answers) = (copied("model-that-learns"), copied("model-that-answers"));
        let roles = "model.actor=model-that-learns model.critic=model-that-learns model.reference=model-that-answers";
        let job =
            |name: &str| Job::ppo(&format!("without-{name}-{i}")).on(2 * i).with("job.steps=2").with(roles).with(sets);
        let whole = job("whole").done();
        job("parts").with(once).run().assert(85, &["stopped at step 0"]);
        remove(&learns);
        job("parts").done().assert_same(&whole);
        // The reference has no checkpoint.
        job("frozen").run().assert(65, &["model.actor: ", "holds no model.safetensors"]);
        let _ = (copied("model-that-learns"), job("frozen").with(once).run());
        remove(&answers);
        job("frozen").run().assert(65, &["model.reference: ", "holds no model.safetensors"]);
    }
    let copy = copied("model-that-learns");
    let job = |name: &str| Job::sft(&format!("without-{name}")).with("job.steps=3 model.actor=model-that-learns");
    let whole = job("whole").done();
    job("parts").with(once).run().assert(85, &["stopped at step 1"]);
    remove(&copy);
    job("parts").done().assert_same(&whole);
}

#[test]
fn a_model_that_was_moved_is_the_same_model() {
    let copy = copied("model-to-move");
    let job = Job::sft("moved-model");
    let at = |job: &Job, dir: &std::path::Path| job.clone().set(format!("model.actor={}", dir.display()));
    at(&job, &copy).with("job.steps=2").done();
    let ended = at(&job, &place().join("model")).with("job.steps=3").run();
    ended.assert(2, &["cannot go on with model.actor = "]);
    let moved = place().join("model-moved");
    let _ = std::fs::remove_dir_all(&moved);
    std::fs::rename(&copy, &moved).expect("moves");
    at(&job, &moved).with("job.steps=3").run().assert(0, &["goes on with changes: job.steps = 3"]);
}

/// Gives a model other weights of the same shapes.
fn other_weights(dir: &std::path::Path) {
    static MADE: std::sync::OnceLock<std::path::PathBuf> = std::sync::OnceLock::new();
    let made = MADE.get_or_init(|| {
        verb("init --config config.json --tokenizer tokenizer --out other-weights --seed 7");
        place().join("other-weights/model.safetensors")
    });
    std::fs::copy(made, dir.join("model.safetensors")).expect("copies");
}

#[test]
fn other_weights_under_the_same_path_are_refused_by_name_or_accepted() {
    let copy = copied("model-to-change");
    let job =
        |steps: u32| Job::ppo("changed-weights").on(2).with(&format!("model.actor=model-to-change job.steps={steps}"));
    job(1).done();
    // Without a change nothing is read and nothing announced.
    let again = job(2).run();
    again.assert(0, &["goes on with changes: job.steps = 2 (was 1)\n"]);
    other_weights(&copy);
    let changed =
        "model.actor (model.safetensors), model.critic (model.safetensors), model.reference (model.safetensors)";
    let refused = job(3).run();
    refused.assert(2, &["saved with other contents of ", changed, "hint: ", "checkpoint.changed_inputs=accept"]);
    let accepted = job(3).with("checkpoint.changed_inputs=accept").run();
    accepted.assert(0, &["goes on with changes: ", "other contents of model.reference (model.safetensors)"]);
    // From then on these are what the run was saved with.
    let again = job(4).run();
    again.assert(0, &["goes on with changes: job.steps = 4 (was 3)\n"]);
}

#[test]
fn a_model_directory_that_gained_or_lost_a_file_is_another_one() {
    let copy = copied("model-with-files");
    let job = |steps: u32| {
        Job::sft("model-with-files").with("model.actor=model-with-files").with(&format!("job.steps={steps}"))
    };
    job(1).done();
    std::fs::write(copy.join("chat_template.jinja"), "{{ messages }}").expect("writes");
    job(2).run().assert(2, &["model.actor (chat_template.jinja is new)"]);
    std::fs::remove_file(copy.join("chat_template.jinja")).expect("there");
    std::fs::remove_file(copy.join("tokenizer_config.json")).expect("there");
    job(2).run().assert(2, &["model.actor (tokenizer_config.json is missing)"]);
    // Weights may be gone, but what comes back is compared with what was there.
    copied("model-with-files");
    std::fs::remove_file(copy.join("model.safetensors")).expect("there");
    job(2).done();
    other_weights(&copy);
    job(3).run().assert(2, &["model.actor (model.safetensors)"]);
}

#[test]
fn rows_that_changed_are_refused_although_no_length_did() {
    let rows = std::fs::read_to_string(place().join("rows.jsonl")).expect("there");
    let row: serde_json::Value = serde_json::from_str(rows.lines().next().expect("a row")).expect("JSON");
    for key in ["prompt", "answer", "demonstration"] {
        let file = place().join(format!("changed-{key}.jsonl"));
        std::fs::write(&file, &rows).expect("writes");
        let kind = if key == "demonstration" { Job::sft } else { Job::ppo };
        let keys = "data.label_key=answer data.prompt_split= data.eval_split= data.response_key=demonstration";
        let job = |steps: u32| {
            let job = kind(&format!("changed-{key}")).with(keys).with(&format!("job.steps={steps}"));
            job.set(format!("data.prompts=[\"{}\"]", file.display()))
        };
        job(1).done();
        // Another digit is as long.
        let was = row[key].as_str().expect("text");
        let digit = was.find(|c: char| c.is_ascii_digit()).expect("a number");
        let other = if was.as_bytes()[digit] == b'1' { "2" } else { "1" };
        let is = format!("{}{other}{}", &was[..digit], &was[digit + 1..]);
        let (was, is) = (format!("\"{was}\""), format!("\"{is}\""));
        std::fs::write(&file, rows.replacen(&was, &is, 1)).expect("writes");
        job(2).run().assert(2, &["other contents of data.prompts[0]\n", "another job.dir"]);
        let accepted = job(2).with("checkpoint.changed_inputs=accept").run();
        accepted.assert(0, &["other contents of data.prompts[0]\n"]);
    }
}

#[test]
fn a_reward_file_that_changed_is_announced() {
    let file = place().join("changing-reward.py");
    let write = |score: u32| {
        let text =
            format!("def reward_func(queries, prompts, labels, **kwargs):\n    return [{score}.0] * len(queries)\n");
        std::fs::write(&file, text).expect("writes");
    };
    let job = |steps: u32| {
        Job::ppo("changing-reward")
            .with(&format!("reward.rule=[] reward.python={}", file.display()))
            .with(&format!("job.steps={steps}"))
    };
    write(1);
    job(1).done();
    write(2);
    // Wherever the run is started.
    let mut elsewhere = job(2).command();
    elsewhere.current_dir("/");
    Running::new(elsewhere).end().assert(0, &["goes on with changes: ", "other contents of reward.python[0]"]);
}
