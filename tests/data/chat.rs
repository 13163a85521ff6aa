use std::fs;
use std::path::Path;

use rlhf_hpc::error::Kind;
use rlhf_hpc::text::{ChatTemplate, Tokenizer};
use serde_json::{Map, Value, json};

fn golden() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/chat.json");
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// A model directory with one of the golden templates.
fn directory(golden: &Value, name: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let template = &golden["templates"][name];
    fs::write(dir.path().join("tokenizer.json"), golden["tokenizer"].to_string()).unwrap();
    let config = json!({
        "bos_token": template["bos"], "eos_token": template["eos"], "chat_template": template["text"],
    });
    fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    dir
}

#[test]
fn chats_are_rendered_and_tokenized_as_transformers_does() {
    let golden = golden();
    let now = golden["now"].as_i64().unwrap();
    let mut compared = 0;
    for case in golden["cases"].as_array().unwrap() {
        let name = case["template"].as_str().unwrap();
        let dir = directory(&golden, name);
        let tokenizer = Tokenizer::load(dir.path()).unwrap();
        let template = tokenizer.chat().unwrap().clone().at(now);
        let chat = &golden["chats"][case["chat"].as_str().unwrap()];
        let open = case["add_generation_prompt"].as_bool().unwrap();
        let more: Map<String, Value> =
            serde_json::from_value(case.get("more").cloned().unwrap_or_else(|| json!({}))).unwrap();
        let what = format!("template {name}, chat {}, open {open}", case["chat"]);
        match (case["text"].as_str(), template.apply(chat, &more, open)) {
            (Some(text), Ok(ours)) => {
                assert_eq!(ours, text, "{what}");
                let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
                assert_eq!(tokenizer.encode(&ours, false).unwrap(), ids, "{what}");
                compared += 1;
            }
            (None, Err(error)) => {
                assert_eq!(error.kind, Kind::Data);
                assert!(error.message.contains(case["error"].as_str().unwrap()), "{what}: {error}");
            }
            (text, ours) => panic!("{what}: transformers {text:?}, ours {ours:?}"),
        }
    }
    assert!(compared >= 30, "{compared}");
}

#[test]
fn the_ids_of_a_conversation_are_the_concatenated_ids_of_its_turns() {
    let (golden, none) = (golden(), Map::new());
    let (question, more) =
        (json!({"role": "user", "content": "What is 12 + 34?"}), json!({"role": "user", "content": "And 5?"}));
    for name in ["headers", "im", "inst", "calls"] {
        let dir = directory(&golden, name);
        let tokenizer = Tokenizer::load(dir.path()).unwrap();
        let template = tokenizer.chat().unwrap();
        let apply = |messages: Value| template.apply(&messages, &none, true).unwrap();
        let answer = json!({"role": "assistant", "content": "It is 46."});
        let (prompt, whole) = (apply(json!([question])), apply(json!([question, answer, more])));
        // The model's response: the answer as the template prints it, and the end token.
        let end = golden["templates"][name]["eos"].as_str().unwrap();
        let rendered =
            whole.strip_prefix(&prompt).and_then(|rest| rest.split(end).next()).unwrap_or_else(|| panic!("{name}"));
        assert!(rendered.contains("It is 46."), "{name}: {rendered:?}");
        let prompt = tokenizer.encode(&prompt, false).unwrap();
        let ended = tokenizer.encode(&format!("{rendered}{end}"), false).unwrap();
        let messages = vec![more.clone()];
        let turn = tokenizer.encode_chat_turn(&ended, messages.clone(), &none).unwrap();
        assert_eq!([prompt, ended, turn].concat(), tokenizer.encode(&whole, false).unwrap(), "{name}");
        // An answer that a stop text cut gets the end of its turn from the template.
        let cut = tokenizer.encode(rendered, false).unwrap();
        let turn = tokenizer.encode_chat_turn(&cut, messages, &none).unwrap();
        assert_eq!(tokenizer.decode(&turn[..1], false).unwrap(), end, "{name}");
    }
}

#[test]
fn a_missing_template_and_a_broken_template_are_reported() {
    let dir = directory(&golden(), "inst");
    fs::write(dir.path().join("chat_template.jinja"), "{% if %}").unwrap();
    let error = Tokenizer::load(dir.path()).unwrap_err();
    assert!(error.message.contains("chat template"), "{error}");
    fs::remove_file(dir.path().join("chat_template.jinja")).unwrap();
    fs::write(dir.path().join("tokenizer_config.json"), "{}").unwrap();
    let error = Tokenizer::load(dir.path()).unwrap().chat().unwrap_err();
    assert!(error.message.contains("no chat template"), "{error}");
}

