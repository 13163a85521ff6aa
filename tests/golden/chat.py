"""Regenerates the cases of chat.json: each chat rendered by transformers with each template, and the token ids of the text.

    python tests/golden/chat.py        (transformers 5, tokenizers 0.23)

Their sources are in chat.json, too: a tokenizer, chats, and templates that are written for this test in the style of
well-known model families. `with` are chats whose template has more variables: tools, and some of its own.

  headers  Llama 3: headers, a system part with a date, trimmed contents
  im       Qwen: no begin token, namespaces, earlier thoughts taken out
  inst     Mistral: strict alternation, errors raised by the template
  calls    Qwen: tools, calls of them and their results, enable_thinking
  harmony  gpt-oss: channels, thoughts dropped from the past, functions as types, two ends of turns
  lines    blocks on their own lines: trim_blocks, lstrip_blocks, and Python's manners
"""

import datetime
import json
import pathlib

import transformers
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

OUT = pathlib.Path(__file__).with_name("chat.json")
GOLDEN = json.loads(OUT.read_text())


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.datetime.fromtimestamp(GOLDEN["now"], datetime.timezone.utc)


def case(fast, names, chat, add_generation_prompt):
    case = {**names, "add_generation_prompt": add_generation_prompt}
    more = {**names.get("more", {}), "add_generation_prompt": add_generation_prompt}
    try:
        case["text"] = fast.apply_chat_template(chat, tokenize=False, **more)
        case["ids"] = fast.apply_chat_template(chat, tokenize=True, return_dict=False, **more)
    except Exception as error:  # what the template refuses
        case["error"] = str(error)
    return case


def main():
    chat_template_utils.datetime = Clock
    tokenizer = Tokenizer.from_str(json.dumps(GOLDEN["tokenizer"]))
    cases = []
    for template_name, template in GOLDEN["templates"].items():
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=template["bos"], eos_token=template["eos"],
                                       chat_template=template["text"])
        told = GOLDEN["with"] if template_name in ("calls", "harmony") else []
        for names in [{"chat": chat} for chat in GOLDEN["chats"] if chat not in ("calls", "channels") or told] + told:
            names, chat = {"template": template_name, **names}, GOLDEN["chats"][names["chat"]]
            cases += [case(fast, names, chat, add_generation_prompt) for add_generation_prompt in (False, True)]
    golden = {**GOLDEN, "transformers": transformers.__version__, "cases": cases}
    OUT.write_text(json.dumps(golden, ensure_ascii=False, separators=(",", ":")) + "\n")
    errors = {case["error"] for case in cases if "error" in case}
    print(f"{OUT}: {len(cases)} cases, refused: {sorted(errors)}")


if __name__ == "__main__":
    main()
