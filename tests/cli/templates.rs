//! Text prompts of the offline verbs, and the chat template of the model.

use super::fixture::Fixture;
use super::offline::{answers, floats};
use serde_json::{Value, json};

const NOT_TAKEN: &str = "warning: text prompts do not go through the model's chat template; pass --chat-template";
const TAKEN: &str = "note: text prompts go through the chat template, as in the job that exported the model";

/// A model with a template, which has a variable of its own, and rows with a prompt and a response.
fn fixture() -> Fixture {
    let fixture = Fixture::new();
    let template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|user|>{% endfor %}\
                    {% if add_generation_prompt %}<assistant>{{ mood }}{% endif %}";
    fixture.write("model/chat_template.jinja", template);
    fixture.jsonl("learned.jsonl", &[json!({"prompt": "1+1=", "response": "2"})]);
    fixture
}

/// The prompt tokens of `generate`.
fn begun(fixture: &Fixture, model: &str, row: &Value, options: &[&str]) -> Value {
    let all = [options, &["--max-new-tokens", "1"]].concat();
    answers(fixture, "generate", model, std::slice::from_ref(row), &all)[0]["prompt_tokens"].clone()
}

#[test]
fn text_prompts_use_the_template_on_request_or_like_the_job_that_exported_the_model() {
    let fixture = fixture();
    let (text, messages) = (json!({"prompt": "1+1="}), json!({"messages": [{"role": "user", "content": "1+1="}]}));
    let glad = ["--chat-template-args", "{\"mood\": \"glad\"}"];
    let (chat, plain) = (["--chat-template"], ["--no-chat-template"]);
    let of_chat = begun(&fixture, "model", &messages, &[]);
    let of_glad = begun(&fixture, "model", &messages, &glad);
    let of_text = begun(&fixture, "model", &text, &plain);
    assert!(of_chat != of_glad && of_chat != of_text);
    let prompts: &[&Value] = &[&text, &json!({"prompt": messages["messages"]})];
    for row in prompts {
        assert_eq!(begun(&fixture, "model", row, &chat), of_chat);
        assert_eq!(begun(&fixture, "model", row, &[&chat[..], &glad].concat()), of_glad);
    }
    assert_eq!(begun(&fixture, "model", &text, &[]), of_text);
    let ask = |model: &str, options: &[&str]| {
        let line = ["generate", "--model", model, "--prompt", "1+1=", "--max-new-tokens", "2", "--temperature", "0"];
        fixture.run(&[&line[..], options].concat()).well()
    };
    ask("model", &[]).assert(0, &[NOT_TAKEN]);
    for options in [&plain[..], &chat] {
        let quiet = ask("model", options).stderr;
        assert!(!quiet.contains("text prompts"), "{quiet}");
    }
    let both = ["generate", "--model", "model", "--prompt", "a", "--chat-template", "--no-chat-template"];
    fixture.run(&both).refused(2, &["--chat-template excludes --no-chat-template"]);

    let job =
        ["job.kind=sft", "data.prompts=[\"learned.jsonl\"]", "job.steps=1", "job.dir=chat", "data.eval_split=\"\""];
    let keys = ["data.label_key=\"\"", "data.prompt_split=\"\"", "eval.every_steps=0", "sft.minibatch_samples=1"];
    let template = ["data.chat_template=true", "data.chat_template_args={mood=\"glad\"}"];
    fixture.job(&[&job[..], &keys, &template].concat()).well();
    fixture.run(&["export", "chat", "--out", "again"]).well();
    for model in ["chat/export", "again"] {
        assert_eq!(begun(&fixture, model, &text, &[]), of_glad);
        assert_eq!(begun(&fixture, model, &text, &plain), of_text);
        ask(model, &[]).assert(0, &[TAKEN]);
    }
    // A job without the template does not mention it.
    let next = ["job.dir=plain", "model.actor=chat/export"];
    let ended = fixture.job(&[&job[..], &keys, &next].concat()).well();
    assert!(!ended.stderr.contains("unknown key"), "{}", ended.stderr);
    assert_eq!(begun(&fixture, "plain/export", &text, &[]), of_text);
    ask("plain/export", &[]).assert(0, &[NOT_TAKEN]);
}

#[test]
fn log_probabilities_and_rewards_of_texts_use_the_tokens_that_a_job_learns() {
    let fixture = fixture();
    let shard = ["shard", "learned.jsonl", "--tokenizer", "model", "--chat-template", "--demonstrations", "--out", "s"];
    let shown = fixture.run(&[&shard[..], &["--show", "1"]].concat()).well();
    assert!(shown.stdout.contains("⟦2<|user|>⟧"), "{}", shown.stdout);
    let row = json!({"prompt": "1+1=", "response": "2"});
    let of = |row: &Value, options: &[&str]| {
        let answer = answers(&fixture, "logprobs", "model", std::slice::from_ref(row), options).swap_remove(0);
        (answer["tokens"].clone(), floats(&answer["logprobs"]))
    };
    let prompt_tokens = begun(&fixture, "model", &json!({"prompt": "1+1="}), &["--chat-template"]);
    let (tokens, logprobs) = of(&row, &["--chat-template"]);
    assert_eq!(of(&json!({"prompt_tokens": prompt_tokens, "tokens": tokens}), &[]), (tokens.clone(), logprobs));
    assert_ne!(of(&row, &["--no-chat-template"]).0, tokens);
    let line = ["logprobs", "--model", "model", "--input", "learned.jsonl"];
    fixture.run(&line).well().assert(0, &[NOT_TAKEN]);

    let job = ["job.dir=critic-run", "job.steps=1"];
    fixture.job(&job).well();
    fixture.run(&["export", "critic-run", "--out", "critic", "--role", "critic"]).well();
    let reward = |row: &Value, options: &[&str]| {
        answers(&fixture, "reward", "critic", std::slice::from_ref(row), options)[0]["reward"].clone()
    };
    let by_tokens = reward(&json!({"prompt_tokens": prompt_tokens, "tokens": tokens}), &[]);
    assert_eq!(reward(&row, &["--chat-template"]), by_tokens);
    assert_ne!(reward(&row, &["--no-chat-template"]), by_tokens);
}