#[test]
fn the_template_file_and_the_default_of_a_list_are_found() {
    let dir = directory(&golden(), "inst");
    let named = json!({"chat_template": [
        {"name": "tool_use", "template": "tools"}, {"name": "default", "template": "listed"},
    ]});
    fs::write(dir.path().join("tokenizer_config.json"), named.to_string()).unwrap();
    let text = || Tokenizer::load(dir.path()).unwrap().chat().unwrap().apply(&json!([]), &Map::new(), false).unwrap();
    assert_eq!(text(), "listed");
    fs::write(dir.path().join("chat_template.jinja"), "from a file").unwrap();
    assert_eq!(text(), "from a file");
}

#[test]
fn a_chat_that_would_begin_with_two_begin_tokens_is_rejected() {
    let dir = directory(&golden(), "inst");
    let twice = "{{ bos_token }}{{ bos_token }}{{ messages[0].content }}";
    fs::write(dir.path().join("chat_template.jinja"), twice).unwrap();
    let tokenizer = Tokenizer::load(dir.path()).unwrap();
    let error = tokenizer.encode_chat(&json!([{"role": "user", "content": "x"}]), &Map::new(), true).unwrap_err();
    assert!(error.message.contains("two BOS"), "{error}");
}

#[test]
fn a_template_with_unbounded_memory_stack_or_time_is_an_error() {
    crate::alone("data::chat::a_template_with_unbounded_memory_stack_or_time_is_an_error", endless_templates_fail);
}

/// Runs in its own process: a thread that has used up its stack stays and keeps its locks, and a fork would wait for
/// them.
fn endless_templates_fail() {
    let terms = |n: usize| format!("{{{{ 1{} }}}}", "+1".repeat(n));
    let nested = |n: usize| format!("{{{{ {}{} }}}}", "[".repeat(n), "]".repeat(n));
    let text = "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}";
    let doubled = text.replace("ns.s + ns.s", "ns.s ~ ns.s");
    let lists =
        "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = (ns.s + ns.s)|list %}{% endfor %}";
    let deep = "{% set ns = namespace(s=[]) %}{% for i in range(9999) %}{% for j in range(99) %}\
                {% set ns.s = [ns.s] %}{% endfor %}{% endfor %}";
    let searched = "{% set s = 'a' * 60000000 %}{% for i in range(9999) %}{% if 'ab' in s %}{% endif %}{% endfor %}";
    let (memory, stack) = ("needs more than 128.0 MiB of memory", "more than 16.0 MiB of stack");
    let any = "chat template: ";
    for (template, words) in [
        ("{% for a in range(9999) %}{% for b in range(9999) %}{{ '' }}{% endfor %}{% endfor %}".to_owned(), "fuel"),
        ("{% for a in range(9999) %}{{ 'x' * 10000 }}{% endfor %}".to_owned(), "bytes of output"),
        ("{{ 'a\nb' | indent(10000000000) }}".to_owned(), memory),
        ("{{ 'a' * 10000000000 }}".to_owned(), any),
        ("{{ ('a' * 100000) | replace('a', 'b' * 100000) }}".to_owned(), memory),
        ("{{ (['b' * 10000] * 100000) | join('c') }}".to_owned(), any),
        ("{{ 'a' | center(10000000000) }}".to_owned(), any),
        ("{{ '%10000000000d' | format(1) }}".to_owned(), any),
        ("{{ range(100000) | batch(2, 'x' * 1000) | list | tojson(indent=64) | length }}".to_owned(), ""),
        (text.to_owned(), memory),
        (doubled, memory),
        (lists.to_owned(), memory),
        (deep.to_owned(), any),
        (terms(400_000), stack),
        (nested(100_000), "recursion"),
        (terms(50_000).replace('+', " if 1 else "), ""),
        (terms(100_000).replace("+1", "|abs"), ""),
        (terms(100_000).replace('1', "[1]"), stack),
        (searched.to_owned(), "runs for more than 5 s"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}".to_owned(), "recursion"),
    ] {
        let outcome = ChatTemplate::new(&template, Map::new()).and_then(|t| t.apply(&json!([]), &Map::new(), false));
        let shown = &template[..template.len().min(150)];
        match outcome {
            Err(error) => {
                assert_eq!(error.kind, Kind::Data, "{shown}: {error}");
                assert!(
                    error.message.starts_with("chat template: ") && error.message.contains(words),
                    "{shown}: {error}"
                );
            }
            // A template within the bounds works.
            Ok(text) => assert!(words.is_empty(), "{shown}: {} bytes", text.len()),
        }
    }
    let peak = rlhf_hpc::sys::memory::peak_bytes();
    assert!(peak < 2 << 30, "{peak} bytes were resident");
}
