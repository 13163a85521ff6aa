//! A run that is resumed with another configuration than it was saved with.

use crate::cli::command;
use crate::process::Running;
use crate::resume::job::{Job, place, verb};
use std::path::Path;

#[test]
fn keys_that_define_the_state_cannot_change_and_changes_of_other_keys_are_logged() {
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
        ended.assert(2, &["the run in job.dir cannot resume with", words, "another job.dir"]);
        assert!(!ended.stderr.contains("job.steps ="), "{}", ended.stderr);
    }
    let ended = job.clone().set(format!("data.prompts=[\"{}\"]", shards.display())).run();
    ended.assert(2, &["cannot resume with data.prompts = "]);
    let ended = job.clone().with("model.reference=other").run();
    assert_eq!(ended.code, Some(65), "no such model: {}", ended.stderr);
    assert_eq!(job.committed(), [1]);
    let sets = "job.steps=2 optim.actor.lr=5e-4 ppo.clip_low=0.1 checkpoint.keep_last=2 eval.every_steps=2";
    let ended = job.clone().with(sets).run();
    ended
        .assert(0, &["resuming with changes: ", "optim.actor.lr = 0.0005 (was 0.001)", "ppo.clip_low = 0.1 (was 0.2)"]);
    let ended = job.clone().with(sets).run();
    assert!(ended.code == Some(0) && !ended.stderr.contains("changes"), "{}", ended.stderr);
}

