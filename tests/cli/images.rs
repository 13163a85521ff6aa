//! Rows with images through the program: every kind of job, the verbs, and errors that name the row.

use super::command::{copy, mpirun, rows, run};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use tempfile::TempDir;

/// A job of a kind, without its own table.
const JOB: &str = r#"
[job]
dir = "run"
seed = 1
steps = 1
threads = 1
[model]
actor = "model"
[data]
prompts = ["rows.jsonl"]
messages_key = "messages"
label_key = "answer"
chat_template = true
prompt_split = "train"
eval_split = "eval"
[data.split]
by = "field"
field = "split"
"#;

/// A folder with a tiny model of `family` that sees images, images, and rows of all kinds about them.
struct Fixture {
    dir: TempDir,
}

impl Fixture {
    fn new(family: &str) -> Self {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
        let chats: Value = serde_json::from_slice(&fs::read(golden.join("image_chats.json")).unwrap()).unwrap();
        let fixture = Self { dir: tempfile::tempdir().unwrap() };
        let size = json!({"shortest_edge": 256, "longest_edge": 1024});
        let processor = json!({"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 8, "merge_size": 2, "size": size});
        fixture.write("tokenizer/tokenizer.json", chats["tokenizer"].to_string());
        let text = json!({"eos_token": "<|im_end|>", "chat_template": chats["templates"]["qwen3"]["text"]});
        fixture.write("tokenizer/tokenizer_config.json", text.to_string());
        fixture.write("tokenizer/preprocessor_config.json", processor.to_string());
        copy(&golden.join("images"), "*", fixture.dir.path());
        let line = ["init", "--like", family, "--tiny", "--tokenizer", "tokenizer", "--out", "model", "--seed", "1"];
        run(fixture.dir.path(), &line).well();
        let row = |i: usize| {
            let image = ["rgb.png", "420.jpg", "tiny.png", "turned-6.jpg"][i % 4];
            let split = if i < 8 { "train" } else { "eval" };
            json!({"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many?"}]}],
                   "images": [image], "response": "one", "answer": "one", "label": i.is_multiple_of(2), "split": split})
        };
        fixture.rows("rows.jsonl", &(0..10).map(row).collect::<Vec<_>>());
        fixture
    }

    fn write(&self, name: &str, text: impl AsRef<[u8]>) {
        let path = self.dir.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn rows(&self, name: &str, rows: &[Value]) {
        self.write(name, rows.iter().map(Value::to_string).collect::<Vec<_>>().join("\n") + "\n");
    }

    fn read(&self, name: &str) -> Vec<Value> {
        rows(&fs::read_to_string(self.dir.path().join(name)).unwrap())
    }

    /// Rows of pairs and of completions, from those of `rows.jsonl`.
    fn pairs(&self) {
        let pairs = self.read("rows.jsonl").into_iter().map(|mut row| {
            row["prompt"] = row["messages"].take();
            row.as_object_mut().unwrap().remove("messages");
            row["chosen"] = "one".into();
            row["rejected"] = "two".into();
            row["completion"] = "one".into();
            row
        });
        self.rows("pairs.jsonl", &pairs.collect::<Vec<_>>());
    }

    fn json(&self, name: &str) -> Value {
        serde_json::from_slice(&fs::read(self.dir.path().join(name)).unwrap()).unwrap()
    }

    /// The lines of a job of a kind with its own table.
    fn job(&self, kind: &str, more: &str) {
        self.write("job.toml", JOB.replacen("[job]", &format!("[job]\nkind = \"{kind}\""), 1) + more);
    }
}

