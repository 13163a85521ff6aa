//! `data.template` and `data.rows_max`.

use rlhf_hpc::config::data::{DataConfig, Order};
use rlhf_hpc::data::PairRow;
use serde_json::json;

use crate::data::fixture::{Fixture, config, questions};

#[test]
fn a_template_is_written_around_prompts_of_all_kinds_of_rows() {
    let fixture = Fixture::new();
    let row = json!({"prompt": "what is 1 plus 2?", "response": "3", "answer": 3, "chosen": "3", "rejected": "4"});
    let path = fixture.jsonl("rows.jsonl", &[row]);
    let templated = DataConfig { template: "please {} sum".to_owned(), ..config(&path) };
    let expected = fixture.tokenizer.encode("please what is 1 plus 2? sum", true).unwrap();
    let prompt = fixture.prompts(&templated, 1).unwrap().next(1).unwrap().remove(0);
    assert_eq!(prompt.tokens, expected);
    let demonstration = fixture.sft(&templated, 1).unwrap().next(1).unwrap().remove(0);
    assert_eq!(demonstration.tokens[..expected.len()], expected);
    let pair = fixture.rows::<PairRow>(&templated, 1).unwrap().next(1).unwrap().remove(0);
    assert_eq!(pair.chosen[..pair.prompt_tokens], expected);
    for (template, chat_template) in [("no place", false), ("{} and {}", false), ("{}", true)] {
        let refused = DataConfig { template: template.to_owned(), chat_template, ..config(&path) };
        assert!(refused.check().unwrap_err().message.contains("data.template"), "{template}");
    }
    let ids = fixture.jsonl("ids.jsonl", &[json!({"prompt": [5, 6], "answer": 1})]);
    let error = fixture.prompts(&DataConfig { template: "a {}".to_owned(), ..config(&ids) }, 1).unwrap_err();
    assert!(error.message.contains("data.template needs a text"), "{error}");
}

#[test]
fn only_the_first_rows_up_to_rows_max_train_and_the_ledger_counts_the_others() {
    let fixture = Fixture::new();
    let [one, two] = ["a.jsonl", "b.jsonl"].map(|name| fixture.jsonl(name, &questions(10)));
    let all = DataConfig { prompts: vec![one, two.clone()], order: Order::Sequential, ..config(&two) };
    let limited = DataConfig { rows_max: 12, ..all.clone() };
    let mut source = fixture.prompts(&limited, 1).unwrap();
    assert_eq!(source.epoch_rows(), 12);
    let first: Vec<_> = source.next(12).unwrap().into_iter().map(|prompt| prompt.tokens).collect();
    let whole: Vec<_> = fixture.prompts(&all, 1).unwrap().next(12).unwrap().into_iter().map(|p| p.tokens).collect();
    assert_eq!(first, whole);
    assert_eq!(source.ledger().filtered["rows_max"], 8);
}
