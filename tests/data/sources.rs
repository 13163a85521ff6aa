use std::collections::{BTreeSet, HashMap, HashSet};
use std::os::unix::fs::DirEntryExt;

use rlhf_hpc::config::data::{DataConfig, EvalSetConfig, LongPrompts, Order, SplitBy, SplitConfig};
use rlhf_hpc::data::{Cursor, Ledger, RowKind};
use rlhf_hpc::error::Kind;
use rlhf_hpc::experience::Prompt;
use serde_json::json;

use crate::data::fixture::{Fixture, config, questions};
use crate::data::rows::args;

fn ratio(path: &str) -> DataConfig {
    DataConfig {
        prompt_split: "train".to_owned(),
        eval_split: "test".to_owned(),
        split: SplitConfig { by: SplitBy::Ratio, eval_ratio: 0.2, ..SplitConfig::default() },
        ..config(path)
    }
}

fn texts(prompts: &[Prompt]) -> BTreeSet<String> {
    prompts.iter().map(|p| p.text.clone()).collect()
}

#[test]
fn an_epoch_yields_every_row_once_and_the_next_epoch_has_another_order() {
    let fixture = Fixture::new();
    let mut source = fixture.prompts(&config(&fixture.jsonl("q.jsonl", &questions(103))), 5).unwrap();
    let mut handed = Vec::new();
    // 103 is not a multiple of 10, so batches cross the end of the epoch.
    for _ in 0..21 {
        let batch = source.next(10).unwrap();
        assert_eq!(batch.len(), 10);
        handed.extend(batch);
    }
    let ids: Vec<u64> = handed.iter().map(|p| p.id).collect();
    let whole: Vec<u64> = (0..103).collect();
    let sorted = |ids: &[u64]| {
        let mut ids = ids.to_vec();
        ids.sort_unstable();
        ids
    };
    assert_eq!(sorted(&ids[..103]), whole);
    assert_eq!(sorted(&ids[103..206]), whole);
    assert_ne!(ids[..103], ids[103..206]);
    assert_ne!(ids[..103], whole);
    let prompt = &handed[7];
    assert_eq!(prompt.label, (2 * prompt.id).to_string());
    assert!(prompt.text.ends_with(&format!("what is {} plus {}?", prompt.id, prompt.id)));
    assert_eq!(fixture.tokenizer.encode(&prompt.text, true).unwrap(), prompt.tokens);
    assert!(prompt.source.ends_with("q.jsonl"));
    assert_eq!(source.cursor().drawn, [2 * 103 + 4]);
}

#[test]
fn pretraining_rows_depend_only_on_the_step_and_contain_every_token_of_their_texts() {
    let fixture = Fixture::new();
    let text = |i: usize| (0..=7 * i).map(|j| (100 * i + j).to_string()).collect::<Vec<_>>().join(" ");
    let texts: Vec<_> = (0..7).map(|i| json!({"text": text(i)})).collect();
    let pretrain = vec![fixture.jsonl("t.jsonl", &texts)];
    let config = DataConfig { pretrain, pretrain_tokens_max: 16, ..config(&fixture.jsonl("q.jsonl", &questions(9))) };
    let mut source = fixture.sft(&config, 5).unwrap();
    let ledger = source.ledger().clone();
    let steps: Vec<_> = (1..200).map(|step| source.pretrain(step, 3).unwrap()).collect();
    assert_eq!(*source.ledger(), ledger, "the job's own rows alone are accounted for");
    // A single step gives the same rows: no state is kept between steps.
    assert_eq!(fixture.sft(&config, 5).unwrap().pretrain(80, 3).unwrap(), steps[79]);
    let other = fixture.sft(&config, 6).unwrap().pretrain(1, 30).unwrap();
    assert_ne!(steps[..10].concat(), other, "another seed, another order");
    let rows: Vec<_> = steps.concat();
    assert!(rows.iter().all(|row| row.tokens.len() <= 16 && row.mask == vec![1; row.tokens.len()]));
    for (i, text) in texts.iter().enumerate() {
        let mut tokens = fixture.tokenizer.encode(text["text"].as_str().unwrap(), true).unwrap();
        tokens.push(fixture.tokenizer.eos_ids()[0]);
        let known: BTreeSet<&[u32]> = rows.iter().filter(|r| r.id == i as u64).map(|r| &r.tokens[..]).collect();
        assert_eq!(known.len(), tokens.len().div_ceil(16));
        let whole = known.iter().all(|piece| tokens.windows(piece.len()).any(|part| part == *piece));
        assert!(whole && known.contains(&tokens[tokens.len().saturating_sub(16)..]));
    }
    let bad = DataConfig { pretrain_key: "body".to_owned(), ..config };
    let error = fixture.sft(&bad, 5).unwrap_err();
    assert!(error.message.contains("data.pretrain: ") && error.message.contains("t.jsonl:1: "), "{error}");
    assert!(error.message.contains("no field \"body\""), "{error}");
}