#[test]
fn every_kind_of_job_reads_images_with_a_tower_that_is_frozen_or_trains() {
    let fixture = Fixture::new("qwen3_vl");
    fixture.pairs();
    let pairs = "data.prompts=[\"pairs.jsonl\"]";
    let usual = ["data.prompts=[\"rows.jsonl\"]", "data.messages_key=messages"];
    let prompts = [pairs, "data.messages_key=prompt", "data.label_key="];
    let rollout = "[rollout]\nresponse_tokens_max = 4\n[reward]\nrule = \"exact\"\n";
    let ppo = rollout.replace("[reward]", "prompts_per_step = 2\nsamples_per_prompt = 2\n[reward]")
        + "[ppo]\nminibatch_samples = 4\n";
    for (kind, more, keys, vision) in [
        ("sft", "[sft]\nminibatch_samples = 8\n", &usual[..], "frozen"),
        (
            "sft",
            "[sft]\nminibatch_samples = 8\n[lora]\nrank = 2\ntargets = [\"q_proj\", \"attn.qkv\"]\n",
            &usual,
            "train",
        ),
        ("dpo", "[dpo]\nminibatch_samples = 8\n", &prompts, "frozen"),
        ("dpo", "[dpo]\nminibatch_samples = 8\n", &prompts, "train"),
        ("reward_model", "[reward_model]\nminibatch_samples = 8\n", &prompts, "train"),
        (
            "kto",
            "[kto]\nminibatch_samples = 8\n",
            &[pairs, "data.messages_key=prompt", "data.label_key=label"],
            "train",
        ),
        ("ppo", &format!("{ppo}[eval]\nevery_steps = 1\n"), &usual, "frozen"),
        ("ppo", &format!("{ppo}[optim.critic]\nlr = 1e-4\n"), &usual, "train"),
        ("eval", rollout, &usual, "frozen"),
    ] {
        fixture.job(kind, more);
        let _ = fs::remove_dir_all(fixture.dir.path().join("run"));
        let vision = format!("model.vision={vision}");
        let ended = run(fixture.dir.path(), &[&["run", "job.toml", &vision][..], keys].concat()).well();
        if kind == "eval" {
            assert!(ended.stderr.contains("eval split"), "{}", ended.stderr);
            continue;
        }
        let export = fixture.dir.path().join("run/export");
        assert!(export.join("preprocessor_config.json").exists() || more.contains("lora"), "{kind}: {}", ended.stderr);
        if kind == "ppo" {
            let step = fixture.read("run/metrics.jsonl").into_iter().find(|line| line.get("logprob_gap_max").is_some());
            assert_eq!(step.unwrap()["logprob_gap_max"], 0.0, "{vision}");
        }
        if kind == "reward_model" {
            let line = ["reward", "--model", "run/export", "--input", "rows.jsonl"];
            let scored = rows(&run(fixture.dir.path(), &line).well().stdout);
            assert_ne!(scored[0]["reward"], scored[1]["reward"], "other images");
            assert_eq!(scored[0]["reward"], scored[4]["reward"], "the same image");
        }
    }
}

#[test]
fn a_checkpoint_of_a_reward_model_that_saw_images_exports_what_its_run_exported() {
    let fixture = Fixture::new("qwen3_5");
    fixture.pairs();
    let keys = ["data.prompts=[\"pairs.jsonl\"]", "data.messages_key=prompt", "data.label_key="];
    fixture.job("reward_model", "[reward_model]\nminibatch_samples = 8\n");
    run(fixture.dir.path(), &[&["run", "job.toml"][..], &keys].concat()).well();
    run(fixture.dir.path(), &["export", "run", "--out", "again"]).well();
    for file in fs::read_dir(fixture.dir.path().join("run/export")).unwrap() {
        let file = file.unwrap().path();
        let again = fixture.dir.path().join("again").join(file.file_name().unwrap());
        assert!(fs::read(&file).unwrap() == fs::read(again).unwrap(), "{}", file.display());
    }
    assert_eq!(fixture.json("again/config.json")["model_type"], "qwen3_5");
}

