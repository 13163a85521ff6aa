use rlhf_hpc::config::data::{DataConfig, LongPrompts};
use rlhf_hpc::data::{PairRow, RowKind};
use rlhf_hpc::error::Kind;
use serde_json::{Value, json};

use crate::data::fixture::{Fixture, config, questions};
use crate::data::rows::{chat, says, shard};

/// Prompt, chosen and rejected of a row.
fn pair(fixture: &Fixture, row: &Value, config: &DataConfig) -> Vec<Vec<u32>> {
    let shard = shard(fixture, &fixture.jsonl("p.jsonl", std::slice::from_ref(row)), RowKind::Pair, config).unwrap();
    shard.document(0).unwrap()
}

#[test]
fn texts_become_prompt_chosen_and_rejected_that_end_with_the_end_token() {
    let fixture = Fixture::new();
    let encode = |text: &str, begin: bool| fixture.tokenizer.encode(text, begin).unwrap();
    let eos = fixture.tokenizer.eos_ids()[0];
    let ended = |text: &str| [encode(text, false), vec![eos]].concat();
    let row = json!({"prompt": "1+1=", "chosen": "it is 2", "rejected": "3"});
    let want = [encode("1+1=", true), ended("it is 2"), ended("3")];
    assert_eq!(pair(&fixture, &row, &config("")), want);
    let named = json!({"question": "1+1=", "right": "it is 2", "wrong": "3"});
    let keys = DataConfig {
        prompt_key: "question".to_owned(),
        chosen_key: "right".to_owned(),
        rejected_key: "wrong".to_owned(),
        ..config("")
    };
    assert_eq!(pair(&fixture, &named, &keys), want);
    let ids = json!({"prompt": [5, 6], "chosen": [7], "rejected": [8, 9]});
    assert_eq!(pair(&fixture, &ids, &config("")), [vec![5, 6], vec![7], vec![8, 9]], "ids are taken as they are");
}

#[test]
fn with_a_chat_template_texts_and_messages_give_the_same_tokens() {
    let fixture = Fixture::new();
    let user = says("user", "hi");
    let [ho, no] = ["ho", "no"].map(|text| json!([says("assistant", text)]));
    let [whole_ho, whole_no] = ["ho", "no"].map(|text| json!([user, says("assistant", text)]));
    for row in [
        json!({"prompt": "hi", "chosen": "ho", "rejected": "no"}),
        json!({"prompt": [user], "chosen": "ho", "rejected": "no"}),
        json!({"prompt": "hi", "chosen": ho, "rejected": no}),
        json!({"prompt": [user], "chosen": ho, "rejected": "no"}),
        json!({"messages": [user], "chosen": "ho", "rejected": no}),
        json!({"chosen": whole_ho, "rejected": whole_no}),
        json!({"prompt": "hi", "chosen": whole_ho, "rejected": whole_no}),
        json!({"prompt": [user], "chosen": whole_ho, "rejected": no}),
    ] {
        let document = pair(&fixture, &row, &chat());
        let texts: Vec<_> = document.iter().map(|s| fixture.tokenizer.decode(s, false).unwrap()).collect();
        assert_eq!(texts, ["<|begin|><|user|>hi<|assistant|>", "ho<|end|>", "no<|end|>"], "{row}");
    }
}

#[test]
fn the_common_prefix_of_whole_conversations_or_texts_is_their_prompt() {
    let fixture = Fixture::new();
    let before = [says("user", "1?"), says("assistant", "one"), says("user", "2?")];
    let whole = |last: &str| Value::from([&before[..], &[says("assistant", last)]].concat());
    // The answers have a common prefix, but the pair differs from the last message on.
    let row = json!({"chosen": whole("two, yes"), "rejected": whole("two, no")});
    let document = pair(&fixture, &row, &chat());
    let text = |i: usize| fixture.tokenizer.decode(&document[i], false).unwrap();
    assert_eq!(text(0), "<|begin|><|user|>1?<|assistant|>one<|end|><|user|>2?<|assistant|>");
    assert_eq!([text(1), text(2)], ["two, yes<|end|>", "two, no<|end|>"]);
    for config in [config(""), chat()] {
        let row = json!({"chosen": "Q: 1+1? A: 2", "rejected": "Q: 1+1? A: 3 or 4"});
        let document = pair(&fixture, &row, &config);
        let eos = fixture.tokenizer.eos_ids()[0];
        for (side, key) in [(1, "chosen"), (2, "rejected")] {
            let text = row[key].as_str().unwrap();
            let whole = [fixture.tokenizer.encode(text, true).unwrap(), vec![eos]].concat();
            assert_eq!([&document[0][..], &document[side]].concat(), whole);
        }
        assert_ne!(document[1][0], document[2][0], "the whole common prefix is the prompt");
    }
    // If one side is a prefix of the other, it keeps one token.
    let row = json!({"chosen": [5, 6], "rejected": [5, 6, 7]});
    assert_eq!(pair(&fixture, &row, &config("")), [vec![5], vec![6], vec![6, 7]]);
}

