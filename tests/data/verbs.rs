use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use argh::FromArgs;
use rlhf_hpc::cli::{corpus, shard, tokenizer};
use rlhf_hpc::comm::Group;
use rlhf_hpc::config::data::DataConfig;
use rlhf_hpc::data::{Hashes, Part, PromptSource, SftSource, prepare};
use rlhf_hpc::error::Kind;
use rlhf_hpc::text::Tokenizer;

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn three_verbs_make_one_shard_that_feeds_sft_and_ppo() {
    let dir = tempfile::tempdir().unwrap();
    let (rows, vocabulary, prefix) =
        (dir.path().join("rows.jsonl"), dir.path().join("tokenizer"), dir.path().join("rows"));
    let args = ["--out", text(&rows), "--rows", "900", "--eval-rows", "100", "--seed", "11"];
    corpus::run(&corpus::Args::from_args(&["corpus"], &args).unwrap()).unwrap();
    let args = [text(&rows), "--vocabulary", "300", "--out", text(&vocabulary)];
    tokenizer::run(&tokenizer::Args::from_args(&["tokenizer"], &args).unwrap()).unwrap();
    let args = [text(&rows), "--tokenizer", text(&vocabulary), "--out", text(&prefix), "--response-key"];
    let args = [&args[..], &["demonstration", "--label-key", "answer", "--split-field", "split"]].concat();
    shard::run(&shard::Args::from_args(&["shard"], &args).unwrap()).unwrap();

    let tokenizer = Arc::new(Tokenizer::load(&vocabulary).unwrap());
    let config = DataConfig {
        prompts: vec![text(&prefix).to_owned()],
        prompt_split: "train".to_owned(),
        eval_split: "eval".to_owned(),
        ..DataConfig::default()
    };
    let vocabulary = tokenizer.vocabulary();
    let shards =
        prepare(&config, Part::Prompt, &tokenizer, vocabulary, dir.path(), &mut Hashes::default(), &Group::one())
            .unwrap();
    let mut prompts = PromptSource::open(&config, &tokenizer, vocabulary, &shards, 0).unwrap();
    let train = prompts.next(900).unwrap();
    let eval = prompts.eval_rows().unwrap();
    assert_eq!(eval.len(), 100);
    let texts = |prompts: &[rlhf_hpc::experience::Prompt]| -> BTreeSet<String> {
        prompts.iter().map(|prompt| prompt.text.clone()).collect()
    };
    assert!(texts(&train).is_disjoint(&texts(&eval)));
    for prompt in train.iter().filter(|prompt| prompt.text.contains('+')) {
        let numbers: Vec<u32> = prompt.text.split(['+', '=']).filter_map(|n| n.parse().ok()).collect();
        assert_eq!(prompt.label, (numbers[0] + numbers[1]).to_string());
    }
    let mut demonstrations = SftSource::open(&config, &tokenizer, vocabulary, &shards, 0).unwrap();
    let row = demonstrations.next(1).unwrap().remove(0);
    let source = fs::read_to_string(&rows).unwrap();
    let prompt = row.mask.iter().position(|m| *m == 1).unwrap();
    let demonstration = tokenizer.decode(&row.tokens[prompt..], true).unwrap();
    let question = tokenizer.decode(&row.tokens[..prompt], true).unwrap();
    assert!(source.lines().any(|line| line.contains(&format!("{question:?}")) && line.contains(&demonstration)));
}

#[test]
fn the_tokenizer_verb_names_the_row_without_text() {
    let dir = tempfile::tempdir().unwrap();
    let rows = dir.path().join("rows.jsonl");
    fs::write(&rows, "{\"prompt\": \"a\"}\n{\"question\": \"b\"}\n").unwrap();
    let args = [text(&rows), "--vocabulary", "300", "--out", text(dir.path())];
    let error = tokenizer::run(&tokenizer::Args::from_args(&["tokenizer"], &args).unwrap()).unwrap_err();
    assert_eq!(error.kind, Kind::Data);
    assert!(error.message.contains("rows.jsonl:2: "), "{error}");
}
