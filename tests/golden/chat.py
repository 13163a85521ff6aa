"""Makes chat.json: chat templates rendered by transformers, and the token ids of each text.

    python tests/golden/chat.py        (transformers 5, tokenizers 0.23)

The templates are written for this test, in the manner of well-known model families.
"""

import datetime
import json
import pathlib
import tempfile

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, decoders, trainers, AddedToken
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

NOW = datetime.datetime(2025, 3, 9, 14, 5, 6)

SPECIAL = ["<|bos|>", "<|eos|>", "<|head|>", "<|/head|>", "<|turn|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>",
           "[INST]", "[/INST]"]

TEMPLATES = {
    # Llama 3: headers, a system part with a date, trimmed contents.
    "headers": ("<|bos|>", "<|turn|>", """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{%- if strftime_now is defined %}
    {%- set today = strftime_now('%d %b %Y') %}
{%- else %}
    {%- set today = 'unknown' %}
{%- endif %}
{{- '<|head|>system<|/head|>\\n\\n' }}
{{- 'Today is ' + today + '\\n' }}
{{- system }}{{- '<|turn|>' }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'calls' in message) %}
        {{- '<|head|>' + message['role'] + '<|/head|>\\n\\n' + message['content'] | trim + '<|turn|>' }}
    {%- else %}
        {{- '<|head|>tool<|/head|>\\n\\n' }}{{ message | tojson }}{{- '<|turn|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|head|>assistant<|/head|>\\n\\n' }}
{%- endif %}
"""),
    # Qwen: no begin token, namespaces, earlier thoughts taken out.
    "im": (None, "<|im_end|>", """{%- if tools %}
    {{- '<|im_start|>system\\ntools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou answer briefly.<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if not ns.found and message.role == "user" and message.content is string and not(message.content.startswith('<tool>') and message.content.endswith('</tool>')) %}
        {%- set ns.found = true %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""),
    # Mistral: strict alternation, errors raised by the template.
    "inst": ("<s>", "</s>", """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] + eos_token }}
    {%- else %}
        {{- raise_exception("only user and assistant roles are supported") }}
    {%- endif %}
{%- endfor %}
"""),
    # Blocks on their own lines: trim_blocks, lstrip_blocks, and Python's manners.
    "lines": ("<|bos|>", "<|eos|>", """{# a comment line #}
{% for message in messages %}
    {% if loop.first %}
first
    {% endif %}
  {{ loop.index }} {{ message.role.upper() }} {{ message.content | tojson }}
    {% if message.role == 'assistant' %}
        {% generation %}
[{{ message['content'].strip().title() }}]
        {% endgeneration %}
        {% continue %}
    {% endif %}
  flags {{ true }} {{ none }} {{ loop.last }} {{ message.get('name', 'nobody') }} {{ message.name | default('-') }}
    {% for key, value in message.items() %}
   {{ key }}={{ value | tojson(indent=2) }}{{ "," if not loop.last }}
    {% endfor %}
{% endfor %}
{% if add_generation_prompt %}open{% endif %}
{{ {'b': [1, 2.5, true, none], 'a': {}, 'e': []} | tojson }} {{ {'b': 'é<&>', 'a': "'"} | tojson(sort_keys=true, ensure_ascii=true) }}

"""),
}

CHATS = {
    "question": [{"role": "user", "content": "What is 12 + 34?"}],
    "system": [{"role": "system", "content": "  Be <b>brief</b> & \"kind\".\n"}, {"role": "user", "content": " Héllo 日本 🙂 "}],
    "turns": [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\ntwo\twords"},
        {"role": "user", "content": "three", "name": "ann"},
        {"role": "assistant", "content": "<think>\nyes\n</think>\n\nfour"},
    ],
    "disorder": [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}],
    "tool": [{"role": "user", "content": "call"}, {"role": "tool", "content": "{\"x\": [1, 2]}", "calls": [{"n": 1}]}],
}


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


def tokenizer():
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=[AddedToken(s, special=True) for s in SPECIAL],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tok.train_from_iterator(["system user assistant what is one two three four, today and you answer briefly"] * 4, trainer)
    return tok


def main():
    chat_template_utils.datetime = Clock
    tok = tokenizer()
    cases = []
    for template_name, (bos, eos, template) in TEMPLATES.items():
        fast = PreTrainedTokenizerFast(tokenizer_object=tok, bos_token=bos, eos_token=eos, chat_template=template)
        for chat_name, chat in CHATS.items():
            for add_generation_prompt in (False, True):
                case = {"template": template_name, "chat": chat_name, "add_generation_prompt": add_generation_prompt}
                try:
                    case["text"] = fast.apply_chat_template(
                        chat, tokenize=False, add_generation_prompt=add_generation_prompt)
                    case["ids"] = fast.apply_chat_template(
                        chat, tokenize=True, add_generation_prompt=add_generation_prompt, return_dict=False)
                except Exception as error:  # what the template refuses
                    case["error"] = str(error)
                cases.append(case)
    with tempfile.TemporaryDirectory() as directory:
        tok.save(directory + "/tokenizer.json")
        tokenizer_json = json.loads(pathlib.Path(directory, "tokenizer.json").read_text())
    golden = {
        "transformers": transformers.__version__,
        "now": int(NOW.replace(tzinfo=datetime.timezone.utc).timestamp()),
        "tokenizer": tokenizer_json,
        "templates": {name: {"bos": bos, "eos": eos, "text": text} for name, (bos, eos, text) in TEMPLATES.items()},
        "chats": CHATS,
        "cases": cases,
    }
    out = pathlib.Path(__file__).with_name("chat.json")
    out.write_text(json.dumps(golden, ensure_ascii=False, separators=(",", ":")) + "\n")
    errors = [case for case in cases if "error" in case]
    print(f"{out}: {len(cases)} cases, {len(errors)} refused: {sorted({case['error'] for case in errors})}")


if __name__ == "__main__":
    main()