#[test]
fn a_resumed_source_equals_an_uninterrupted_one() {
    let fixture = Fixture::new();
    let file = fixture.jsonl("q.jsonl", &questions(37));
    let more = fixture.jsonl("more.jsonl", &questions(11));
    let weighted = DataConfig { prompts: vec![file.clone(), more], weights: vec![1.0, 3.0], ..config(&file) };
    let grouped = DataConfig { order: Order::LengthGrouped, length_group_rows: 8, ..config(&file) };
    for config in [config(&file), weighted, grouped, ratio(&file)] {
        let mut whole = fixture.prompts(&config, 9).unwrap();
        let expected = whole.next(120).unwrap();
        for stop in [0, 1, 36, 37, 38, 100] {
            let mut first = fixture.prompts(&config, 9).unwrap();
            let mut handed = first.next(stop).unwrap();
            let cursor: Cursor = serde_json::from_str(&serde_json::to_string(first.cursor()).unwrap()).unwrap();
            let ledger: Ledger = serde_json::from_str(&serde_json::to_string(first.ledger()).unwrap()).unwrap();
            let mut second = fixture.prompts(&config, 9).unwrap();
            second.restore(&cursor, &ledger).unwrap();
            handed.extend(second.next(120 - stop).unwrap());
            assert_eq!(handed, expected);
            assert_eq!(second.ledger(), whole.ledger());
            assert_eq!(second.cursor(), whole.cursor());
        }
    }
}

#[test]
fn a_cursor_for_different_rows_is_rejected() {
    let fixture = Fixture::new();
    let mut source = fixture.prompts(&config(&fixture.jsonl("q.jsonl", &questions(20))), 0).unwrap();
    source.next(5).unwrap();
    let mut other = fixture.prompts(&config(&fixture.jsonl("r.jsonl", &questions(21))), 0).unwrap();
    let error = other.restore(source.cursor(), source.ledger()).unwrap_err();
    assert_eq!(error.kind, Kind::Data);
    assert!(error.message.contains("20") && error.message.contains("21"), "{error}");
}

#[test]
fn rows_stay_in_their_split_when_rows_are_added() {
    let fixture = Fixture::new();
    let rows = questions(400);
    let split = |n: usize, name: &str| {
        let source = fixture.prompts(&ratio(&fixture.jsonl(name, &rows[..n])), 0).unwrap();
        texts(&source.eval_rows(0).unwrap())
    };
    let (few, many) = (split(250, "few.jsonl"), split(400, "many.jsonl"));
    assert!(few.len() > 20 && many.len() > few.len());
    assert!(few.is_subset(&many));
    let known: BTreeSet<String> = rows[..250].iter().map(|row| row["prompt"].as_str().unwrap().to_owned()).collect();
    assert_eq!(many.intersection(&known).cloned().collect::<BTreeSet<_>>(), few);
}

#[test]
fn an_eval_row_never_trains_even_where_it_occurs_twice() {
    let fixture = Fixture::new();
    // Row 5 is an evaluation row, and its prompt occurs again in a training row.
    let mut rows = questions(60);
    rows.push(json!({"prompt": rows[5]["prompt"], "response": "x", "answer": 0, "split": "train", "hardness": 0}));
    let split = SplitConfig { by: SplitBy::Field, ..SplitConfig::default() };
    let by_field = DataConfig { eval_split: "eval".to_owned(), split, ..ratio(&fixture.jsonl("q.jsonl", &rows)) };
    let mut source = fixture.prompts(&by_field, 0).unwrap();
    let eval = texts(&source.eval_rows(0).unwrap());
    let train = texts(&source.next(48).unwrap());
    assert_eq!((eval.len(), train.len()), (12, 48));
    assert!(eval.is_disjoint(&train));
    assert_eq!(source.epoch_rows(), 48);
    assert_eq!((source.ledger().held_out, source.ledger().filtered["same_prompt_in_eval_split"]), (12, 1));
    source.ledger().check().unwrap();
    // The ledger has the row and the reason.
    let path = fixture.path("ledger.jsonl");
    source.write_filtered(&path, 0).unwrap();
    let line: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert!(line["source"].as_str().is_some_and(|source| source.ends_with("q.jsonl:61")), "{line}");
    assert_eq!(line["rule"], "same_prompt_in_eval_split");
}

