//! How long rows are: read from the job's own data, and counted as the run cuts them.

use super::models::{archs, job, small};
use super::table::{plan, text};
use rlhf_hpc::comm::Group;
use rlhf_hpc::config::data::DataConfig;
use rlhf_hpc::config::job::JobKind;
use rlhf_hpc::config::{self, Config};
use rlhf_hpc::data::{self, Hashes, Part, Prepared, PromptSource, Reading, RowTokens, SftSource, shard_jsonl};
use rlhf_hpc::plan::{Origin, Rows};
use rlhf_hpc::text::{Tokenizer, train_bpe};
use rlhf_hpc::train::{self, Archs};
use serde_json::{Value, json};
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use tempfile::TempDir;

/// A model's folder with config.json and tokenizer, and rows of mixed lengths.
struct Fixture {
    dir: TempDir,
    archs: Archs,
    tokenizer: Arc<Tokenizer>,
}

impl Fixture {
    fn new(rows: usize) -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let model = dir.path().join("model");
        let texts: Vec<String> = (0..100).map(|i| format!("what is {i} and {}?", i * 7)).collect();
        train_bpe(&texts, 300, &model).expect("a tokenizer");
        fs::write(model.join("config.json"), small().to_string()).expect("a file");
        let lines: Vec<String> = (0..rows).map(|i| row(i).to_string()).collect();
        fs::write(dir.path().join("rows.jsonl"), lines.join("\n")).expect("a file");
        let tokenizer = Arc::new(Tokenizer::load(&model).expect("a tokenizer"));
        let archs = Archs(archs(&small(), false).0[..1].to_vec());
        Self { dir, archs, tokenizer }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn config(&self, kind: &str, data: &str, more: &[&str]) -> Config {
        let words = format!(
            "[job]\nkind = \"{kind}\"\nsteps = 6\ndir = \"{}\"\n[model]\nactor = \"{}\"\n[data]\nprompts = [\"{}\"]\n\
             prompt_tokens_max = 40\nlong_prompts = \"truncate_left\"\nrow_tokens_max = 300\n[rollout]\n\
             prompts_per_step = 8\nsamples_per_prompt = 2\nresponse_tokens_max = 50\n[ppo]\nminibatch_samples = 8\n\
             microbatch_tokens_max = 256\n[sft]\nminibatch_samples = 12\nmicrobatch_tokens_max = 512\n",
            self.path("run").display(),
            self.path("model").display(),
            self.path(data).display()
        );
        let more: Vec<String> = more.iter().map(ToString::to_string).collect();
        config::parse(&words, &more).expect("a job")
    }

    fn read(&self, config: &Config) -> Rows {
        Rows::read(config, &train::shape(config), &self.archs).expect("rows")
    }

    /// The tokenized shards of a run.
    fn prepared(&self, config: &Config, part: Part) -> Prepared {
        let vocabulary = self.archs.actor().vocabulary;
        let reading = Reading { config: &config.data, part, tokenizer: &self.tokenizer, vocabulary };
        data::prepare(reading, &self.path("cache"), &mut Hashes::default(), &Group::one()).expect("shards")
    }

    /// What a run draws, by its own code.
    fn demonstrations(&self, config: &Config, n: usize) -> Vec<RowTokens> {
        let shards = self.prepared(config, Part::Demonstration);
        let vocabulary = self.archs.actor().vocabulary;
        let source = SftSource::open(&config.data, &self.tokenizer, vocabulary, &shards, config.job.seed);
        let rows = source.expect("a source").next(n).expect("rows");
        let of = |row: &data::SftRow| {
            let response = row.mask.iter().filter(|m| **m != 0).count();
            let prompt = row.tokens.len() - response;
            RowTokens { prompt, response }
        };
        rows.iter().map(of).collect()
    }

    fn prompts(&self, config: &Config, n: usize) -> Vec<usize> {
        let shards = self.prepared(config, Part::Prompt);
        let vocabulary = self.archs.actor().vocabulary;
        let source = PromptSource::open(&config.data, &self.tokenizer, vocabulary, &shards, config.job.seed);
        source.expect("a source").next(n).expect("prompts").iter().map(|prompt| prompt.tokens.len()).collect()
    }
}

/// Row i: prompts of 1 to 40 words, responses of 1 to 90; some are cut.
fn row(i: usize) -> Value {
    let words = |n: usize| (0..n).map(|w| format!("{}", (i * 31 + w) % 89)).collect::<Vec<_>>().join(" ");
    json!({ "prompt": words(1 + i * 7 % 40), "response": words(1 + i * 37 % 90) })
}

