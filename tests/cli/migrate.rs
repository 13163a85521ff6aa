//! `migrate`: launches of other systems become jobs that pass a dry run, or the error names the mistake.

use super::command::{self, program};
use super::fixture::Fixture;
use crate::process::{Ended, Running};
use serde_json::{Value, json};
use std::net::TcpListener;
use std::path::Path;
use toml::Table;

/// Launches in the style of each system. A line `=== NAME` or `=== NAME FILE` begins each.
const OPENRLHF: &str = include_str!("launches_openrlhf.txt");
const TRL: &str = include_str!("launches_trl.txt");
const VERL: &str = include_str!("launches_verl.txt");

/// Launches with an option that changes what is learned and has no counterpart.
const MISSING: &[&str] = &["dapo"];

/// Facts about jobs: the launch, a key, and its value.
const FACTS: &[(&str, &str, &str)] = &[
    ("sft-0.5", "data.prompts", r#"["hf://acme/questions"]"#),
    ("sft-0.5", "model.actor", r#""acme/llama-8b""#),
    ("sft-0.5", "data.rows_max", "500000"),
    ("sft-0.5", "data.row_tokens_max", "2048"),
    ("sft-0.5", "data.long_prompts", r#""truncate_right""#),
    ("sft-0.5", "data.template", r#""User: {}\nAssistant: ""#),
    ("sft-heredoc", "sft.minibatch_samples", "16"),
    ("sft-heredoc", "job.dir", r#""./ckpt/one""#),
    ("sft-heredoc", "sft.epochs", "2.0"),
    ("sft-multiturn", "data.messages_key", r#""messages""#),
    ("sft-multiturn", "lora.targets", r#"["q_proj", "v_proj"]"#),
    ("sft-chat-last", "sft.loss_on", r#""last_response""#),
    ("sft-chat-last", "optim.actor.schedule", r#""constant""#),
    ("sft-mixture", "data.weights", "[0.25, 0.75]"),
    ("sft-mixture", "data.split.eval_files", r#"["rows/held.jsonl"]"#),
    ("rm-logexp", "data.template", r#""Q: {}\nA: ""#),
    ("rm-margin", "data.margin_key", r#""margin""#),
    ("dpo-0.5", "dpo.beta", "0.2"),
    ("dpo-ipo", "optim.actor.betas", "[0.9, 0.98]"),
    ("kd-0.7", "distill.ce_coef", "0.6"),
    (
        "ppo-ray-0.5",
        "mesh.placement",
        r#"[{ roles = ["actor", "reference"], ranks = "0..2" }, { roles = ["critic", "reward"], ranks = "2..4" }, { roles = ["rollout"], ranks = "4..8" }]"#,
    ),
    (
        "ppo-rm-pool",
        "mesh.placement",
        r#"[{ roles = ["actor", "critic", "reference"], ranks = "0..16" }, { roles = ["reward"], ranks = "16..20" }]"#,
    ),
    ("ppo-local-0.5", "data.prompt_key", r#""question""#),
    ("ppo-local-0.5", "job.steps", "1"),
    ("grpo-0.7", "ppo.advantage", r#""grpo""#),
    ("grpo-0.7", "ppo.kl_in", r#""loss""#),
    ("grpo-0.7", "ppo.entropy_coef", "0.001"),
    ("rloo-0.7", "ppo.kl_in", r#""none""#),
    ("reinforce-baseline-0.7", "rollout.samples_per_prompt", "4"),
    ("reinforce-baseline-0.7", "optim.actor.ema_beta", "0.99"),
    ("ppo-0.11", "ppo.value_clip", "0.5"),
    ("ppo-0.11", "data.prompt_tokens_max", "1024"),
    ("dapo-0.11", "ppo.clip_high", "0.28"),
    ("async-0.11", "mesh.async_updates_max", "1"),
    ("correction-0.11", "ppo.correction", r#""tis""#),
    ("sft-cli", "model.actor", r#""acme/qwen@v2""#),
    ("sft-cli", "data.prompts", r#"["hf://acme/demos/main"]"#),
    ("sft-accelerate", "sft.minibatch_samples", "32"),
    ("sft-accelerate", "optim.actor.betas", "[0.9, 0.999]"),
    ("trl-sft-qlora", "optim.actor.warmup_ratio", "0.1"),
    ("sft-torchrun", "sft.minibatch_samples", "128"),
    ("sft-slurm", "sft.minibatch_samples", "16"),
    ("grpo", "rollout.prompts_per_step", "4"),
    ("grpo", "ppo.minibatch_samples", "32"),
    ("grpo", "ppo.kl_in", r#""none""#),
    ("grpo-kl", "ppo.advantage", r#""dr-grpo""#),
    ("grpo-kl", "ppo.epochs", "2"),
    ("grpo-kl", "ppo.kl_weighted", "true"),
    ("grpo-cispo", "ppo.clip_high", "4.0"),
    ("grpo-gspo", "ppo.loss", r#""gspo""#),
    ("cpo-simpo", "dpo.simpo_margin", "1.0"),
    ("gkd-on", "distill.on_policy", "true"),
    ("yaml-grpo", "job.steps", "20"),
    ("grpo-gsm8k", "ppo.minibatch_samples", "1280"),
    ("grpo-gsm8k", "ppo.dual_clip", "3.0"),
    ("grpo-gsm8k", "ppo.kl_estimator", r#""k3""#),
    ("grpo-gsm8k", "optim.actor.decay_vectors", "true"),
    ("ppo-gsm8k", "optim.critic.lr", "1e-5"),
    ("dr-grpo", "ppo.advantage", r#""dr-grpo""#),
    ("yaml", "rollout.temperature", "0.8"),
    ("yaml", "optim.actor.weight_decay", "0.1"),
];

/// A folder with models and rows of all kinds.
fn place() -> Fixture {
    let fixture = Fixture::new();
    fixture.edit("config.json", |config| config["max_position_embeddings"] = json!(4096));
    fixture.run(&["init", "--config", "config.json", "--tokenizer", "tokenizer", "--out", "base"]).well();
    fixture.write("base/chat_template.jinja", "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}");
    fixture.edit("config.json", |config| config["architectures"] = json!(["LlamaForSequenceClassification"]));
    fixture.run(&["init", "--config", "config.json", "--tokenizer", "tokenizer", "--out", "rm"]).well();
    fixture.edit("rm/config.json", |config| {
        config["mean"] = json!(0.5);
        config["std"] = json!(2.0);
    });
    let row = |i: usize| {
        json!({
            "question": format!("what is {i}?"), "prompt": format!("what is {i}?"), "response": format!("it is {i}"),
            "completion": format!("it is {i}"), "answer": i, "label": i.is_multiple_of(2), "chosen": format!("it is {i}"),
            "rejected": format!("it is {}", i + 1), "margin": 0.5, "text": "some words", "reward_model": {"ground_truth": i},
        })
    };
    let rows: Vec<Value> = (0..64).map(row).collect();
    let names = "demos more held pairs labels prompts text verl gsm8k_train gsm8k_held trl_demos trl_pairs trl_labels trl_prompts";
    for name in names.split(' ') {
        let first = if name.ends_with("held") { 60 } else { 0 };
        fixture.jsonl(&format!("rows/{name}.jsonl"), &rows[first..]);
    }
    let turn = |role: &str, text: String| json!({"role": role, "content": text});
    let chat = |i: usize| json!({"messages": [turn("user", format!("what is {i}?")), turn("assistant", format!("it is {i}"))]});
    fixture.jsonl("rows/chat.jsonl", &(0..64).map(chat).collect::<Vec<_>>());
    let steps = |i: usize| json!({"question": format!("{i} x and x"), "label": ["a", "b"]});
    fixture.jsonl("rows/steps.jsonl", &(0..64).map(steps).collect::<Vec<_>>());
    fixture
}

const PYTHON: &str = "
def reward_func(queries, prompts, labels, **kwargs): return [1.0 for _ in queries]
def length(prompts, completions, **kwargs): return [1.0 for _ in prompts]
def accuracy_reward(prompts, completions, **kwargs): return [1.0 for _ in prompts]
def think_format_reward(prompts, completions, **kwargs): return [1.0 for _ in prompts]
def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 1.0
";

/// Makes each path that the job names, as a user does before the first run.
fn make_paths(fixture: &Fixture, job: &Table) {
    let strings = |value: Option<&toml::Value>| -> Vec<String> {
        let one = |value: &toml::Value| match value {
            toml::Value::Table(table) => {
                ["file", "dir", "python"].iter().find_map(|key| table.get(*key)?.as_str()).map(str::to_owned)
            }
            value => value.as_str().map(str::to_owned),
        };
        match value {
            Some(toml::Value::Array(all)) => all.iter().filter_map(one).collect(),
            value => value.and_then(one).into_iter().collect(),
        }
    };
    let of = |table: &str, key: &str| strings(job.get(table).and_then(|table| table.get(key)));
    let link = |dir: String, to: &str| {
        let path = fixture.path(&dir);
        if !path.exists() {
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            std::os::unix::fs::symlink(fixture.path(to), path).expect("a link");
        }
    };
    for key in ["actor", "reference", "teachers"] {
        for dir in of("model", key) {
            link(dir, "base");
        }
    }
    for dir in of("model", "critic").into_iter().chain(of("reward", "models")) {
        link(dir, "rm");
    }
    for file in of("reward", "python") {
        fixture.write(&file, PYTHON);
    }
    for file in of("reward", "environment") {
        fixture.write(&file, "class Agent:\n    def step(self, text): return '', 1.0, True\n");
    }
    let held = job.get("data").and_then(|data| data.get("split")?.get("eval_files"));
    let rows = of("data", "prompts").into_iter().map(|name| (name, "rows/demos.jsonl"));
    for (name, from) in rows.chain(strings(held).into_iter().map(|name| (name, "rows/held.jsonl"))) {
        // In the Hugging Face cache of the fixture.
        let cached = name.strip_prefix("hf://").map(|id| {
            let [org, repository, folder] = [0, 1, 2].map(|i| id.split('/').nth(i).unwrap_or_default());
            let home = format!(".cache/huggingface/hub/datasets--{org}--{repository}");
            fixture.write(&format!("{home}/refs/main"), "1".repeat(40));
            format!("{home}/snapshots/{}/{folder}", "1".repeat(40))
        });
        let name = cached.unwrap_or(name);
        if !fixture.path(&name).exists() {
            let file = if Path::new(&name).extension().is_some() { name } else { format!("{name}/train.jsonl") };
            fixture.write(&file, fixture.read(from));
        }
    }
}

/// The program with the fixture as the home directory.
fn at_home(fixture: &Fixture, arguments: &[&str]) -> Ended {
    let mut command = program(fixture.root(), 0);
    command.args(arguments).env("HOME", fixture.root());
    for name in ["HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"] {
        command.env_remove(name);
    }
    Running::new(command).end()
}

/// Names of the options in a launch.
fn options(text: &str) -> Vec<String> {
    let is_name = |word: &str| !word.is_empty() && word.chars().all(|c| c.is_alphanumeric() || "_.-".contains(c));
    let after = ["train_", ".py ", "trl ", "main_ppo"].iter().filter_map(|mark| Some((text.find(mark)?, *mark))).min();
    let launched = after.map_or(text, |(at, _)| &text[at..]);
    let words = launched.split(|c: char| c.is_whitespace() || "()\"".contains(c));
    let of_word = |word: &str| match word.strip_prefix("--") {
        Some(option) => Some(option.split('=').next()?.replace('-', "_")),
        None => {
            word.trim_start_matches('+').split_once('=').map(|(key, _)| key.to_owned()).filter(|key| key.contains('.'))
        }
    };
    // `deepspeed --module` only says how the program is named.
    words.filter_map(of_word).filter(|name| is_name(name) && name != "module").collect()
}

/// The value of a key of a job file.
fn value_at<'a>(job: &'a Table, path: &str) -> Option<&'a toml::Value> {
    let (table, key) = path.rsplit_once('.')?;
    let table = table.split('.').try_fold(job, |table, key| table.get(key)?.as_table())?;
    table.get(key)
}

fn convert_all(text: &str) {
    let fixture = place();
    let (mut faults, mut count) = (Vec::new(), 0);
    // A dry run opens connections to reward services.
    let service = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let text = text.replace("localhost:5000", &service.local_addr().expect("an address").to_string());
    for case in text.split("=== ").skip(1) {
        let (head, text) = case.split_once('\n').expect("a name and a launch");
        let (name, file) = head.split_once(' ').unwrap_or((head, "launch.sh"));
        count += 1;
        fixture.write(file, text);
        let ended = at_home(&fixture, &["migrate", file, "-o", "made.toml", "--force", "--rows", "64"]);
        let expected = i32::from(MISSING.contains(&name));
        if ended.code != Some(expected) {
            faults.push(format!("{name}: {:?} {}", ended.code, ended.stderr));
            continue;
        }
        let lost = options(text).into_iter().filter(|option| !ended.stderr.contains(option));
        faults.extend(lost.map(|option| format!("{name}: {option} is not in {}", ended.stderr)));
        let job = fixture.text("made.toml");
        let job: Table = job.parse().unwrap_or_else(|e| panic!("{name}: {e}\n{job}"));
        for (_, key, value) in FACTS.iter().filter(|(of, ..)| *of == name) {
            let found = value_at(&job, key);
            let wanted: Table = format!("value = {value}").parse().expect("a value of TOML");
            if found != wanted.get("value") {
                faults.push(format!("{name}: {key} is {found:?}, not {value}"));
            }
        }
        make_paths(&fixture, &job);
        let dry = at_home(&fixture, &["run", "--dry-run", "made.toml"]);
        if dry.code != Some(0) || dry.stderr.contains("no effect") {
            faults.push(format!("{name}: the dry run: {}\n{}", dry.stderr, fixture.text("made.toml")));
        }
    }
    assert!(faults.is_empty(), "{} of {count}:\n{}", faults.len(), faults.join("\n\n"));
}

#[test]
fn launches_of_openrlhf_become_jobs_that_account_for_every_option() {
    convert_all(OPENRLHF);
}

#[test]
fn launches_of_trl_become_jobs_that_account_for_every_option() {
    convert_all(TRL);
}

#[test]
fn launches_of_verl_become_jobs_that_account_for_every_option() {
    convert_all(VERL);
}

#[test]
fn at_least_70_launches_are_converted() {
    let count = [OPENRLHF, TRL, VERL].iter().map(|text| text.matches("=== ").count()).sum::<usize>();
    assert!(count >= 70, "{count}");
}

/// Scripts that cannot be read: the exit code, and words of the error.
const REFUSED: &[(&str, &[&str])] = &[
    (
        "M=$(ls | head -1)\ntrl sft --model_name_or_path $M --dataset_name rows/a.jsonl\n",
        &["line 2", "the command substitution `$(ls | head -1)`"],
    ),
    ("trl sft --model_name_or_path `pwd`\n", &["line 1", "the command substitution `pwd`"]),
    ("trl sft --model_name_or_path $MODEL --dataset_name x.jsonl\n", &["`MODEL`, which the script does not set"]),
    ("trl sft --model_name_or_path $1\n", &["the parameter `$1`"]),
    ("if true; then M=a; fi\ntrl sft --model_name_or_path $M\n", &["`M`, which line 1 sets only under a condition"]),
    ("for M in a b; do\n  trl sft --model_name_or_path $M\ndone\n", &["`M` of a loop"]),
    ("trl sft --model_name_or_path {a,b}\n", &["a list in braces"]),
    ("trl sft --model_name_or_path <(echo a)\n", &["process substitution"]),
    ("X=1\ntrl sft --model_name_or_path 'a\n", &["line 2: a quote ' is not closed"]),
    ("trl sft --model_name_or_path \"a\n", &["line 1: a quote \" is not closed"]),
    ("cat <<EOF\ntext\n", &["line 1: the here-document \"EOF\" is not closed"]),
    ("trl sft --model_name_or_path ${A\n", &["line 1: ${ is not closed"]),
    ("echo hello\n", &["has no launch"]),
    ("trl sft --a b\ntrl dpo --a b\n", &["has 2 launches, in lines 1"]),
    ("trl sft --model_name_or_path base\n", &["names no rows"]),
    ("trl sft --dataset_name a.jsonl\n", &["names no model"]),
    (
        "trl sft --model_name_or_path base --dataset_name a.jsonl --learning_rate fast\n",
        &["--learning_rate", "\"fast\""],
    ),
    ("python -m openrlhf.cli.batch_inference --pretrain a\n", &["batch_inference of OpenRLHF is not a job"]),
    ("python -m verl.trainer.fsdp_sft_trainer a.b=1\n", &["fsdp_sft_trainer of verl is not converted"]),
    ("python -m verl.trainer.main_ppo data.train_files=[a\n", &["the list [a is not closed"]),
];

#[test]
fn a_script_that_cannot_be_known_without_running_it_is_rejected_with_the_reason() {
    let fixture = Fixture::new();
    for (script, words) in REFUSED {
        fixture.write("launch.sh", script);
        fixture.run(&["migrate", "launch.sh"]).refused(2, words);
    }
    fixture.write("bad.yaml", "model_name_or_path: base\ndataset_name: [a\nlearning_rate: 1\n");
    fixture.run(&["migrate", "bad.yaml"]).refused(2, &["bad.yaml: line "]);
    fixture.write("same.yaml", "model_name_or_path: base\n");
    fixture.run(&["migrate", "same.yaml"]).refused(2, &["several commands"]).hinted("trl/sft");
    fixture.run(&["migrate"]).refused(2, &["needs a script"]);
    fixture.run(&["migrate", "none.sh"]).refused(2, &["none.sh does not exist"]);
}

#[test]
fn nothing_of_a_script_is_executed() {
    let fixture = Fixture::new();
    fixture.write("launch.sh", "touch made\nX=$(touch made)\n: `touch made`\ntrl sft --model_name_or_path base --dataset_name a.jsonl > made\n");
    fixture.run(&["migrate", "launch.sh"]).well();
    assert!(!fixture.path("made").exists());
}

#[test]
fn unknown_and_missing_options_end_with_1_unless_they_are_accepted() {
    let fixture = Fixture::new();
    let launch = [
        "migrate",
        "--",
        "trl",
        "sft",
        "--model_name_or_path=base",
        "--dataset_name",
        "a.jsonl",
        "--neftune_noise_alpha",
        "5",
        "--sparkle",
        "2",
    ];
    let ended = fixture.run(&launch);
    ended.assert(1, &["--sparkle 2", "has no such option", "2 options change what is learned"]);
    assert!(ended.stdout.contains("[job]\nkind = \"sft\""), "{}", ended.stdout);
    let accepted = [&["migrate", "--accept"], &launch[1..]].concat();
    fixture.run(&accepted).well();
    // The same option with the value that changes nothing.
    let off = [
        "migrate",
        "--",
        "trl",
        "sft",
        "--model_name_or_path",
        "base",
        "--dataset_name",
        "a.jsonl",
        "--neftune_noise_alpha",
        "null",
    ];
    fixture.run(&off).well();
}

#[test]
fn options_alone_need_the_name_of_their_command() {
    let fixture = Fixture::new();
    let options = ["--", "--pretrain", "base", "--dataset", "a.jsonl", "--input_key", "q", "--output_key", "r"];
    let ended = fixture.run(&[&["migrate", "--as", "openrlhf/train_sft@0.5.8"], &options[..]].concat()).well();
    assert!(ended.stderr.contains("OpenRLHF 0.5.8 train_sft"), "{}", ended.stderr);
    fixture
        .run(&[&["migrate", "--as", "openrlhf/train_sft@9"], &options[..]].concat())
        .refused(2, &["no options of OpenRLHF 9"]);
    fixture.run(&[&["migrate"], &options[..]].concat()).refused(2, &["no launch"]);
    let listed = command::run(fixture.root(), &["migrate", "--options", "verl"]).well();
    assert!(listed.stdout.lines().count() > 820, "{}", listed.stdout.lines().count());
}