#[test]
fn rows_of_named_sets_evaluate_by_their_names_and_their_prompts_never_train() {
    let fixture = Fixture::new();
    let rows = questions(40);
    let own = json!({"prompt": "what is one?", "right": "1"});
    let set = |name: &str, prompts: &str, split: &str, label: &str| EvalSetConfig {
        name: name.into(),
        prompts: vec![prompts.into()],
        split: split.into(),
        label_key: label.into(),
        ..EvalSetConfig::default()
    };
    let train = fixture.jsonl("train.jsonl", &rows);
    let split = SplitConfig { by: SplitBy::Field, ..SplitConfig::default() };
    let sets = vec![
        set("own", &fixture.jsonl("own.jsonl", &[own.clone(), own]), "", "right"),
        set("some", &fixture.jsonl("some.jsonl", &rows[..20]), "eval", ""),
    ];
    let config = DataConfig { eval_sets: sets, split, ..config(&train) };
    let mut source = fixture.prompts(&config, 0).unwrap();
    let found = source.eval_sets(0).unwrap();
    let of = |i: usize| (found[i].0.as_str(), found[i].1.len(), found[i].1[0].label.as_str());
    assert_eq!((of(0), of(1)), (("own", 2, "1"), ("some", 4, "0")));
    assert_eq!((source.eval_rows(0).unwrap().len(), source.eval_sets(1).unwrap()[0].1.len()), (0, 1));
    // Ids distinguish rows of sets from training rows, and a reward looks up fields by them.
    let ids: BTreeSet<u64> = found.iter().flat_map(|(_, rows)| rows).map(|row| row.id).collect();
    assert!(ids.len() == 6 && ids.iter().all(|id| *id >= 40), "{ids:?}");
    let lookup = source.lookup(&config);
    assert_eq!(lookup(found[0].1[1].id).unwrap().columns["right"], "1");
    assert_eq!(lookup(found[1].1[1].id).unwrap().columns["answer"], 10);
    let ledger = source.ledger();
    assert_eq!((ledger.rows, ledger.held_out, ledger.filtered["other_split"]), (62, 6, 16));
    assert_eq!((source.epoch_rows(), ledger.filtered["same_prompt_in_eval_split"]), (36, 4));
    assert!(texts(&found[1].1).is_disjoint(&texts(&source.next(36).unwrap())));
    // Without a training split, all rows are evaluation rows.
    let alone = fixture.prompts(&DataConfig { only_evaluates: true, ..config }, 0).unwrap();
    assert_eq!((alone.epoch_rows(), alone.eval_rows(0).unwrap().len(), alone.eval_sets(0).unwrap().len()), (0, 40, 2));
}

#[test]
fn an_empty_prompt_split_means_every_row_outside_evaluation_and_files_can_be_splits() {
    let fixture = Fixture::new();
    let all = DataConfig { prompt_split: String::new(), ..ratio(&fixture.jsonl("q.jsonl", &questions(100))) };
    let source = fixture.prompts(&all, 0).unwrap();
    assert_eq!(source.epoch_rows() + source.eval_rows(0).unwrap().len() as u64, 100);
    let (train, test) = (fixture.jsonl("a.jsonl", &questions(30)[10..]), fixture.jsonl("b.jsonl", &questions(10)));
    let split = SplitConfig { by: SplitBy::File, eval_files: vec![test], ..SplitConfig::default() };
    let source = fixture.prompts(&DataConfig { split, ..ratio(&train) }, 0).unwrap();
    assert_eq!((source.epoch_rows(), source.eval_rows(0).unwrap().len()), (20, 10));
    assert_eq!(source.eval_rows(0).unwrap()[0].id, 20);
}

