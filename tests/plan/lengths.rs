//! Lengths of rows: read from the job's own data, and counted as the run truncates them.

use super::models::{archs, job, small};
use crate::cli::fixture::Fixture;
use rlhf_hpc::comm::Group;
use rlhf_hpc::config::data::DataConfig;
use rlhf_hpc::config::{self, Config};
use rlhf_hpc::data::{self, Hashes, Prepared, PromptSource, Reading, RowKind, RowTokens, SftSource, shard_rows};
use rlhf_hpc::plan::{Origin, Rows};
use rlhf_hpc::text::Tokenizer;
use rlhf_hpc::train::{self, Archs};
use serde_json::{Value, json};
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

/// A job with rows of mixed lengths, of no split and no label.
const SETS: &str = "model.actor=planned job.steps=6 data.label_key= data.prompt_split= data.eval_split= data.prompt_tokens_max=40 \
                    data.long_prompts=truncate_left data.row_tokens_max=300 rollout.prompts_per_step=8 \
                    rollout.samples_per_prompt=2 rollout.response_tokens_max=50 ppo.minibatch_samples=8 \
                    ppo.microbatch_tokens_max=256 sft.minibatch_samples=12 sft.microbatch_tokens_max=512 eval.every_steps=0";

fn sets(kind: &str, data: &str, more: &[&str]) -> Vec<String> {
    let of = [format!("job.kind={kind}"), format!("data.prompts=[\"{data}\"]")];
    SETS.split_whitespace().chain(more.iter().copied()).map(String::from).chain(of).collect()
}

/// A folder `planned` with config.json and tokenizer, and rows of mixed lengths.
struct Lengths {
    fixture: Fixture,
    archs: Archs,
    tokenizer: Arc<Tokenizer>,
}

impl Lengths {
    fn new(rows: usize) -> Self {
        let fixture = Fixture::new();
        fixture.copy("tokenizer", "planned");
        fixture.write("planned/config.json", small().to_string());
        fixture.jsonl("mixed.jsonl", &(0..rows).map(row).collect::<Vec<_>>());
        let tokenizer = Arc::new(Tokenizer::load(&fixture.path("planned")).expect("a tokenizer"));
        Self { fixture, archs: Archs(archs(&small(), false).0[..1].to_vec()), tokenizer }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.fixture.path(name)
    }

    fn config(&self, kind: &str, data: &str, more: &[&str]) -> Config {
        // Paths of overrides start from the current folder.
        let mut sets = sets(kind, &self.path(data).display().to_string(), more);
        sets.push(format!("model.actor={}", self.path("planned").display()));
        config::load(&self.path("job.toml"), &sets).expect("a job")
    }

    fn read(&self, config: &Config) -> Rows {
        Rows::read(config, &train::shape(config), &self.archs).expect("rows")
    }

    /// The tokenized shards of a run.
    fn prepared(&self, config: &Config, kind: RowKind) -> Prepared {
        let vocabulary = self.archs.actor().vocabulary;
        let reading = Reading { config: &config.data, kind, tokenizer: &self.tokenizer, vocabulary };
        data::prepare(reading, &self.path("cache"), &mut Hashes::default(), &Group::one()).expect("shards")
    }

    /// The rows that a run uses, computed by its own code.
    fn demonstrations(&self, config: &Config, n: usize) -> Vec<RowTokens> {
        let shards = self.prepared(config, RowKind::Demonstration);
        let vocabulary = self.archs.actor().vocabulary;
        let source = SftSource::open(&config.data, &self.tokenizer, vocabulary, &shards, config.job.seed);
        let rows = source.expect("a source").next(n).expect("rows");
        let of = |row: &data::SftRow| {
            let response = row.mask.iter().filter(|m| **m != 0).count();
            let prompt = row.tokens.len() - response;
            RowTokens { prompt, response, ..RowTokens::default() }
        };
        rows.iter().map(of).collect()
    }