#[test]
fn a_step_whose_prompts_have_images_is_replayed_to_the_bit() {
    let fixture = Fixture::new("qwen3_vl");
    let sampling = "[rollout]\nresponse_tokens_max = 4\nprompts_per_step = 2\nsamples_per_prompt = 2\n";
    fixture.job("ppo", &format!("{sampling}[reward]\nrule = \"exact\"\n[ppo]\nminibatch_samples = 4\n"));
    run(fixture.dir.path(), &["run", "job.toml", "job.steps=2", "model.vision=train"]).well();
    let shown = run(fixture.dir.path(), &["replay", "run", "--step", "2"]).well().stdout;
    assert!(shown.contains("equal to the bit: step 2"), "{shown}");
}

#[test]
fn generated_rows_with_images_have_the_log_probabilities_of_generate() {
    let fixture = Fixture::new("qwen2_5_vl");
    let (dir, model) = (fixture.dir.path(), ["--model", "model", "--input"]);
    let line = [&["generate"], &model[..], &["rows.jsonl", "--max-new-tokens", "5", "--ignore-eos"]].concat();
    let made = rows(&run(dir, &line).well().stdout);
    fixture.rows("made.jsonl", &made);
    let scored = |name: &str| run(dir, &[&["logprobs"], &model[..], &[name]].concat());
    for (line, made) in rows(&scored("made.jsonl").well().stdout).iter().zip(&made) {
        assert_eq!([&line["tokens"], &line["logprobs"]], [&made["tokens"], &made["logprobs"]]);
    }
    // The same as one sequence.
    let whole = made.iter().map(|made| {
        let mut row = made.clone();
        let (first, rest) = (made["prompt_tokens"].as_array().unwrap(), made["tokens"].as_array().unwrap());
        row["tokens"] = [&first[..], &rest[..]].concat().into();
        row.as_object_mut().unwrap().remove("prompt_tokens");
        row
    });
    fixture.rows("whole.jsonl", &whole.collect::<Vec<_>>());
    for (line, made) in rows(&scored("whole.jsonl").well().stdout).iter().zip(&made) {
        let all = line["logprobs"].as_array().unwrap();
        assert_eq!(all[all.len() - 5..], made["logprobs"].as_array().unwrap()[..]);
    }
    let mut changed = made;
    for (image, words) in [
        (json!([]), "line 1: the row has 0 images of 0 tokens"),
        (json!(["rgb.png", "rgb.png"]), "the messages have 1 place for 2 images"),
        (
            json!(["narrow.png"]),
            "line 1: the row has 1 image of 8 tokens in all, but 2 of its tokens are those of images",
        ),
    ] {
        changed[0]["images"] = image;
        if changed[0]["images"] == json!([]) {
            changed[0]["messages"] = json!([{"role": "user", "content": "How many?"}]);
        } else {
            changed[0]["messages"] = changed[1]["messages"].clone();
        }
        fixture.rows("changed.jsonl", &changed);
        scored("changed.jsonl").refused(65, &["changed.jsonl", words]);
    }
}

#[test]
fn every_job_and_verb_names_the_row_whose_image_it_cannot_read() {
    let fixture = Fixture::new("qwen3_vl");
    let whole = fs::read(fixture.dir.path().join("420.jpg")).unwrap();
    fixture.write("half.jpg", &whole[..whole.len() / 2]);
    let mut rows = fixture.read("rows.jsonl");
    rows[6]["images"] = json!(["half.jpg"]);
    fixture.rows("rows.jsonl", &rows);
    let rollout = "[rollout]\nresponse_tokens_max = 4\n[reward]\nrule = \"exact\"\n";
    let input = ["--model", "model", "--input", "rows.jsonl"];
    for (kind, more) in [("sft", ""), ("ppo", rollout), ("eval", rollout)] {
        fixture.job(kind, more);
        let ended = run(fixture.dir.path(), &["run", "job.toml"]);
        ended.refused(65, &["rows.jsonl:7: half.jpg: the image is truncated or damaged", "copy the file again"]);
    }
    let words = ["rows.jsonl line 7: half.jpg: the image is truncated or damaged"];
    for verb in ["generate", "logprobs"] {
        run(fixture.dir.path(), &[&[verb], &input[..]].concat()).refused(65, &words);
    }
    let line = ["shard", "rows.jsonl", "--tokenizer", "model", "--out", "shard", "--chat-template"];
    run(fixture.dir.path(), &line).refused(65, &["rows.jsonl:7: half.jpg: the image is truncated or damaged"]);
}