#[test]
fn an_interrupted_step_ends_with_the_settings_it_began_with() {
    let job = Job::ppo("half-done").with("job.steps=2");
    job.clone().with("checkpoint.max_hours=1e-9").run().assert(85, &["stopped at step 0"]);
    for change in ["rollout.temperature=0.7", "ppo.minibatch_samples=4"] {
        let ended = job.clone().with(change).run();
        ended.assert(
            2,
            &["cannot resume with", change.split('=').next().expect("a key"), "until the interrupted step is done"],
        );
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
fn a_run_resumes_without_the_initial_weights_of_trained_models() {
    let remove = |copy: &Path| std::fs::remove_file(copy.join("model.safetensors")).expect("there");
    let once = "checkpoint.max_hours=1e-9";
    let (learns, answers) = (copied("model-that-learns"), copied("model-that-answers"));
    let roles = "model.actor=model-that-learns model.critic=model-that-learns model.reference=model-that-answers";
    let sets = "job.steps=2 model.dtype=bf16 mesh.zero=3";
    let job = |name: &str| Job::ppo(&format!("without-{name}")).on(2).with(roles).with(sets);
    let whole = job("whole").done();
    job("parts").with(once).run().assert(85, &["stopped at step 0"]);
    remove(&learns);
    job("parts").done().assert_same(&whole);
    // The reference has no checkpoint.
    job("frozen").run().assert(65, &["model.actor: ", "has no model.safetensors"]);
    let _ = (copied("model-that-learns"), job("frozen").with(once).run());
    remove(&answers);
    job("frozen").run().assert(65, &["model.reference: ", "has no model.safetensors"]);
    let copy = copied("model-that-learns");
    let job = |name: &str| Job::sft(&format!("without-sft-{name}")).with("job.steps=3 model.actor=model-that-learns");
    let whole = job("whole").done();
    job("parts").with(once).run().assert(85, &["stopped at step 1"]);
    remove(&copy);
    job("parts").done().assert_same(&whole);
}

#[test]
fn a_model_that_was_moved_is_the_same_model() {
    let copy = copied("model-to-move");
    let job = Job::sft("moved-model");
    let at = |job: &Job, dir: &Path| job.clone().set(format!("model.actor={}", dir.display()));
    at(&job, &copy).with("job.steps=2").done();
    let ended = at(&job, &place().join("model")).with("job.steps=3").run();
    ended.assert(2, &["cannot resume with model.actor = "]);
    let moved = place().join("model-moved");
    let _ = std::fs::remove_dir_all(&moved);
    std::fs::rename(&copy, &moved).expect("moves");
    at(&job, &moved).with("job.steps=3").run().assert(0, &["resuming with changes: job.steps = 3"]);
}

/// A row with one other digit and the same length.
fn other_digit(rows: &str) -> String {
    let digit = rows.find(|c: char| c.is_ascii_digit()).expect("a number");
    let other = if rows.as_bytes()[digit] == b'1' { "2" } else { "1" };
    format!("{}{other}{}", &rows[..digit], &rows[digit + 1..])
}

#[test]
fn changed_files_under_the_same_path_are_named_or_accepted_and_a_changed_reward_is_logged() {
    let copy = copied("model-to-change");
    let [file, reward] = ["changing.jsonl", "changing-reward.py"].map(|name| place().join(name));
    let rows = std::fs::read_to_string(place().join("rows.jsonl")).expect("there");
    let write = |path: &Path, text: &str| std::fs::write(path, text).expect("writes");
    let score = |score: u32| {
        let code = format!("def reward_func(queries, prompts, labels):\n    return [{score}.0] * len(queries)\n");
        write(&reward, &code);
    };
    let remove = |name: &str| std::fs::remove_file(copy.join(name)).expect("there");
    verb("init --config config.json --tokenizer tokenizer --out other-weights --seed 7");
    let other_weights = || command::copy(&place().join("other-weights"), "model.safetensors", &copy);
    let sets = format!(
        "model.actor={0}/model-to-change model.reference={0}/model data.prompts=[\"{0}/changing.jsonl\"] data.prompt_split= \
         data.eval_split= data.label_key=answer reward.rule=[] reward.python={0}/changing-reward.py",
        place().display()
    );
    let job = |steps: u32| Job::ppo("changed-inputs").with(&sets).with(&format!("job.steps={steps}"));
    write(&file, &rows);
    score(1);
    job(1).done();
    // Without a change, nothing is read and nothing is logged.
    job(2).run().assert(0, &["resuming with changes: job.steps = 2 (was 1)\n"]);
    let weights = "model.actor (model.safetensors), model.critic (model.safetensors)\n";
    let refused = |words: &str| {
        job(3)
            .run()
            .assert(2, &["have changed since its checkpoint: ", words, "hint: ", "checkpoint.changed_inputs=accept"]);
    };
    let of_tools = copy.join("additional_chat_templates");
    let changes: [(&dyn Fn(), &str); 5] = [
        (&other_weights, weights),
        (&|| write(&copy.join("chat_template.jinja"), "{{ messages }}"), "model.actor (chat_template.jinja is new)\n"),
        (
            &|| std::fs::create_dir(&of_tools).map(|()| write(&of_tools.join("x y.jinja"), "")).expect("a folder"),
            "model.actor (additional_chat_templates/x y.jinja is new)\n",
        ),
        (&|| remove("tokenizer_config.json"), "model.actor (tokenizer_config.json is missing)\n"),
        (&|| write(&file, &other_digit(&rows)), "data.prompts[0]\n"),
    ];
    for (change, words) in changes {
        change();
        refused(words);
        write(&file, &rows);
        copied("model-to-change");
    }
    // Weights may be missing, but weights that are there must equal the earlier ones.
    remove("model.safetensors");
    job(3).done();
    other_weights();
    write(&file, &other_digit(&rows));
    refused(&format!("data.prompts[0], {weights}"));
    let accepted = job(4).with("checkpoint.changed_inputs=accept").run();
    let words = [
        "resuming with changes: ",
        "changed contents of model.critic (model.safetensors)",
        "contents of data.prompts[0]",
    ];
    accepted.assert(0, &words);
    // From then on, the run's checkpoints name these files, in whichever folder it is started.
    score(2);
    let mut elsewhere = job(5).command();
    elsewhere.current_dir("/");
    let words = "resuming with changes: job.steps = 5 (was 4), changed contents of reward.python[0]\n";
    Running::new(elsewhere).end().assert(0, &[words]);
}
