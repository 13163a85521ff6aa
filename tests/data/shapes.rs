//! Rows in the shapes of public data sets, and their tokens.

use rlhf_hpc::config::data::DataConfig;
use rlhf_hpc::data::RowKind::{self, Demonstration, Labelled, Pair, Prompt};
use rlhf_hpc::error::Error;
use serde_json::{Value, json};

use crate::data::fixture::{Fixture, config};
use crate::data::rows::{chat, says, shard};

fn texts(fixture: &Fixture, row: &Value, kind: RowKind, config: &DataConfig) -> Result<Vec<String>, Error> {
    let config = DataConfig { label_key: if kind == Labelled { "label" } else { "" }.to_owned(), ..config.clone() };
    let shard = shard(fixture, &fixture.jsonl("s.jsonl", std::slice::from_ref(row)), kind, &config)?;
    Ok(shard.document(0)?.iter().map(|s| fixture.tokenizer.decode(s, false).unwrap()).collect())
}

const ASKED: &str = "<|begin|><|user|>hi<|assistant|>";

#[test]
fn the_shapes_of_public_data_sets_give_the_same_tokens() {
    let fixture = Fixture::new();
    let (user, answer, other) = (says("user", "hi"), says("assistant", "ho"), says("assistant", "no"));
    let whole = json!([user, answer]);
    let foreign = json!([{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]);
    let demonstrations = [
        json!({"messages": whole}),
        json!({"messages": foreign}),
        json!({"messages": [says("human", "hi"), says("gpt", "ho")]}),
        json!({"messages": whole.to_string()}),
        json!({"messages": whole, "prompt": null, "response": null}),
        json!({"prompt": "hi", "response": "ho", "messages": null}),
        json!({"prompt": [user], "response": [answer]}),
        json!({"prompt": "hi", "response": whole}),
        json!({"messages": whole, "response": "ho"}),
    ];
    for row in &demonstrations {
        assert_eq!(texts(&fixture, row, Demonstration, &chat()).unwrap(), [ASKED, "ho<|end|>"], "{row}");
    }
    let pairs = [
        json!({"prompt": "hi", "chosen": whole, "rejected": [user, other], "messages": whole}),
        json!({"chosen": whole, "rejected": [user, other], "messages": whole}),
        json!({"messages": whole, "chosen": "ho", "rejected": "no"}),
        json!({"messages": [user], "chosen": {"from": "gpt", "value": "ho"}, "rejected": {"from": "gpt", "value": "no"}}),
        json!({"chosen": "\n\nHuman: hi\n\nAssistant: ho", "rejected": "\n\nHuman: hi\n\nAssistant: no"}),
    ];
    for row in &pairs {
        assert_eq!(texts(&fixture, row, Pair, &chat()).unwrap(), [ASKED, "ho<|end|>", "no<|end|>"], "{row}");
    }
    let labelled = json!({"messages": foreign, "label": true});
    assert_eq!(texts(&fixture, &labelled, Labelled, &chat()).unwrap(), [ASKED, "ho<|end|>"]);
    let error = texts(&fixture, &json!({"prompt": [user], "completion": [answer], "label": true}), Labelled, &chat());
    assert!(error.unwrap_err().hint.is_some_and(|hint| hint.contains("data.response_key = \"completion\"")));
    let parts = json!([{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "a.png"}}]);
    let row = json!({"messages": [{"role": "user", "content": parts}, answer]});
    let error = texts(&fixture, &row, Demonstration, &chat()).unwrap_err();
    assert!(error.message.contains("the model reads text only"), "{error}");
    let steps = DataConfig { label_key: "labels".to_owned(), ..config("") };
    let rows = fixture.jsonl("steps.jsonl", &[json!({"prompt": "a", "labels": [true, false, 0.5, "+"]})]);
    assert_eq!(shard(&fixture, &rows, RowKind::Steps, &steps).unwrap().meta(0).unwrap().label, "[1,0,0.5,\"+\"]");
    let nested = DataConfig { prompt_key: "question.text".to_owned(), ..chat() };
    assert_eq!(texts(&fixture, &json!({"question": {"text": "hi"}}), Prompt, &nested).unwrap(), [ASKED]);
    let system = json!([says("system", "s"), user, answer]);
    let row = json!({"prompt": "hi", "chosen": system, "rejected": [says("system", "s"), user, other]});
    assert_eq!(texts(&fixture, &row, Pair, &chat()).unwrap()[0], "<|begin|><|system|>s<|user|>hi<|assistant|>");
    let alpaca = DataConfig { prompt_key: "instruction".to_owned(), response_key: "output".to_owned(), ..config("") };
    let row = json!({"instruction": "add", "input": "1 2", "output": "3"});
    assert_eq!(texts(&fixture, &row, Demonstration, &alpaca).unwrap(), ["<|begin|>add\n1 2", "3<|end|>"]);
}