/// Shows an image after each turn, in the form that the file `form` names, and ends after the third turn.
const LOOKS: &str = r#"
class Pillow:
    """An image as Pillow has it."""
    def getbands(self):
        return ("R", "G", "B")
    def save(self, file, kind):
        assert kind == "PNG"
        file.write(open("rgb.png", "rb").read())

class Looks:
    def reset(self):
        self.n = 0
    def step(self, tokens):
        self.n += 1
        look = [{"role": "user", "content": [{"type": "image", "image": eval(open("form").read())}, {"type": "text", "text": "?"}]}]
        return look, float(len(tokens) % 2), self.n == 3
"#;

/// The samples of a recorded step, as rows for `logprobs` with the images that the model saw, and the recorded
/// log-probabilities of their sampled tokens by place.
fn recorded(fixture: &Fixture, run: &str) -> (Vec<Value>, Vec<Vec<(usize, f32)>>) {
    let file = hdf5::File::open(fixture.dir.path().join(run).join("rollouts/step-1.h5")).unwrap();
    let group = file.group("step_000001").unwrap();
    let ints = |name: &str| group.dataset(name).unwrap().read_raw::<i64>().unwrap();
    let (tokens, ends, starts) = (ints("tokens"), ints("token_offsets"), ints("response_offsets"));
    let (prompts, mask) = (ints("prompt_tokens"), ints("mask"));
    let labels = group.dataset("label").unwrap().read_raw::<hdf5::types::VarLenUnicode>().unwrap();
    let logprobs = group.dataset("logprobs").unwrap().read_raw::<f32>().unwrap();
    let sample = |i: usize| {
        let row = &tokens[ends[i] as usize..ends[i + 1] as usize];
        let (prompt, response) = row.split_at(prompts[i] as usize);
        let at = starts[i] as usize..starts[i + 1] as usize;
        let mask = &mask[at.clone()];
        let given = mask.chunk_by(PartialEq::eq).filter(|part| part[0] == 0).count();
        let images = [vec![&*labels[i]], vec!["rgb.png"; given]].concat();
        let sampled = logprobs[at].iter().zip(mask).enumerate().filter(|(_, (_, mask))| **mask == 1);
        let sampled = sampled.map(|(place, (logprob, _))| (place, *logprob)).collect();
        (json!({"prompt_tokens": prompt, "tokens": response, "images": images}), sampled)
    };
    (0..prompts.len()).map(sample).unzip()
}

fn feedback_that_cannot_be_read_is_named(fixture: &Fixture) {
    for (form, words) in
        [("\"none.png\"", "none.png does not exist"), ("b\"GIF89a\"", "the image is a GIF, which may be animated")]
    {
        fixture.write("form", form);
        let ended =
            run(fixture.dir.path(), &["run", "job.toml", "job.dir=bad", "reward.retries=0", "rollout.batch_max=1"]);
        ended.assert(75, &["environment Looks of", words]);
    }
}

