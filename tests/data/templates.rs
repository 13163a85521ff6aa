//! Chat templates behave as Jinja 2 does in transformers, and a model directory's templates are all used.

use std::fs;
use std::path::Path;

use rlhf_hpc::text::{ChatTemplate, Tokenizer};
use serde_json::{Map, Value, json};

const TINY: &str = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
    "pre_tokenizer": null, "post_processor": null, "decoder": null,
    "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}"#;

/// Templates of the golden table that the engine renders in another way. The list may only shrink.
const DIFFERENT: [&str; 28] = [
    // The engine accepts a keyword that Python 3.11 rejects.
    "{{ path.replace('a', 'x', count=1) }}",
    // Unsupported forms of str.format are errors.
    "{{ '{:.2f} {:05d} {:,} {:x} {:e} {:%}'.format(3.14159, 42, 1234567, 255, 12345.678, 0.25) }}",
    "{{ '{:+} {!r} {!s}'.format(5, 'q', none) }}",
    "{{ '{a[k]} {b.real}'.format(a={'k': 1}, b=2) }}",
    "{{ 'ab' * -1 }}",
    // Views, ranges and groups print as lists.
    "{{ {1: 'a', none: 'b', true: 'c'} }}",
    "{{ table.keys() }}",
    "{{ table.values() }}",
    "{{ table.items() }}",
    "{{ rows | groupby('role') | list }}",
    "{{ range(3) }}",
    "{{ range(3) | tojson }}",
    // Filters and functions for web pages are not supported.
    "{{ 'one two three four' | wordwrap(9) }}",
    "{{ '<b>a</b>' | striptags }}",
    "{{ 'a b&c' | urlencode }}",
    "{{ {'a': 1, 'b': 'x y'} | urlencode }}",
    "{{ 1000000 | filesizeformat }}",
    "{{ 1000 | filesizeformat(true) }}",
    "{{ table | xmlattr }}",
    "{{ table | attr('b') }}",
    "{{ list | random is number }}",
    "{{ cycler('a', 'b').next() }}",
    "{{ lipsum is callable }}",
    "{{ name.upper is callable }}",
    "{{ namespace(_a=1) }}",
    // Macros have neither varargs nor kwargs, and a default cannot name another argument.
    "{% macro m(a) %}{{ a }}{{ varargs }}{% endmacro %}{{ m(1, 2) }}",
    "{% macro m(a) %}{{ a }}{{ kwargs }}{% endmacro %}{{ m(1, z=2) }}",
    "{% macro m(a, b=a) %}{{ a }}{{ b }}{% endmacro %}{{ m(1) }}",
];

#[test]
fn templates_render_as_in_jinja_2() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/templates.json");
    let golden: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let variables = golden["variables"].as_object().unwrap();
    let tokens = json!({"bos_token": "<s>", "eos_token": "</s>"}).as_object().unwrap().clone();
    let mut different = Vec::new();
    for case in golden["cases"].as_array().unwrap() {
        let (template, text) = (case[0].as_str().unwrap(), case[1].as_str());
        let ours = ChatTemplate::new(template, tokens.clone()).and_then(|t| t.apply(&json!([]), variables, false));
        if ours.as_deref().ok() != text {
            different.push((template, text, ours));
        }
    }
    let unknown: Vec<_> = different.iter().filter(|(template, ..)| !DIFFERENT.contains(template)).collect();
    assert!(unknown.is_empty(), "{unknown:#?}");
    let equal: Vec<_> = DIFFERENT.iter().filter(|known| !different.iter().any(|(one, ..)| one == *known)).collect();
    assert!(equal.is_empty(), "remove from the list: {equal:#?}");
}

/// A model directory whose files are `files`, next to a tokenizer.json.
fn directory(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in [("tokenizer.json", TINY)].iter().chain(files) {
        let path = dir.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    dir
}

fn rendered(dir: &Path, messages: &Value, more: &Value) -> String {
    let tokenizer = Tokenizer::load(dir).unwrap();
    tokenizer.chat().unwrap().apply(messages, more.as_object().unwrap(), false).unwrap()
}

#[test]
fn rows_with_tools_use_the_template_of_that_name_from_a_list_or_a_folder() {
    let list = r#"{"chat_template": [{"name": "tool_use", "template": "tools {{ tools | length }}"},
                                     {"name": "default", "template": "plain"}]}"#;
    let listed: &[(&str, &str)] = &[("tokenizer_config.json", list)];
    let of_files: &[(&str, &str)] = &[
        ("chat_template.jinja", "plain"),
        ("additional_chat_templates/tool_use.jinja", "tools {{ tools | length }}"),
        ("additional_chat_templates/rag.jinja", "documents"),
        ("tokenizer_config.json", r#"{"chat_template": "not this one"}"#),
    ];
    for files in [listed, of_files] {
        let dir = directory(files);
        for (more, text) in
            [(json!({}), "plain"), (json!({"tools": null}), "plain"), (json!({"tools": [1]}), "tools 1")]
        {
            assert_eq!(rendered(dir.path(), &json!([]), &more), text, "{files:?}");
        }
    }
    let dir = directory(&[("tokenizer_config.json", r#"{"chat_template": [{"name": "rag", "template": "x"}]}"#)]);
    let tokenizer = Tokenizer::load(dir.path()).unwrap();
    let error = tokenizer.chat().unwrap().apply(&json!([]), &Map::new(), false).unwrap_err();
    assert!(error.message.contains("no chat template is named default (there is rag)"), "{error}");
}

#[test]
fn every_special_token_with_a_name_is_a_variable_of_the_template() {
    let config = r#"{"pad_token": "<p>", "image_token": {"content": "<i>"}, "mask_token": null,
                     "extra_special_tokens": {"audio_token": "<a>", "start_of_x": "<x>"}, "add_bos_token": false}"#;
    let template = "{{ pad_token }}{{ image_token }}{{ audio_token }}{{ start_of_x }}{{ sep_token }}\
                    {{ mask_token is defined }}{{ add_bos_token is defined }}";
    let map = r#"{"sep_token": "<sep>", "pad_token": "<other>"}"#;
    let dir = directory(&[
        ("tokenizer_config.json", config),
        ("special_tokens_map.json", map),
        ("chat_template.jinja", template),
    ]);
    assert_eq!(rendered(dir.path(), &json!([]), &json!({})), "<other><i><a><x><sep>FalseFalse");
}

#[test]
fn reasoning_is_available_under_each_of_its_names_in_a_template() {
    let template = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }};{% endfor %}";
    let dir = directory(&[("chat_template.jinja", template)]);
    let messages = json!([{"reasoning": "a"}, {"thinking": "b"}, {"reasoning_content": "c", "thinking": "d"}, {}]);
    assert_eq!(rendered(dir.path(), &messages, &json!({})), "a|a|a;b|b|;c|d|;||;");
}
