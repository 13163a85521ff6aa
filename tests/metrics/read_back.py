"""Reads the records of a run with other people's readers: TensorBoard's EventAccumulator and h5py.

    pip install tensorboard h5py
    python tests/metrics/read_back.py RUN_DIR     compares the events and rollouts.h5 with metrics.jsonl
    python tests/metrics/read_back.py --golden    prints the records that tests/metrics/tensorboard.rs expects
"""

import io
import json
import math
import pathlib
import sys


def same(a, b):
    return math.isnan(a) and math.isnan(b) or a == b or abs(a - b) <= 1e-6 * abs(b)


def events(run_dir, lines):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run_dir), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    tags = accumulator.Tags()
    got = {}
    for tag in tags["scalars"]:
        for event in accumulator.Scalars(tag):
            got[tag.split("/", 1)[1], event.step] = event.value
    want = {}
    for line in lines:
        odd = line.pop("nonfinite", {})
        for key, value in line.items():
            if key not in ("step", "time_unix_s"):
                want[key, line["step"]] = float(odd[key]) if value is None else value
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    for key, value in want.items():
        assert same(got[key], value), (key, got[key], value)
    texts = [(e.step, e.tensor_proto.string_val[0][:40]) for t in tags["tensors"] for e in accumulator.Tensors(t)]
    print(f"events: {len(got)} scalars of {len(tags['scalars'])} tags agree with metrics.jsonl, {len(texts)} texts")


def rollouts(run_dir):
    import h5py

    with h5py.File(run_dir / "rollouts.h5") as file:
        for name, step in file.items():
            assert name == f"step_{step.attrs['step']:06d}"
            n = len(step["score"])
            tokens, responses = step["token_offsets"][:], step["response_offsets"][:]
            assert len(tokens) == len(responses) == n + 1 and tokens[-1] == len(step["tokens"])
            assert ((tokens[1:] - tokens[:-1]) - step["prompt_tokens"][:] == responses[1:] - responses[:-1]).all()
            for key in "logprobs sample_logprobs ref_logprobs values kl rewards advantages returns mask".split():
                assert len(step[key]) == responses[-1], key
        attributes = dict(step.attrs)
        print(f"rollouts.h5: {len(file)} steps, the last with {n} samples; {attributes}; {sorted(step)}")


def golden():
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer.record_writer import RecordWriter

    value = summary_pb2.Summary.Value(tag="reward/reward_mean", simple_value=0.5)
    for event in (
        event_pb2.Event(wall_time=1.0, file_version="brain.Event:2"),
        event_pb2.Event(wall_time=1e9, step=300, summary=summary_pb2.Summary(value=[value])),
    ):
        out = io.BytesIO()
        RecordWriter(out).write(event.SerializeToString())
        print(out.getvalue().hex())


if __name__ == "__main__":
    if sys.argv[1] == "--golden":
        golden()
    else:
        folder = pathlib.Path(sys.argv[1])
        events(folder, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()])
        rollouts(folder)