#[test]
fn the_plan_reads_the_rows_that_a_run_draws_from_jsonl_and_from_shards() {
    let fixture = Fixture::new(300);
    for more in [&[][..], &["sft.loss_on=all"], &["data.order=length_grouped", "job.seed=7"]] {
        let config = fixture.config("sft", "rows.jsonl", more);
        let rows = fixture.read(&config);
        assert_eq!((rows.origin.clone(), rows.drawn.len()), (Origin::Drawn, 6 * 12));
        assert!(!rows.are_alike());
        assert_eq!(rows.drawn, fixture.demonstrations(&config, 6 * 12), "{more:?}");
    }
    let (config, vocabulary) = (DataConfig::default(), fixture.archs.actor().vocabulary);
    let reading = Reading { config: &config, part: Part::Demonstration, tokenizer: &fixture.tokenizer, vocabulary };
    shard_jsonl(reading, &[(&fixture.path("rows.jsonl"), None)], &[], &fixture.path("shard")).expect("a shard");
    let config = fixture.config("sft", "shard", &[]);
    assert_eq!(fixture.read(&config).drawn, fixture.demonstrations(&config, 6 * 12));
    assert!(!fixture.path("run").exists(), "a plan leaves nothing behind");
}

#[test]
fn prompts_are_read_and_responses_count_as_the_longest_unless_told() {
    let fixture = Fixture::new(200);
    let config = fixture.config("ppo", "rows.jsonl", &[]);
    let rows = fixture.read(&config);
    let prompts: Vec<usize> = rows.drawn.iter().map(|row| row.prompt).collect();
    assert_eq!(prompts, fixture.prompts(&config, 6 * 8));
    assert!(rows.drawn.iter().all(|row| row.response == 50));
    let told = rows.clone().with(None, Some(20));
    assert!(told.drawn.iter().zip(&rows.drawn).all(|(a, b)| (a.prompt, a.response) == (b.prompt, 20)));
    let told = rows.with(Some(10), Some(20));
    assert_eq!(told.drawn, [RowTokens { prompt: 10, response: 20 }]);
    assert_eq!(told.origin, Origin::Given);
}

#[test]
fn of_much_text_a_sample_over_all_of_it_is_read() {
    // Prompts grow from the first row to the last.
    let fixture = Fixture::new(1);
    let count = 12_000;
    let line = |i: usize| json!({ "prompt": "x ".repeat(1 + i / 200), "response": "7 ".repeat(100) }).to_string();
    let lines: Vec<String> = (0..count).map(line).collect();
    fs::write(fixture.path("much.jsonl"), lines.join("\n")).expect("a file");
    assert!(fs::metadata(fixture.path("much.jsonl")).expect("a file").len() > 3 << 20);
    let config = fixture.config("ppo", "much.jsonl", &["data.prompt_tokens_max=400", "job.steps=64"]);
    let rows = fixture.read(&config);
    assert_eq!((rows.origin.clone(), rows.drawn.len()), (Origin::Sampled, 512));
    let whole = fixture.prompts(&config, count);
    let mean = whole.iter().sum::<usize>() as f64 / count as f64;
    // Longer rows have more bytes, so that more of them are met.
    let (found, _) = rows.mean();
    assert!((found / mean - 1.0).abs() < 0.1, "{found}, the mean is {mean}");
}

#[test]
fn the_table_says_which_lengths_it_counts() {
    let fixture = Fixture::new(100);
    let kind = |config: &Config| if config.job.kind == JobKind::Ppo { "ppo" } else { "sft" };
    let said = |config: &Config, more: &[&str]| {
        let file = fixture.path(&format!("{}.toml", kind(config)));
        fs::write(&file, config.to_toml()).expect("a file");
        let ended = plan(&file, &[&["--gpu", "h100", "--ranks", "1"], more].concat());
        assert_eq!(ended.status.code(), Some(0), "{}", text(&ended.stderr));
        text(&ended.stdout).split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let (sft, ppo) = (fixture.config("sft", "rows.jsonl", &[]), fixture.config("ppo", "rows.jsonl", &[]));
    let table = said(&sft, &[]);
    assert!(table.contains("rows lengths are those of the 72 rows that the job draws first: "), "{table}");
    let table = said(&ppo, &[]);
    assert!(table.contains("lengths are those of the 48 prompts that the job draws first: "), "{table}");
    assert!(table.contains("nobody knows before the run, all count as the longest: 50 tokens"), "{table}");
    assert!(said(&ppo, &["--response-tokens", "20"]).contains("responses as the command line says: 20 tokens"));
    let given = said(&ppo, &["--response-tokens", "20", "--prompt-tokens", "10"]);
    assert!(
        given.contains("samples of 10 + 20 tokens") && given.contains("as long as the command line says"),
        "{given}"
    );
    let table = said(&fixture.config("sft", "nosuch.jsonl", &[]), &[]);
    assert!(table.contains("all counted as long as the job allows, as lengths could not be read: "), "{table}");
    assert!(table.contains("12 rows of 300 tokens") && table.contains("nosuch.jsonl"), "{table}");
}

/// The longest rows of `job` stay what they were, whatever its data.
#[test]
fn without_lengths_every_row_is_the_longest_that_the_job_allows() {
    let shape = train::shape(&job(&[]));
    let rows = Rows::longest(&job(&[]), &shape, 4096, "no data");
    assert_eq!(rows.drawn, [RowTokens { prompt: 1024, response: 1024 }]);
    assert_eq!(Rows::longest(&job(&[]), &shape, 1500, "").longest_row().all(), 1500);
}