#[test]
fn a_missing_split_is_rejected_with_the_existing_splits() {
    let fixture = Fixture::new();
    let file = fixture.jsonl("q.jsonl", &questions(50));
    let wrong = DataConfig { eval_split: "validation".to_owned(), ..ratio(&file) };
    let error = fixture.prompts(&wrong, 0).unwrap_err();
    assert_eq!(error.kind, Kind::Data);
    assert!(error.message.contains("\"validation\"") && error.message.contains("test, train"), "{error}");
    let unsplit = DataConfig { prompt_split: "train".to_owned(), ..config(&file) };
    let error = fixture.prompts(&unsplit, 0).unwrap_err();
    assert!(error.message.contains("splits: none"), "{error}");
    let same = DataConfig { eval_split: "train".to_owned(), ..ratio(&file) };
    assert_eq!(fixture.prompts(&same, 0).unwrap_err().kind, Kind::Usage);
}

#[test]
fn splits_of_a_shard_are_used_by_name() {
    let fixture = Fixture::new();
    let file = fixture.jsonl("q.jsonl", &questions(50));
    let more = ["--split-field", "split", "--label-key", "answer", "--keep-field", "hardness"];
    rlhf_hpc::cli::shard::run(&args(&fixture, &file, &more)).unwrap();
    let named = DataConfig {
        prompt_split: "train".to_owned(),
        eval_split: "eval".to_owned(),
        order: Order::Curriculum,
        curriculum_field: "hardness".to_owned(),
        ..config(fixture.path("out/rows").to_str().unwrap())
    };
    let mut source = fixture.prompts(&named, 0).unwrap();
    assert_eq!(source.eval_rows(0).unwrap().len(), 10);
    let handed = source.next(40).unwrap();
    let hardness: Vec<u64> = handed.iter().map(|p| (p.label.parse::<u64>().unwrap() / 2 * 37) % 101).collect();
    assert!(hardness.is_sorted(), "{hardness:?}");
    let no_field = DataConfig { curriculum_field: "age".to_owned(), ..named };
    assert!(fixture.prompts(&no_field, 0).unwrap_err().message.contains("field \"age\" must hold a number"));
}

/// Prompts of 3 to 40 tokens.
fn long_and_short(fixture: &Fixture) -> (String, Vec<Vec<u32>>) {
    let rows: Vec<Vec<u32>> =
        (0..30_u32).map(|i| (0..3 + (i * 11) % 38).map(|t| 5 + (i + t) % 250).collect()).collect();
    let lines: Vec<_> =
        rows.iter().map(|tokens| json!({"prompt": tokens, "answer": "x", "response": [7, 8, 9, 1]})).collect();
    (fixture.jsonl("long.jsonl", &lines), rows)
}

#[test]
fn long_prompts_are_rejected_or_cut_as_configured_and_counted() {
    let fixture = Fixture::new();
    let (file, rows) = long_and_short(&fixture);
    let long: Vec<&Vec<u32>> = rows.iter().filter(|row| row.len() > 16).collect();
    let over: usize = long.iter().map(|row| row.len() - 16).sum();
    for policy in [LongPrompts::Reject, LongPrompts::TruncateLeft, LongPrompts::TruncateRight] {
        let config = DataConfig { prompt_tokens_max: 16, long_prompts: policy, ..config(&file) };
        let mut source = fixture.prompts(&config, 0).unwrap();
        let handed = source.next(source.epoch_rows() as usize).unwrap();
        for prompt in &handed {
            let row = &rows[prompt.id as usize];
            let expected = match policy {
                _ if row.len() <= 16 => &row[..],
                LongPrompts::TruncateLeft => &row[row.len() - 16..],
                _ => &row[..16],
            };
            assert_eq!(prompt.tokens, expected);
        }
        let ledger = source.ledger();
        ledger.check().unwrap();
        assert_eq!((ledger.rows, ledger.deferred), (30, 0));
        let (kept, cut) = if policy == LongPrompts::Reject { (0, 0) } else { (long.len(), over) };
        assert_eq!((ledger.truncated.rows, ledger.truncated.tokens), (kept as u64, cut as u64));
        assert_eq!(ledger.trained as usize, 30 - long.len());
        let rejected = ledger.filtered.get("prompt_tokens_max").copied().unwrap_or(0);
        assert_eq!(rejected as usize, long.len() - kept);
    }
}

