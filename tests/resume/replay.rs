//! `replay`: recorded steps computed again, on the layout of the run to the bit, on other layouts within rounding.

use crate::cli::command::{mpirun, run};
use crate::process::Ended;
use crate::resume::job::{Job, place};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::SystemTime;

/// Jobs of five kinds: name and keys. Their checkpoints are those of steps 2 and 4, so the steps 3 and 4 begin from one.
const KINDS: [(&str, &str); 5] = [
    ("ppo", "ppo.kl_in=reward ppo.kl_coef=0.05"),
    ("grpo", "ppo.advantage=grpo ppo.kl_in=loss ppo.kl_estimator=k3"),
    ("dpo", "job.kind=dpo data.prompts=[\"pairs\"]"),
    ("sft", "job.kind=sft data.prompts=[\"demonstrations\"]"),
    ("reward-model", "job.kind=reward_model data.prompts=[\"pairs\"]"),
];

/// PPO jobs whose records need more than tokens and scores.
const RECORDS: [(&str, &str); 6] = [
    ("greedy", "ppo.advantage=remax"),
    ("masks", "rollout.top_k=20 rollout.keep_sampling_mask=true"),
    ("rounds", "ppo.advantage=rloo rollout.dynamic_sampling.prompts_max_factor=4 rollout.samples_per_prompt=4"),
    ("normalized", "ppo.reward_normalize=true ppo.kl_target=0.01 ppo.epochs=1"),
    ("pretrained", "ppo.ptx_coef=0.1 data.pretrain=[\"texts.jsonl\"] ppo.critic_warmup_steps=1"),
    ("tree", "gradient.order=fixed model.dtype=bf16"),
];

fn recorded(name: &str, keys: &str) -> Job {
    let sets = "eval.every_steps=0 data.eval_split= checkpoint.every_steps=2 checkpoint.keep_last=0 job.export=false metrics.report=false \
                metrics.tensorboard=false";
    Job::ppo(&format!("replay-{name}")).with(sets).with(keys).done()
}

fn arguments<'a>(job: &'a Job, words: &'a str) -> Vec<&'a str> {
    let mut all = vec!["replay", job.dir.to_str().expect("UTF-8")];
    all.extend(words.split(' '));
    all
}

fn replay(job: &Job, words: &str) -> Ended {
    run(place(), &arguments(job, words))
}

/// Every file below a directory with its time and its bytes.
fn files(dir: &Path) -> BTreeMap<String, (SystemTime, Vec<u8>)> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(dir).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.is_dir() && !path.is_symlink() {
            all.extend(files(&path));
        } else {
            let time = path.symlink_metadata().and_then(|of| of.modified()).expect("a time");
            all.insert(path.display().to_string(), (time, fs::read(&path).unwrap_or_default()));
        }
    }
    all
}