#[test]
fn images_of_an_environment_are_seen_alike_in_sampling_and_training() {
    for family in ["qwen3_vl", "qwen2_5_vl", "qwen3_5"] {
        let fixture = Fixture::new(family);
        let dir = fixture.dir.path();
        fixture.write("env.py", LOOKS);
        // A sample's label names the image of its prompt.
        let of_prompt = fixture.read("rows.jsonl").into_iter().map(|mut row| {
            row["answer"] = row["images"][0].clone();
            row
        });
        fixture.rows("rows.jsonl", &of_prompt.collect::<Vec<_>>());
        let stops: Vec<usize> = (0..320).step_by(4).collect();
        let rollout = format!(
            "[rollout]\nresponse_tokens_max = 120\nprompts_per_step = 4\nsamples_per_prompt = 2\nstop_token_ids = {stops:?}\n\
             [reward]\nenvironment = {{ python = \"env.py\", turns_max = 4 }}\n[ppo]\nminibatch_samples = 8\n\
             [optim.critic]\nlr = 1e-4\n"
        );
        fixture.job("ppo", &rollout);
        let job = |name: &str, form: &str, ranks: usize, more: &[&str]| {
            fixture.write("form", form);
            let folder = format!("job.dir={name}");
            mpirun(dir, ranks, &[&["run", "job.toml", &folder, "job.steps=2"][..], more].concat()).well();
            let steps = fixture.read(&format!("{name}/metrics.jsonl"));
            let steps = steps.into_iter().filter(|line| line.get("logprob_gap_max").is_some());
            steps.map(|line| ["logprob_gap_max", "score_mean", "policy_loss"].map(|key| line[key].clone())).collect()
        };
        let alone: Vec<_> = job("run", "\"rgb.png\"", 0, &["gradient.order=fixed"]);
        assert!(alone.len() == 2 && alone.iter().all(|step| step[0] == 0.0), "{alone:?}");
        // The verb reads the same rows in one piece.
        let (rows_of_step, sampled) = recorded(&fixture, "run");
        assert!(rows_of_step.iter().any(|row| row["images"].as_array().unwrap().len() == 3), "two answers");
        fixture.rows("step.jsonl", &rows_of_step);
        let scored = rows(&run(dir, &["logprobs", "--model", "model", "--input", "step.jsonl"]).well().stdout);
        for (line, sampled) in scored.iter().zip(&sampled) {
            let found = |(place, _): &(usize, f32)| (*place, line["logprobs"][place].as_f64().unwrap() as f32);
            assert_eq!(sampled.iter().map(found).collect::<Vec<_>>(), *sampled);
        }
        for (name, form, ranks, more) in [
            ("bytes", "open(\"rgb.png\", \"rb\").read()", 0, &["gradient.order=fixed"][..]),
            (
                "column",
                "{\"bytes\": open(\"rgb.png\", \"rb\").read(), \"path\": None}",
                0,
                &["gradient.order=fixed", "rollout.batch_max=2"],
            ),
            ("pillow", "Pillow()", 2, &["gradient.order=fixed"]),
        ] {
            assert_eq!(job(name, form, ranks, more), alone, "{name}");
        }
        let other: Vec<_> = job("other", "\"tiny.png\"", 2, &["mesh.tensor=2", "model.vision=train"]);
        assert!(other[0][0] == 0.0 && other[0][2] != alone[0][2], "another image: {other:?}");
        let text = run(dir, &["samples", "run", "--step", "1"]).well().stdout;
        assert!(text.contains("image") && text.contains("see the report"), "{text}");
        run(dir, &["report", "run", "--out", "report.html"]).well();
        let report = fs::read_to_string(dir.join("report.html")).unwrap();
        let per_step: usize = rows_of_step.iter().map(|row| row["images"].as_array().unwrap().len()).sum();
        assert!(report.matches("data:image/jpeg").count() > per_step / 2, "the images of the environment, too");
        assert!(
            report.contains("title=\"environment\">&lt;|im_end|&gt;\n&lt;|im_start|&gt;user\n&lt;|vision_start|&gt;")
        );
        assert!(
            report.contains("|image_pad|&gt;&lt;|vision_end|") && !report.contains("|image_pad|&gt;&lt;|image_pad|")
        );
        run(dir, &["replay", "run", "--step", "1"]).refused(65, &["the environment gave images"]);
        feedback_that_cannot_be_read_is_named(&fixture);
    }
}