#[test]
fn windows_of_a_long_prompt_follow_each_other_and_are_counted() {
    let fixture = Fixture::new();
    let (file, rows) = long_and_short(&fixture);
    let config = DataConfig {
        prompt_tokens_max: 16,
        long_prompts: LongPrompts::Window,
        window_overlap_tokens: 4,
        ..config(&file)
    };
    let mut source = fixture.prompts(&config, 0).unwrap();
    let handed = source.next(source.epoch_rows() as usize).unwrap();
    assert_eq!(handed.iter().map(|p| p.id).collect::<HashSet<_>>().len(), handed.len());
    let mut seen: HashMap<u64, usize> = HashMap::new();
    for prompt in &handed {
        let (row, piece) = (&rows[(prompt.id & 0xffff_ffff) as usize], (prompt.id >> 48) as usize);
        let start = seen.entry(prompt.id & 0xffff_ffff).or_default();
        if row.len() <= 16 {
            assert_eq!((&prompt.tokens, piece), (row, 0));
        } else {
            let at = (piece * 12).min(row.len() - 16);
            assert_eq!(prompt.tokens, row[at..at + 16]);
        }
        assert_eq!(*start, piece);
        *start += 1;
    }
    let long = rows.iter().filter(|row| row.len() > 16).count() as u64;
    let ledger = source.ledger();
    ledger.check().unwrap();
    assert_eq!((ledger.trained, ledger.truncated.rows, ledger.windowed.rows), (30, 0, long));
    assert_eq!(ledger.windowed.pieces, handed.len() as u64 - (30 - long));
}

#[test]
fn the_ledger_adds_up_to_the_rows_at_every_moment() {
    let fixture = Fixture::new();
    let (file, _) = long_and_short(&fixture);
    let config = DataConfig { prompt_tokens_max: 30, long_prompts: LongPrompts::TruncateLeft, ..ratio(&file) };
    let mut source = fixture.prompts(&config, 0).unwrap();
    let rows = source.epoch_rows();
    assert_eq!(source.ledger().deferred, rows);
    for step in 0..10 {
        source.next(7).unwrap();
        let ledger = source.ledger();
        ledger.check().unwrap();
        assert_eq!(ledger.rows, 30);
        assert_eq!(ledger.deferred, rows.saturating_sub(7 * (step + 1)));
        assert_eq!(ledger.handed_out, 7 * (step + 1));
    }
    let path = fixture.path("ledger.json");
    source.ledger().write(&path).unwrap();
    let read: Ledger = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert_eq!(&read, source.ledger());
    let line = read.to_string();
    assert!(line.starts_with("30 rows: ") && !line.contains('\n'), "{line}");
    let wrong = Ledger { trained: read.trained + 1, ..read };
    assert_eq!(wrong.check().unwrap_err().kind, Kind::Fault);
}

#[test]
fn weighted_sources_are_sampled_by_their_weights() {
    let fixture = Fixture::new();
    let (a, b) = (fixture.jsonl("a.jsonl", &questions(50)), fixture.jsonl("b.jsonl", &questions(400)[50..]));
    let config = DataConfig { prompts: vec![a.clone(), b], weights: vec![3.0, 1.0], ..config(&a) };
    let mut source = fixture.prompts(&config, 1).unwrap();
    let handed = source.next(400).unwrap();
    let of_a = handed.iter().filter(|p| p.source == a).count();
    assert!((260..340).contains(&of_a), "{of_a} of 400");
    // Each source still runs in epochs: the counts of two rows of `a` differ by less than two.
    let mut times: HashMap<u64, usize> = HashMap::new();
    handed.iter().filter(|p| p.source == a).for_each(|p| *times.entry(p.id).or_default() += 1);
    assert!(times.len() == 50 && times.values().max().unwrap() - times.values().min().unwrap() <= 1);
    assert!(handed.iter().filter(|p| p.source != a).all(|p| p.id >= 50));
}

#[test]
fn length_groups_are_sorted_within_and_shuffled_between() {
    let fixture = Fixture::new();
    let config = DataConfig {
        order: Order::LengthGrouped,
        length_group_rows: 16,
        ..config(&fixture.jsonl("q.jsonl", &questions(64)))
    };
    let mut source = fixture.prompts(&config, 0).unwrap();
    let lengths: Vec<usize> = source.next(64).unwrap().iter().map(|p| p.tokens.len()).collect();
    assert!(lengths.chunks(16).all(<[usize]>::is_sorted), "{lengths:?}");
    assert!(!lengths.is_sorted());
}