#[test]
fn a_separate_response_is_learned_and_earlier_answers_are_not() {
    let fixture = Fixture::new();
    let earlier = [says("user", "1?"), says("assistant", "one"), says("user", "2?")];
    for row in [
        json!({"messages": earlier, "response": "two"}),
        json!({"prompt": earlier, "response": [says("assistant", "two")]}),
    ] {
        let found = texts(&fixture, &row, Demonstration, &chat()).unwrap();
        assert_eq!(found, ["<|begin|><|user|>1?<|assistant|>one<|end|><|user|>2?<|assistant|>", "two<|end|>"]);
    }
    let row = json!({"messages": [says("user", "1?"), says("assistant", "one")], "response": "two"});
    let error = texts(&fixture, &row, Demonstration, &chat()).unwrap_err();
    assert!(error.message.contains("\"messages\" and \"response\" end with different answers"), "{error}");
}

#[test]
fn a_row_of_a_known_shape_names_the_keys_to_set() {
    let fixture = Fixture::new();
    let turns = json!([says("user", "hi"), says("assistant", "ho")]);
    let conversations = json!({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]});
    for (row, kind, config, words) in [
        (
            conversations,
            Demonstration,
            config(""),
            "data.messages_key = \"conversations\" and data.chat_template = true",
        ),
        (
            json!({"instruction": "hi", "output": "ho"}),
            Demonstration,
            config(""),
            "data.prompt_key = \"instruction\" and data.response_key = \"output\"",
        ),
        (json!({"prompt": "hi", "completion": "ho"}), Demonstration, chat(), "data.response_key = \"completion\""),
        (json!({"question": "hi"}), Prompt, config(""), "data.prompt_key = \"question\""),
        (json!({"messages": turns}), Demonstration, config(""), "data.chat_template = true"),
        (json!({"messages": turns, "chosen": "ab", "rejected": "ac"}), Pair, config(""), "data.chat_template = true"),
        (json!({"chosen": "ab", "rejected": "ac"}), Demonstration, config(""), "dpo"),
        (json!({"text": "ab"}), Demonstration, config(""), "data.pretrain"),
    ] {
        let error = texts(&fixture, &row, kind, &config).unwrap_err();
        assert!(error.hint.as_ref().is_some_and(|hint| hint.contains(words)), "{row}: {error}");
    }
    for (message, words) in [
        (
            json!({"speaker": "me", "text": "hi"}),
            "must have role and content, or from and value (it has: speaker, text)",
        ),
        (json!({"from": "function_call", "value": "f()"}), "must be from human, gpt, system or observation"),
    ] {
        let error = texts(&fixture, &json!({"messages": [message]}), Prompt, &chat()).unwrap_err();
        assert!(error.message.contains(words), "{error}");
    }
}

#[test]
fn generation_prompt_text_that_a_finished_answer_lacks_is_not_part_of_the_prompt() {
    let fixture = Fixture::new();
    let template = "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% else %}<|assistant|>\
                    {{ m.content.split('</t>')[-1] }}<|end|>{% endif %}{% endfor %}\
                    {% if add_generation_prompt %}<|assistant|><t>{% endif %}";
    std::fs::write(fixture.path("tokenizer/chat_template.jinja"), template).unwrap();
    let opens = rlhf_hpc::text::Tokenizer::load(&fixture.path("tokenizer")).unwrap();
    let fixture = Fixture { tokenizer: opens.into(), ..fixture };
    let user = says("user", "hi");
    let (prompt, answers) = ("<|user|>hi<|assistant|>", ["ho<|end|>", "no<|end|>"]);
    for thought in ["", "<t>hm</t>"] {
        let row = json!({"messages": [user, says("assistant", &format!("{thought}ho"))]});
        assert_eq!(texts(&fixture, &row, Demonstration, &chat()).unwrap(), [prompt, answers[0]]);
    }
    let row = json!({"prompt": "hi", "chosen": "ho", "rejected": "no"});
    assert_eq!(texts(&fixture, &row, Pair, &chat()).unwrap(), [prompt, answers[0], answers[1]]);
}
