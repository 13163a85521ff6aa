"""Regenerates the texts of templates.json: each template rendered by Jinja 2 as transformers configures it.

    python tests/golden/templates.py        (transformers 5, jinja2 3.1.6)

The templates and their variables are in templates.json, too. A case is [template, text], or [template, null] if Jinja
rejects the template. To add a case, write [template, null] on a line of its own and run this script.
"""

import json
import pathlib

from transformers.utils.chat_template_utils import _compile_jinja_template

OUT = pathlib.Path(__file__).with_name("templates.json")
# Two tokens of the tokenizer; the other special tokens are undefined.
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
PLAIN = {"messages": [], "tools": None, "documents": None, "add_generation_prompt": False}


def rendered(template, variables):
    try:
        return _compile_jinja_template(template).render(**PLAIN, **TOKENS, **variables)
    except Exception:  # whatever the template raises
        return None


def main():
    golden = json.loads(OUT.read_text())
    cases = [[template, rendered(template, golden["variables"])] for template, _ in golden["cases"]]
    variables = json.dumps(golden["variables"], ensure_ascii=False)
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    OUT.write_text(f'{{"variables":{variables},\n"cases":[\n{lines}\n]}}\n', newline="\n")
    print(f"{OUT}: {len(cases)} templates, {sum(text is None for _, text in cases)} rejected")


if __name__ == "__main__":
    main()
