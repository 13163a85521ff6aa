//! Chat templates in Jinja.

use rlhf_hpc::text::ChatTemplate;
use serde_json::{Map, json};

/// Renders the input for conversations with and without tools.
pub fn run(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let special = Map::from_iter([("bos_token".to_owned(), json!("<s>")), ("eos_token".to_owned(), json!("</s>"))]);
    let Ok(template) = ChatTemplate::new(text, special) else { return };
    let call = json!({"type": "function", "function": {"name": "add", "arguments": {"a": 1}}});
    let messages = json!([{"role": "system", "content": "be brief"}, {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "2"}]);
    let more = Map::from_iter([("tools".to_owned(), json!([{"type": "function", "function": {"name": "add"}}]))]);
    drop(template.apply(&messages, &Map::new(), true));
    drop(template.apply(&messages, &more, false));
}

/// Templates that use most of the language.
pub fn seeds() -> Vec<Vec<u8>> {
    let templates = [
        "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>\n{{ m.content | trim }}{{ eos_token }}\n{% endfor %}\
         {% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        "{%- set ns = namespace(i=0, last=messages[-1]) -%}{%- for m in messages[::-1] if m.role != 'system' -%}\
         {%- set ns.i = ns.i + loop.index0 -%}{{ m.content.split(' ')[0].lstrip('x') ~ ns.i }}{%- endfor -%}",
        "{% macro call(t) %}{{ t.function.name }}({{ t.function.arguments | tojson(indent=2) }}){% endmacro %}\
         {% for m in messages %}{% if m.tool_calls is defined and m.tool_calls %}{{ call(m.tool_calls[0]) }}{% endif %}\
         {% else %}none{% endfor %}{{ tools | default([]) | map(attribute='function') | list | length }}",
        "{{ raise_exception('no') }}{{ strftime_now('%d %b %Y') }}{{ '%s %5.2f' | format('a', 1.5) }}",
        "{% for k, v in messages[0].items() | sort %}{{ k.upper()[:3].replace('R', 'x', 1) }}{{ range(3) | join(',') }}\
         {{ loop.cycle('a', 'b') }}{% if loop.first %}{% continue %}{% endif %}{% break %}{% endfor %}",
        "{% generation %}{{ messages | selectattr('role', 'equalto', 'user') | first | string }}{% endgeneration %}",
        "{% filter upper %}{{ 7 // 2 ** 3 % 5 }}{{ 'ab' * 3 }}{{ {'a': [1, none, true]} | tojson }}{% endfilter %}",
    ];
    templates.map(|template| template.as_bytes().to_vec()).into()
}
