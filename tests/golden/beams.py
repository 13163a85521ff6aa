"""Beam search of transformers on the models of models.py: goldens for tests/parity, or a comparison with the program.

    python tests/golden/beams.py                      # writes tests/golden/beams.json
    python tests/golden/beams.py BINARY [PROMPTS]     # compares PROMPTS (200) prompts of each family in each case

Needs torch and transformers >= 5. A case is early_stopping, length_penalty and repetition_penalty; the goldens have one more with biases
and bad words. The comparison has transformers search
prompts of one length together, in float32, and demands the same tokens and scores within 1e-4 of max(1, |score|). It prints what
differs, and exits 1 if anything does; what transformers itself finds with log-probabilities moved by 1e-6 is a tie instead.
"""

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

HERE = Path(__file__).parent
FAMILIES = ["llama2", "llama3", "mistral", "qwen2", "qwen3"]
CASES = [(True, 1.0, 1.0), (False, 1.0, 1.0), ("never", 1.0, 1.0), (True, -0.5, 1.0), (False, 0.0, 1.2), ("never", 2.0, 1.2)]
EDITED = (False, 1.0, 1.3)
BEAMS, NEW = 4, 20
# Enough of the 131 tokens that some responses end.
ENDS = [2, 31, 57, 90]
LENGTHS = [17, 40, 1, 5, 9, 26, 31, 64]


def load(directory, dtype):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()


class Noise(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores + 1e-6 * torch.randn_like(scores)


def search(model, prompts, case, *processors, **options):
    """The best of each prompt; all are equally long."""
    early_stopping, length_penalty, repetition_penalty = case
    ids = torch.tensor(prompts)
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=BEAMS, num_return_sequences=BEAMS,
            max_new_tokens=NEW, early_stopping=early_stopping, length_penalty=length_penalty,
            repetition_penalty=repetition_penalty, eos_token_id=ENDS, pad_token_id=0, return_dict_in_generate=True,
            output_scores=True, logits_processor=LogitsProcessorList(processors), **options)
    lengths = (out.beam_indices >= 0).sum(-1).tolist()
    best = [dict(tokens=row[ids.shape[1]:ids.shape[1] + n].tolist(), score=score.item())
            for row, n, score in zip(out.sequences, lengths, out.sequences_scores)]
    return [best[i:i + BEAMS] for i in range(0, len(best), BEAMS)]


def prompts(family, count):
    of = random.Random(family)
    return [[of.randrange(131) for _ in range(LENGTHS[i % len(LENGTHS)])] for i in range(count)]


def gap(ours, theirs):
    return max(abs(a["score"] - b["score"]) / max(1, abs(b["score"])) for a, b in zip(ours, theirs, strict=True))


def is_same(ours, theirs):
    return [one["tokens"] for one in ours] == [one["tokens"] for one in theirs] and gap(ours, theirs) <= 1e-4


def write():
    out = dict(beams=BEAMS, new_tokens=NEW, ends=ENDS, searches=[])
    for family in FAMILIES:
        single, double = (load(HERE / "models" / family, dtype) for dtype in (torch.float32, torch.float64))
        for prompt in prompts(family, 2):
            free = search(double, [prompt], EDITED)[0][0]["tokens"]
            bias, bad_words = sorted([[11, 2.5], [free[0], -1.5]]), [free[1:3], [free[4]]]
            for case in [*CASES, EDITED]:
                options, edits = {}, {}
                if case == EDITED:
                    options = dict(sequence_bias=[[[token], by] for token, by in bias], bad_words_ids=bad_words)
                    edits = dict(bias=bias, bad_words=bad_words)
                best, exact = (search(model, [prompt], case, **options)[0] for model in (single, double))
                assert [one["tokens"] for one in best] == [one["tokens"] for one in exact], "a tie: take another prompt"
                out["searches"].append(dict(model=family, prompt=prompt, early_stopping=str(case[0]).lower(),
                                            length_penalty=case[1], repetition_penalty=case[2], **edits, best=exact))
    rows = ",\n".join(json.dumps(row) for row in out.pop("searches"))
    (HERE / "beams.json").write_text(json.dumps(out)[:-1] + ', "searches": [\n' + rows + "\n]}\n")


def compare(binary, count):
    totals = dict(equal=0, ties=0, wrong=0)
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder) / family
            subprocess.run(["cp", "-r", HERE / "models" / family, directory], check=True)
            for name in ("config.json", "generation_config.json"):
                config = json.loads((directory / name).read_text())
                (directory / name).write_text(json.dumps(config | dict(eos_token_id=ENDS)))
            model, rows = load(directory, torch.float32), Path(folder) / "rows.jsonl"
            asked = prompts(family, count)
            rows.write_text("".join(json.dumps(dict(tokens=prompt)) + "\n" for prompt in asked))
            for case in CASES:
                options = ["--early-stopping", str(case[0]).lower(), "--length-penalty", str(case[1]),
                           "--repetition-penalty", str(case[2]), "--beams", str(BEAMS), "--samples", str(BEAMS),
                           "--max-new-tokens", str(NEW), "--device", "cpu", "--dtype", "f32"]
                command = [binary, "generate", "--model", directory, "--input", rows, *options]
                lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
                mine = [json.loads(line) for line in lines]
                found, stopped, worst = dict(equal=0, ties=0, wrong=0), sum(one["finish"] == "stop" for one in mine), 0.0
                for first in range(len(LENGTHS)):
                    of_length = range(first, count, len(LENGTHS))
                    for i, theirs in zip(of_length, search(model, [asked[i] for i in of_length], case), strict=True):
                        ours = mine[i * BEAMS:(i + 1) * BEAMS]
                        near = (search(model, [asked[i]], case, Noise())[0] for _ in range(20))
                        kind = "equal" if is_same(ours, theirs) else "ties" if any(is_same(ours, n) for n in near) else "wrong"
                        found[kind] += 1
                        worst = max(worst, gap(ours, theirs) if kind == "equal" else 0.0)
                        if kind == "wrong":
                            print(f"{family} {case} {asked[i]}: transformers {theirs}, rlhf-hpc {ours}")
                print(f"{family} {case}: {found}, scores within {worst:.1e}, {stopped} of {len(mine)} ended by a token",
                      flush=True)
                totals = {kind: totals[kind] + found[kind] for kind in totals}
    print(totals)
    sys.exit(1 if totals["wrong"] else 0)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        compare(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 200)
    else:
        write()