#[test]
fn twenty_recorded_steps_of_five_kinds_of_jobs_are_equal_to_the_bit_and_their_runs_are_not_changed() {
    for (name, keys) in KINDS {
        let job = recorded(name, keys);
        let before = files(&job.dir);
        for step in 1..=4 {
            let text = replay(&job, &format!("--step {step}")).well().stdout;
            assert!(text.contains(&format!("\nequal to the bit: step {step}, ")), "{name}: {text}");
            assert!(text.contains("(that of the run)"), "{name}: {text}");
            let from = ["the models of the job", "the checkpoint of step 2"][usize::from(step > 2)];
            assert!(text.contains(from), "{name}: {text}");
            let arrays: &[&str] = match name {
                "ppo" => &["logprobs", "ref_logprobs", "values", "kl", "score", "rewards", "advantages", "returns"],
                "grpo" => &["logprobs", "ref_logprobs", "kl", "score", "rewards", "advantages"],
                _ => &[],
            };
            for what in arrays.iter().chain(&["grad_norm"]) {
                assert!(text.lines().any(|line| line.split(' ').next() == Some(what)), "{name}: {what} in {text}");
            }
        }
        assert!(files(&job.dir) == before, "{name}: the run has changed");
    }
    let others =
        fs::read_dir(place().join("runs")).expect("a folder").map(|entry| entry.expect("an entry").file_name());
    // Other tests replay other jobs meanwhile.
    let own = KINDS.map(|(name, _)| format!(".replay-{name}.replay-"));
    let left: Vec<_> =
        others.filter(|name| own.iter().any(|own| name.to_string_lossy().starts_with(own.as_str()))).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn greedy_responses_masks_dropped_groups_and_states_are_recorded_or_in_checkpoints() {
    for (name, keys) in RECORDS {
        let job = recorded(name, keys);
        for step in [2, 4] {
            let text = replay(&job, &format!("--step {step}")).well().stdout;
            assert!(text.contains(&format!("\nequal to the bit: step {step}, ")), "{name}: {text}");
        }
    }
}

/// The norms of all parameters of a saved replay are together the norm that the update had.
fn assert_norms(path: &str) {
    let saved: Value = serde_json::from_slice(&fs::read(path).expect("it was saved")).expect("JSON");
    for update in saved["updates"].as_array().expect("a list") {
        for (role, norms) in update["gradient_norms"].as_object().expect("by role") {
            let squares =
                norms.as_object().expect("by name").values().map(|norm| norm.as_f64().expect("a number").powi(2));
            let norm = squares.sum::<f64>().sqrt();
            let key = if role == "critic" { "grad_norm_critic" } else { "grad_norm" };
            let whole = update["metrics"][key].as_f64().expect("a number");
            assert!((norm - whole).abs() <= 1e-9 * whole, "{path}: {role} {norm} against {whole}");
        }
    }
}

#[test]
fn on_other_layouts_rounding_explains_the_differences_of_every_kind_of_job() {
    for (name, keys) in KINDS {
        let job = recorded(&format!("layouts-{name}"), &format!("{keys} job.steps=3"));
        let base = place().join(format!("replay-{name}.json"));
        let base = base.to_str().expect("UTF-8");
        replay(&job, &format!("--step 3 --force --save {base}")).well();
        assert_norms(base);
        for (ranks, mesh) in [(2, "--with mesh.tensor=2"), (4, "--with mesh.data=2 --with mesh.sequence=2")] {
            let saved = format!("{base}-{ranks}");
            let words = format!("--step 3 --against {base} --force --save {saved} {mesh}");
            let text = mpirun(place(), ranks, &arguments(&job, &words)).well().stdout;
            assert!(text.contains("\nrounding explains all differences of step 3: "), "{name} on {mesh}: {text}");
            assert!(text.contains("(the run had data 1, sequence 1, tensor 1"), "{name} on {mesh}: {text}");
            assert_norms(&saved);
            let of_gradients = text.lines().find(|line| line.contains("gradient of the actor")).expect("a row");
            assert!(
                of_gradients.contains("_proj")
                    || of_gradients.contains("norm")
                    || of_gradients.contains("embed")
                    || of_gradients.contains("head"),
                "{name}: a parameter is named in {of_gradients}"
            );
            if name == "ppo" {
                let row = text.lines().find(|line| line.starts_with("logprobs")).expect("a row");
                assert!(row.contains(", token ") && row.contains(" of the step (row "), "{row}");
            }
        }
    }
}

#[test]
fn a_step_of_pipeline_stages_is_equal_to_the_bit_on_stages_and_on_one_rank() {
    let sets = "eval.every_steps=0 data.eval_split= checkpoint.every_steps=2 job.export=false mesh.pipeline=2";
    let job = Job::ppo("replay-stages").on(2).with(sets).done();
    for (ranks, words, layout) in [
        (2, "--step 3", "layout: data 1, pipeline 2, sequence 1, tensor 1, zero 1, f32 on cpu (that of the run)"),
        (1, "--step 3 --with mesh.pipeline=1", "(the run had data 1, pipeline 2, sequence 1, tensor 1"),
    ] {
        let text = mpirun(place(), ranks, &arguments(&job, words)).well().stdout;
        assert!(text.contains(layout) && text.contains("\nequal to the bit: step 3, "), "{text}");
    }
}

#[test]
fn other_settings_show_their_effect_next_to_the_record_and_an_update_alone() {
    let job = recorded("with", "ppo.kl_coef=0.05");
    let column = |text: &str, key: &str, i: usize| {
        let row =
            text.lines().find(|line| line.split(' ').next() == Some(key)).unwrap_or_else(|| panic!("{key}: {text}"));
        row.split_whitespace().nth(i).expect("a column").parse::<f64>().expect("a number")
    };
    let of_run = |key: &str| job.numbers(key)[2];
    // A run of an older release does not list all keys.
    let resolved = job.dir.join("config.resolved.toml");
    let text = fs::read_to_string(&resolved).expect("it was written");
    let older: Vec<&str> = text.lines().filter(|line| !line.starts_with("trace_steps")).collect();
    assert!(older.len() < text.lines().count(), "{text}");
    fs::write(&resolved, older.join("\n")).expect("writes");
    for (with, key) in [
        ("ppo.clip_low=0.0001 --with ppo.clip_high=0.0001", "clip_ratio"),
        ("ppo.kl_coef=0.5", "return_mean"),
        ("ppo.kl_estimator=k2", "kl_mean"),
        ("ppo.lambda=0.5", "advantage_std"),
        ("optim.actor.lr=0.01", "lr_actor"),
        ("model.dtype=bf16", "entropy"),
        ("reward.rule=[{kind=\"regex\",pattern=\"[0-9a-f]\",right=2.0}]", "score_mean"),
    ] {
        let text = replay(&job, &format!("--step 3 --with {with}")).well().stdout;
        assert_eq!(
            column(&text, key, 1),
            format!("{:.8e}", of_run(key)).parse::<f64>().expect("a number"),
            "{with}: {text}"
        );
        assert_ne!(column(&text, key, 1), column(&text, key, 2), "{with}: {text}");
        assert!(text.contains("was computed with other settings"), "{with}: {text}");
    }
    let text = replay(&job, "--step 3 --update 2").well().stdout;
    assert!(text.contains("update 2") && text.contains("equal to the bit: step 3, 16 samples"), "{text}");
    let all = replay(&job, "--step 3").well().stdout;
    let second = all.lines().skip_while(|line| !line.starts_with("update ")).nth(2).expect("the second update");
    let loss = column(&text, "policy_loss", 1);
    assert_eq!(second.split_whitespace().nth(1).and_then(|x| x.parse().ok()), Some(loss), "{all}");
}

#[test]
fn a_replay_that_cannot_be_made_is_an_error_that_names_why() {
    let job = recorded("refused", "metrics.rollouts_every_steps=2 checkpoint.every_steps=0");
    let path = job.dir.to_str().expect("UTF-8");
    for (words, code, parts) in [
        (
            "--step 2",
            65,
            "step 2 needs the weights of step 1, and * has only the models of the job before it; the samples of step 1",
        ),
        ("--step 3", 2, "the samples of step 3 are not recorded*choose one of 2, 4"),
        ("--step 9", 2, "step 9 is not in *metrics.jsonl, which has steps 1 to 4"),
        ("--step 0", 2, "--step, from 1"),
        (
            "--step 2 --with rollout.temperature=0.5",
            2,
            "--with rollout.temperature: the samples are those of the record",
        ),
        (
            "--step 2 --with model.actor=model",
            2,
            "--with model.actor: the record and the checkpoint are those of this model",
        ),
        ("--step 2 --with job.seed=1 --with eval.every_steps=1", 2, "job.seed*eval.every_steps: it has no effect"),
        ("--step 2 --with ppo.nonsense=1", 2, "unknown key `nonsense`"),
        ("--step 2 --with dpo.beta=0.5", 2, "--with dpo.beta: it has no effect on this job"),
        ("--step 2 --update 0", 2, "--update must be at least 1"),
        ("--step 2 --against job.toml", 65, "job.toml*replay --save has written"),
    ] {
        let parts: Vec<&str> = parts.split('*').collect();
        run(place(), &[vec!["replay", path], words.split(' ').collect()].concat()).refused(code, &parts);
    }
    run(place(), &["replay", "model", "--step", "1"]).refused(2, &["model is not the directory of a run"]);
    run(place(), &["replay", "--step", "1"]).refused(2, &["replay needs a run directory"]);
}

#[test]
fn a_damaged_or_missing_record_and_a_changed_model_are_named() {
    let job = recorded("damaged", "job.steps=2 checkpoint.every_steps=1");
    let record = job.dir.join("rollouts/step-2.h5");
    let whole = fs::read(&record).expect("it was recorded");
    let mut damaged = whole.clone();
    damaged[whole.len() / 2] ^= 1;
    fs::write(&record, damaged).expect("writes");
    replay(&job, "--step 2").refused(65, &["step-2.h5: its checksum"]);
    fs::write(&record, &whole).expect("writes");
    replay(&job, "--step 2 --update 9").refused(2, &["step 2 has 4 updates"]);

    let copy = place().join("replay-model");
    let _ = fs::remove_dir_all(&copy);
    crate::cli::command::copy(place(), "model/*", &copy);
    let moved = recorded("changed", "job.steps=2 checkpoint.every_steps=1 model.actor=replay-model");
    let weights = copy.join("model.safetensors");
    let mut bytes = fs::read(&weights).expect("a model");
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&weights, bytes).expect("writes");
    replay(&moved, "--step 2").refused(2, &["model.actor", "model.safetensors"]);

    fs::remove_dir_all(job.dir.join("rollouts")).expect("it was there");
    replay(&job, "--step 2").refused(65, &["has no rollouts.h5"]).hinted("metrics.rollouts_every_steps = 1");
}

#[test]
fn scores_of_a_python_reward_are_those_of_the_record() {
    fs::write(
        place().join("replay-reward.py"),
        "def reward_func(queries, prompts, labels):\n    return [float(len(q) % 7) for q in queries]\n",
    )
    .expect("writes");
    let job = recorded("python", "reward.rule=[] reward.python=replay-reward.py");
    fs::remove_file(place().join("replay-reward.py")).expect("it was there");
    let text = replay(&job, "--step 3").well().stdout;
    assert!(text.contains("equal to the bit: step 3") && text.contains("scores: those of the record"), "{text}");
    replay(&job, "--step 3 --with reward.retries=1")
        .refused(2, &["--with reward.retries: the scores are those of the record"]);
}