    fn prompts(&self, config: &Config, n: usize) -> Vec<usize> {
        let shards = self.prepared(config, RowKind::Prompt);
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
fn the_plan_reads_the_rows_that_a_run_uses_from_jsonl_and_from_shards() {
    let fixture = Lengths::new(300);
    for more in [&[][..], &["sft.loss_on=all"], &["data.order=length_grouped", "job.seed=7"]] {
        let config = fixture.config("sft", "mixed.jsonl", more);
        let rows = fixture.read(&config);
        assert_eq!((rows.origin.clone(), rows.drawn.len()), (Origin::Drawn, 6 * 12));
        assert!(!rows.are_alike());
        assert_eq!(rows.drawn, fixture.demonstrations(&config, 6 * 12), "{more:?}");
    }
    let (config, vocabulary) = (DataConfig::default(), fixture.archs.actor().vocabulary);
    let reading = Reading { config: &config, kind: RowKind::Demonstration, tokenizer: &fixture.tokenizer, vocabulary };
    shard_rows(reading, &[(&fixture.path("mixed.jsonl"), None)], &[], &fixture.path("shard")).expect("a shard");
    let config = fixture.config("sft", "shard", &[]);
    assert_eq!(fixture.read(&config).drawn, fixture.demonstrations(&config, 6 * 12));
    assert!(!fixture.path("run").exists(), "a plan leaves no files");
}

#[test]
fn prompt_lengths_are_read_and_responses_count_as_the_longest_unless_set() {
    let fixture = Lengths::new(200);
    let config = fixture.config("ppo", "mixed.jsonl", &[]);
    let rows = fixture.read(&config);
    let prompts: Vec<usize> = rows.drawn.iter().map(|row| row.prompt).collect();
    assert_eq!(prompts, fixture.prompts(&config, 6 * 8));
    assert!(rows.drawn.iter().all(|row| row.response == 50));
    let told = rows.clone().with(None, Some(20));
    assert!(told.drawn.iter().zip(&rows.drawn).all(|(a, b)| (a.prompt, a.response) == (b.prompt, 20)));
    let told = rows.with(Some(10), Some(20));
    assert_eq!(told.drawn, [RowTokens { prompt: 10, response: 20, ..RowTokens::default() }]);
    assert_eq!(told.origin, Origin::Given);
}

#[test]
fn a_sample_spread_over_a_large_text_is_read() {
    // Prompts grow from the first row to the last.
    let fixture = Lengths::new(1);
    let count = 12_000;
    let row = |i: usize| json!({ "prompt": "x ".repeat(1 + i / 200), "response": "7 ".repeat(100) });
    fixture.fixture.jsonl("much.jsonl", &(0..count).map(row).collect::<Vec<_>>());
    assert!(fs::metadata(fixture.path("much.jsonl")).expect("a file").len() > 3 << 20);
    let config = fixture.config("ppo", "much.jsonl", &["data.prompt_tokens_max=400", "job.steps=64"]);
    let rows = fixture.read(&config);
    assert_eq!((rows.origin.clone(), rows.drawn.len()), (Origin::Sampled, 512));
    let whole = fixture.prompts(&config, count);
    let mean = whole.iter().sum::<usize>() as f64 / count as f64;
    // Longer rows have more bytes, so a sample by bytes contains more of them.
    let (found, _) = rows.mean();
    assert!((found / mean - 1.0).abs() < 0.1, "{found}, the mean is {mean}");
}

#[test]
fn the_table_says_which_lengths_it_counts() {
    let fixture = Lengths::new(100);
    let said = |kind: &str, data: &str, more: &[&str]| {
        let sets = sets(kind, data, more);
        let arguments = ["plan", "job.toml", "--gpu", "h100", "--ranks", "1"].into_iter();
        let ended = fixture.fixture.run(&arguments.chain(sets.iter().map(String::as_str)).collect::<Vec<_>>());
        ended.well().stdout.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let ppo = |more: &[&str]| said("ppo", "mixed.jsonl", more);
    let table = said("sft", "mixed.jsonl", &[]);
    assert!(table.contains("rows lengths of the first 72 rows of the job: "), "{table}");
    let table = ppo(&[]);
    assert!(table.contains("lengths of the first 48 prompts of the job: "), "{table}");
    assert!(table.contains("not known in advance, so all count as the longest: 50 tokens"), "{table}");
    assert!(ppo(&["--response-tokens", "20"]).contains("responses from the command line: 20 tokens"));
    let given = ppo(&["--response-tokens", "20", "--prompt-tokens", "10"]);
    assert!(given.contains("samples of 10 + 20 tokens") && given.contains("lengths from the command line"), "{given}");
    let expected = ppo(&["rollout.response_tokens_expected=30"]);
    let from_key = "responses of 30 tokens are expected (rollout.response_tokens_expected): the time is theirs";
    assert!(expected.contains(from_key), "{expected}");
    let mean = json!({"step": 3, "time_unix_s": 1.0, "response_tokens_mean": 12.6});
    fixture.fixture.jsonl("of-last/metrics.jsonl", &[mean]);
    let expected = ppo(&["job.dir=of-last"]);
    assert!(expected.contains("responses of 13 tokens are expected (the mean of the last step in "), "{expected}");
    let table = said("sft", "nosuch.jsonl", &[]);
    assert!(
        table.contains("all counted as the longest that the job allows, because lengths could not be read: "),
        "{table}"
    );
    assert!(table.contains("12 rows of 300 tokens") && table.contains("nosuch.jsonl"), "{table}");
}

/// The longest rows of `job` do not depend on its data.
#[test]
fn without_lengths_every_row_is_the_longest_that_the_job_allows() {
    let shape = train::shape(&job(&[]));
    let rows = Rows::longest(&job(&[]), &shape, 4096, "no data");
    assert_eq!(rows.drawn, [RowTokens { prompt: 1024, response: 1024, ..RowTokens::default() }]);
    assert_eq!(Rows::longest(&job(&[]), &shape, 1500, "").longest_row().all(), 1500);
}
