"""Regenerates token_files.json: token ids that transformers makes of directories whose small files add to tokenizer.json.

    python tests/golden/token_files.py        (transformers 5)

Each case has the files of a directory, the name of its tokenizer.json, and the ids of the texts. A null in place of the
ids: transformers gives a token another id than its file does, so the program must refuse the directory.
"""

import json
import os
import pathlib
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
import transformers  # noqa: E402

OUT = pathlib.Path(__file__).with_name("token_files.json")
TEXTS = ["hello <|a|>x y", " y", "x<|a|> y<|b|> hello", "[PAD]x</s> y"]


def flags(text, special=True, **more):
    return {"content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": not special, "special": special, **more}


def bpe(letters, merges, more, **parts):
    words = ["<s>", "</s>", "<unk>", *more, *letters]
    words += ["".join(pair) for pair in merges]
    model = {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None, "end_of_word_suffix": None,
             "fuse_unk": True, "byte_fallback": False, "vocab": {word: i for i, word in enumerate(words)}, "merges": merges}
    added = [{"id": i, **flags(word)} for i, word in enumerate(words[:3])]
    begin = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
             "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
             "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None, "pre_tokenizer": None,
            "post_processor": begin, "decoder": None, "model": model, **parts}


SIGNS = list("abdehlopsuxyADP<|>/[]")
SPACES = [["h", "e"], ["l", "l"], ["he", "ll"], ["hell", "o"]]
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLIT = {"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": QWEN}, "behavior": "Isolated", "invert": False},
                                               {**BYTES, "use_regex": False}]}
PREPEND = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]}
TOKENIZERS = {
    "bytes": bpe(["Ġ", *SIGNS], [*SPACES, ["Ġ", "hello"], ["Ġ", "y"]], [], pre_tokenizer=BYTES, decoder=BYTES),
    "words": bpe(["▁", *SIGNS], [*SPACES, ["▁", "hello"], ["▁", "y"], ["▁", "▁"]], [], normalizer=PREPEND),
    "qwen": bpe(["Ġ", *SIGNS], [*SPACES, ["Ġ", "hello"], ["Ġ", "y"]], [], normalizer={"type": "NFC"}, pre_tokenizer=SPLIT, decoder=BYTES),
    # A word of the vocabulary that no list of added tokens has.
    "hidden": bpe(["Ġ", *SIGNS], [*SPACES, ["Ġ", "hello"]], ["<|a|>"], pre_tokenizer=BYTES, decoder=BYTES),
}
NEXT = {name: len(one["model"]["vocab"]) for name, one in TOKENIZERS.items()}


def cases():
    fast, names = {"tokenizer_class": "PreTrainedTokenizerFast"}, {"bos_token": "<s>", "eos_token": "</s>"}
    a, b = NEXT["bytes"], NEXT["bytes"] + 1

    def case(tokenizer, settings, **files):
        return {"tokenizer": tokenizer, "files": {"tokenizer_config.json": {**fast, **names, **settings}, **{f"{k}.json": v for k, v in files.items()}}}

    def decoder(*tokens):
        return {"added_tokens_decoder": {str(i): flags(*token) if isinstance(token, tuple) else token for i, token in tokens}}

    yield case("bytes", {})
    # Tokens by id, in any order, with their flags.
    yield case("bytes", decoder((a, ("<|a|>",))))
    yield case("bytes", decoder((b, ("<|b|>",)), (a, ("<|a|>",))))
    yield case("bytes", decoder((a, flags("<|a|>", lstrip=True, rstrip=True))))
    yield case("bytes", decoder((a, flags("<|a|>", special=False, single_word=True))))
    yield case("bytes", decoder((1, flags("</s>", rstrip=True))))
    yield case("hidden", decoder((3, ("<|a|>",))))
    yield case("bytes", decoder((a + 5, ("<|a|>",))))
    yield case("bytes", decoder((5, ("<|a|>",))))
    # Tokens without an id.
    yield case("bytes", {"additional_special_tokens": ["<|b|>", "<|a|>"]})
    yield case("bytes", {"extra_special_tokens": ["<|a|>"]})
    yield case("bytes", {"extra_special_tokens": {"a_token": "<|a|>", "b_token": "<|b|>"}})
    yield case("bytes", {"image_token": "<|b|>", "pad_token": "[PAD]"})
    yield case("hidden", {"pad_token": "<|a|>"})
    # Other files.
    yield case("bytes", {}, added_tokens={"<|b|>": b, "<|a|>": a})
    yield case("bytes", {"additional_special_tokens": ["<|a|>"]}, added_tokens={"<|a|>": a})
    yield case("bytes", {}, added_tokens={"<|a|>": a + 3})
    yield case("bytes", {}, special_tokens_map={"additional_special_tokens": ["<|a|>"], "pad_token": flags("[PAD]", lstrip=True)})
    yield case("bytes", {"pad_token": "</s>"}, special_tokens_map={"pad_token": "[PAD]"})
    yield case("bytes", decoder((a, ("<|a|>",))), special_tokens_map={"pad_token": "</s>"})
    # Settings of classes.
    for settings in [{}, {"add_prefix_space": True}, {"add_prefix_space": False}, {"legacy": True}, {"legacy": False},
                     {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}, {"split_special_tokens": True}]:
        for tokenizer, name in [("bytes", "PreTrainedTokenizerFast"), ("bytes", "GPT2Tokenizer"), ("bytes", "LlamaTokenizerFast"),
                                ("words", "LlamaTokenizerFast"), ("words", "LlamaTokenizer"), ("words", "PreTrainedTokenizerFast")]:
            yield case(tokenizer, {"tokenizer_class": name, **settings})
    for kind in ["llama", "mistral", "qwen3"]:
        yield case("words", {"tokenizer_class": "LlamaTokenizer"}, config={"model_type": kind})
        yield case("bytes", {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}, config={"model_type": kind})
    for prefix in [True, False]:
        yield case("qwen", {"add_prefix_space": prefix}, config={"model_type": "qwen2"})
        yield case("qwen", {"tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": prefix})


def ids(case):
    with tempfile.TemporaryDirectory() as directory:
        for name, value in [("tokenizer.json", TOKENIZERS[case["tokenizer"]]), *case["files"].items()]:
            pathlib.Path(directory, name).write_text(json.dumps(value))
        made = transformers.AutoTokenizer.from_pretrained(directory)
        wanted = {token["content"]: int(i) for i, token in case["files"]["tokenizer_config.json"].get("added_tokens_decoder", {}).items()}
        wanted |= case["files"].get("added_tokens.json", {})
        if any(made.convert_tokens_to_ids(text) != i for text, i in wanted.items()):
            return None
        return [made(text)["input_ids"] for text in TEXTS]


def main():
    golden = {"transformers": transformers.__version__, "texts": TEXTS, "tokenizers": TOKENIZERS}
    golden["cases"] = [{**case, "ids": ids(case)} for case in cases()]
    OUT.write_text(json.dumps(golden, ensure_ascii=False, separators=(",", ":")) + "\n")
    print(f"{OUT}: {len(golden['cases'])} cases, {sum(case['ids'] is None for case in golden['cases'])} refused")


main()