#[test]
fn a_jsonl_file_is_sharded_once_and_again_when_it_changes() {
    let fixture = Fixture::new();
    let config = config(&fixture.jsonl("q.jsonl", &questions(20)));
    // A shard that is written again is another file, even with the same name.
    let shards = || -> BTreeSet<u64> {
        fixture.prepared(&config, RowKind::Prompt).unwrap();
        let files = std::fs::read_dir(fixture.cache()).unwrap().flatten();
        let indexes = files.filter(|file| file.path().extension().is_some_and(|end| end == "idx"));
        indexes.map(|file| file.ino()).collect()
    };
    let first = shards();
    assert!(!first.is_empty());
    assert_eq!(shards(), first);
    fixture.jsonl("q.jsonl", &questions(21));
    assert!(!shards().is_subset(&first));
}

#[test]
fn invalid_sources_are_rejected_before_work_starts() {
    let fixture = Fixture::new();
    let file = fixture.jsonl("q.jsonl", &questions(20));
    let message = |config: &DataConfig| fixture.prompts(config, 0).unwrap_err();
    assert!(message(&config("nowhere")).message.contains("nowhere must be a file of rows"));
    let tiny = DataConfig { prompt_tokens_max: 1, ..config(&file) };
    assert!(message(&tiny).message.contains("no rows are left to train on"));
    let overlap = DataConfig {
        long_prompts: LongPrompts::Window,
        window_overlap_tokens: 9,
        prompt_tokens_max: 9,
        ..config(&file)
    };
    assert!(message(&overlap).message.contains("window_overlap_tokens"));
    let weights = DataConfig { weights: vec![1.0, 2.0], ..config(&file) };
    assert!(message(&weights).message.contains("data.weights"));
}

#[test]
fn demonstrations_are_masked_to_their_responses() {
    let fixture = Fixture::new();
    let mut source = fixture.sft(&config(&fixture.jsonl("q.jsonl", &questions(12))), 0).unwrap();
    for row in source.next(12).unwrap() {
        assert_eq!(row.tokens.len(), row.mask.len());
        let start = row.mask.iter().position(|m| *m == 1).unwrap();
        assert!(row.mask[start..].iter().all(|m| *m == 1));
        assert_eq!(fixture.tokenizer.decode(&row.tokens[start..], true).unwrap(), format!("it is {}", 2 * row.id));
        assert_eq!(row.tokens.last(), fixture.tokenizer.eos_ids().first());
    }
    source.ledger().check().unwrap();
    let prompts = config(&fixture.jsonl("p.jsonl", &[json!({"prompt": "x", "answer": 1})]));
    assert!(fixture.sft(&prompts, 0).unwrap_err().message.contains("no field \"response\""));
}

#[test]
fn long_demonstrations_are_cut_at_the_end_or_filtered_and_counted() {
    let fixture = Fixture::new();
    let (file, rows) = long_and_short(&fixture);
    let cut = DataConfig {
        prompt_tokens_max: 16,
        row_tokens_max: 18,
        long_prompts: LongPrompts::TruncateLeft,
        ..config(&file)
    };
    let mut source = fixture.sft(&cut, 0).unwrap();
    let handed = source.next(30).unwrap();
    for row in &handed {
        let prompt = &rows[row.id as usize];
        let kept = prompt.len().min(16);
        assert_eq!(row.tokens[..kept], prompt[prompt.len() - kept..]);
        assert_eq!(row.tokens[kept..], [7, 8, 9, 1][..(18 - kept).min(4)]);
        assert_eq!(row.mask, [vec![0; kept], vec![1; (18 - kept).min(4)]].concat());
    }
    let lost: usize = rows
        .iter()
        .map(|r| r.len() + 4 - handed.iter().find(|h| rows[h.id as usize] == *r).unwrap().tokens.len())
        .sum();
    assert_eq!(source.ledger().truncated.tokens as usize, lost);
    let reject = DataConfig { long_prompts: LongPrompts::Reject, ..cut.clone() };
    let ledger = fixture.sft(&reject, 0).unwrap().ledger().clone();
    let count = |low: usize, high: usize| rows.iter().filter(|r| (low..=high).contains(&r.len())).count() as u64;
    assert_eq!(ledger.filtered["prompt_tokens_max"], count(17, 99));
    assert_eq!(ledger.filtered["row_tokens_max"], count(15, 16));
    let window = DataConfig { long_prompts: LongPrompts::Window, window_overlap_tokens: 2, ..cut };
    assert_eq!(fixture.sft(&window, 0).unwrap_err().kind, Kind::Usage);
}
