"""Regenerates image_chats.json: token ids of conversations with images, by the processors of transformers.

    python tests/golden/image_chats.py        (transformers 5.24, Pillow 13)

  tokenizer  the one of chat.json, with tokens for images
  templates  written for this test in the style of three model families, with the class of each processor, its settings,
             and token ids of config.json
  rows       rows with images, and the same as messages with images for transformers
  cases      template and row: ids, and (height, width) of each image's grid of patches

The images are files of images/.
"""

import json
import pathlib

import transformers
from PIL import Image, ImageOps
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

OUT = pathlib.Path(__file__).with_suffix(".json")
IMAGES = OUT.with_name("images")
CHAT = json.loads(OUT.with_name("chat.json").read_text())
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]

QWEN2_5 = """{% set seen = namespace(images=0) %}{% for m in messages %}
{%- if loop.first and m['role'] != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}<|im_start|>{{ m['role'] }}
{% if m['content'] is string %}{{ m['content'] }}<|im_end|>
{% else %}{% for part in m['content'] %}
{%- if part['type'] == 'image' or 'image' in part or 'image_url' in part %}{% set seen.images = seen.images + 1 %}
{%- if add_vision_id %}Picture {{ seen.images }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

QWEN3 = """{%- set images = namespace(count=0) %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.content is string %}
        {{- m.content }}
    {%- else %}
        {%- for part in m.content %}
            {%- if part.type == 'image' or 'image' in part or 'image_url' in part %}
                {%- set images.count = images.count + 1 %}
                {%- if add_vision_id %}Picture {{ images.count }}: {% endif -%}
                <|vision_start|><|image_pad|><|vision_end|>
            {%- elif 'text' in part %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

QWEN3_5 = """{%- macro show(content) %}
    {%- if content is string %}
        {{- content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for item in content %}
            {%- if 'image' in item or 'image_url' in item or item.type == 'image' %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif 'text' in item %}
                {{- item.text }}
            {%- else %}
                {{- raise_exception('Unexpected item type in content.') }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- for m in messages %}
    {%- set content = show(m.content)|trim %}
    {{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- else %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- endif %}"""

TEMPLATES = {
    "qwen2_5": {"text": QWEN2_5, "class": "Qwen2_5_VLProcessor",
                "settings": {"patch_size": 14, "size": {"shortest_edge": 3136, "longest_edge": 6272}}},
    "qwen3": {"text": QWEN3, "class": "Qwen3VLProcessor",
              "settings": {"patch_size": 16, "size": {"shortest_edge": 4096, "longest_edge": 16384}}},
    "qwen3_5": {"text": QWEN3_5, "class": "Qwen3VLProcessor",
                "settings": {"patch_size": 8, "size": {"shortest_edge": 256, "longest_edge": 4096}}},
}


def image(name):
    return {"type": "image", "image": name}


def text(text):
    return {"type": "text", "text": text}


def says(role, content):
    return {"role": role, "content": content}


def rows():
    """Rows as they may be given, and the same messages with all images in their parts."""
    own = [says("user", [image("rgb.png"), text("What is this?")])]
    yield {"messages": own}, own
    yield {"messages": [says("user", [{"type": "image"}, text("What is this?")])], "images": ["rgb.png"]}, own
    yield {"prompt": "What is this?", "images": ["rgb.png"]}, own
    yield {"prompt": [says("user", "What is this?")], "image": "rgb.png"}, own
    yield {"prompt": "<image>What is this?", "images": ["rgb.png"]}, own
    yield {"messages": [{"from": "human", "value": "<image>What is this?"}], "images": ["rgb.png"]}, own
    url = {"type": "image_url", "image_url": {"url": "rgb.png"}}
    yield {"messages": [says("user", [url, text("What is this?")])]}, own
    several = [
        says("system", "Be short."),
        says("user", [text("Compare "), image("420.jpg"), text(" and "), image("turned-6.jpg"), image("tiny.png")]),
        says("assistant", "The first is larger."),
        says("user", [text("And now?"), image("narrow.png")]),
    ]
    yield {"messages": several}, several
    places = json.loads(json.dumps(several))
    names = [part.pop("image") for m in places if isinstance(m["content"], list) for part in m["content"] if "image" in part]
    yield {"messages": places, "images": names}, several
    none = [says("user", "No image.")]
    yield {"messages": none}, none


def main():
    tokenizer = Tokenizer.from_str(json.dumps(CHAT["tokenizer"]))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    given = [row for row, _ in rows()]
    golden = {"transformers": transformers.__version__, "tokenizer": json.loads(tokenizer.to_str()), "templates": {},
              "rows": given, "cases": []}
    for name, template in TEMPLATES.items():
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=template["text"],
                                       extra_special_tokens={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"})
        fast.image_token, fast.video_token = "<|image_pad|>", "<|video_pad|>"
        make = getattr(transformers, template["class"])
        processor = make(image_processor=Qwen2VLImageProcessorPil(**template["settings"]), tokenizer=fast,
                         video_processor=Qwen2VLVideoProcessor(), chat_template=template["text"])
        ids = {f"{key}_token_id": fast.convert_tokens_to_ids(token) for key, token in [
            ("image", "<|image_pad|>"), ("video", "<|video_pad|>"), ("vision_start", "<|vision_start|>"),
            ("vision_end", "<|vision_end|>")]}
        golden["templates"][name] = {**template, "ids": ids}
        for number, (_, messages) in enumerate(rows()):
            shown = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            parts = [part for m in messages if isinstance(m["content"], list) for part in m["content"]]
            images = [ImageOps.exif_transpose(Image.open(IMAGES / part["image"])).convert("RGB")
                      for part in parts if part["type"] == "image"]
            found = processor(text=[shown], images=images or None)
            grids = found["image_grid_thw"].tolist() if images else []
            golden["cases"].append({"template": name, "row": number, "ids": list(found["input_ids"][0]),
                                    "grids": [grid[1:] for grid in grids]})
    OUT.write_text(json.dumps(golden, ensure_ascii=False, separators=(",", ":")) + "\n")
    print(f"{OUT}: {len(golden['cases'])} cases, lengths {[len(case['ids']) for case in golden['cases']]}")


if __name__ == "__main__":
    main()