#[test]
fn a_shard_without_pairs_is_rejected_where_pairs_are_needed() {
    let fixture = Fixture::new();
    for (kind, sequences) in [(RowKind::Prompt, 1), (RowKind::Demonstration, 2)] {
        shard(&fixture, &fixture.jsonl("q.jsonl", &questions(3)), kind, &config("")).unwrap();
        let prefix = fixture.path("shards/rows");
        let error = fixture.rows::<PairRow>(&config(prefix.to_str().unwrap()), 0).unwrap_err();
        assert!(
            error
                .message
                .contains(&format!("document 0 must have prompt, chosen and rejected (sequences: {sequences})")),
            "{error}"
        );
        assert!(error.hint.is_some_and(|hint| hint.contains("--pairs")));
    }
}

/// Tokens of chosen and rejected, and the tokens that are kept if a row has 4 after its prompt.
const CUTS: [([usize; 2], [usize; 2]); 7] = [
    ([2, 9], [2, 4]),
    ([9, 2], [4, 2]),
    ([9, 8], [4, 4]),
    ([8, 9], [4, 4]),
    ([4, 4], [4, 4]),
    ([4, 3], [4, 3]),
    ([1, 5], [1, 4]),
];

#[test]
fn a_long_pair_is_truncated_on_its_longer_side_or_filtered() {
    let fixture = Fixture::new();
    let side = |first: u32, n: usize| (first..).take(n).collect::<Vec<u32>>();
    let row = |([chosen, rejected], _): &([usize; 2], [usize; 2])| json!({"prompt": [5, 6, 7], "chosen": side(10, *chosen), "rejected": side(40, *rejected), "margin": 0.5});
    let file = fixture.jsonl("long.jsonl", &CUTS.iter().map(row).collect::<Vec<_>>());
    for long_prompts in [LongPrompts::TruncateLeft, LongPrompts::TruncateRight] {
        let cut = DataConfig { row_tokens_max: 7, long_prompts, margin_key: "margin".to_owned(), ..config(&file) };
        let mut source = fixture.rows::<PairRow>(&cut, 0).unwrap();
        for row in source.next(CUTS.len()).unwrap() {
            let (_, [chosen, rejected]) = CUTS[row.id as usize];
            let of = |first, n| [side(5, 3), side(first, n)].concat();
            assert_eq!(
                (&row.chosen, &row.rejected),
                (&of(10, chosen), &of(40, rejected)),
                "{:?}",
                CUTS[row.id as usize]
            );
            assert_eq!((row.prompt_tokens, row.margin), (3, 0.5));
        }
        let lost: usize = CUTS.iter().map(|(all, kept)| all[0] + all[1] - kept[0] - kept[1]).sum();
        assert_eq!(source.ledger().truncated.tokens as usize, lost);
    }
    let reject = DataConfig { row_tokens_max: 7, long_prompts: LongPrompts::Reject, ..config(&file) };
    let mut source = fixture.rows::<PairRow>(&reject, 0).unwrap();
    let long = CUTS.iter().filter(|(all, kept)| all != kept).count();
    assert_eq!(source.ledger().filtered["row_tokens_max"], long as u64);
    assert!(source.next(2).unwrap().iter().all(|row| row.margin == 0.0), "no field was named");
    let window = DataConfig { long_prompts: LongPrompts::Window, ..config(&file) };
    assert_eq!(fixture.rows::<PairRow>(&window, 0).unwrap_err().kind, Kind::Usage);
}

#[test]
fn a_pair_whose_truncated_responses_are_equal_is_filtered() {
    let fixture = Fixture::new();
    let row = |chosen: &[u32], rejected: &[u32]| json!({"prompt": [5, 6, 7], "chosen": chosen, "rejected": rejected});
    let rows = [row(&[1, 2, 3, 4], &[1, 2, 8, 9]), row(&[1, 2, 3], &[1, 2]), row(&[1, 2, 3, 4], &[1, 9])];
    let cut = DataConfig {
        row_tokens_max: 5,
        long_prompts: LongPrompts::TruncateRight,
        ..config(&fixture.jsonl("p.jsonl", &rows))
    };
    let mut source = fixture.rows::<PairRow>(&cut, 0).unwrap();
    assert_eq!(source.ledger().filtered, [("pair_equal_when_cut".to_owned(), 2)].into());
    let kept = source.next(1).unwrap().remove(0);
    assert_eq!((kept.chosen, kept.rejected), (vec![5, 6, 7, 1, 2], vec![5, 6, 7, 1, 9]));
    let (lost, remedies) = source.ledger().losses();
    assert!(lost == 2 && remedies[0].contains("data.row_tokens_max"), "{remedies:?}");
}
