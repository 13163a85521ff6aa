"""Jobs drawn at random: small ones, of keys that users combine, each held to what a job promises.

    bench/drawn.sh [--seed 0] [--from 0] [--count 20] [--ranks 1,2,4] [--device gpu|cpu] [--kind ppo|sft] [--plan] [--keep]

A job is a model of some family and shape, a kind, a layout and settings, all drawn from (seed, number). It must run to its end,
or be refused with exit 2 and a message that names a key. What is held of one that runs: every number finite; logprob_gap_max 0
where log-probabilities are recomputed or both forwards are the same; the plan within 5 % of what its fullest GPU held. Then, as
drawn, one of: stopped at every boundary (checkpoint.max_hours), or by SIGUSR1 at any time, and resumed, it is the same to the bit;
resumed on another layout or device it comes to its end; with other keys that results do not depend on it is the same to the bit;
on one rank, or on the CPU in f32, its numbers are near.

A job that fails keeps its folder, with the lines that ran in `lines`.
"""

import argparse
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from drawn_jobs import job, layout, toml

LIMIT_S = 240
TIMELESS = re.compile(r"time_|_per_s$|^idle_|^memory_|^gpu_|^reshard_bytes$|^mfu")
KEY = re.compile(r"\b(job|model|mesh|data|rollout|reward|ppo|sft|gradient|optim|eval|checkpoint|metrics)\.[a-z_.]+")
# Keys of config.json that a refusal may name instead.
OF_A_MODEL = re.compile(r"head dim|hidden_size|intermediate_size|num_attention_heads|num_key_value_heads|num_hidden_layers|tensor = ")


class Failed(Exception):
    """What a job does not hold."""


class Place:
    """A folder with the model of a job, and its runs."""

    def __init__(self, args, name, ranks, config):
        self.args, self.ranks, self.root = args, ranks, Path(args.work)
        self.dir = self.root / name
        shutil.rmtree(self.dir, ignore_errors=True)
        self.dir.mkdir(parents=True)
        self.lines = self.dir / "lines"
        (self.dir / "config.json").write_text(json.dumps(config, indent=1))
        self.seconds = 0.0
        done = self.call(1, ["init", "--config", "config.json", "--tokenizer", "../tokenizer", "--out", "model"])
        if done.returncode:
            raise Failed(f"init: {done.stderr}")

    def call(self, ranks, words, when=None):
        env = dict(os.environ, OMPI_MCA_mpi_yield_when_idle="1")
        line = [self.args.binary] + words
        if ranks > 1:
            line = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(ranks)] + line
        with self.lines.open("a") as out:
            out.write(" ".join(f"'{word}'" if re.search(r"[\[{ \"]", word) else word for word in line) + "\n")
        begun = time.time()
        errors = self.dir / "stderr"
        with errors.open("w") as into:
            child = subprocess.Popen(line, cwd=self.dir, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=into)
            try:
                if when is not None:
                    self.signal_after(child, ranks, when)
                child.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                child.terminate()
                child.wait(20)
                self.seconds += time.time() - begun
                raise Failed(f"hangs: {' '.join(words)}") from None
        self.last = time.time() - begun
        self.seconds += self.last
        return subprocess.CompletedProcess(line, child.returncode, "", errors.read_text(errors="replace"))

    def signal_after(self, child, ranks, when):
        """Waits a time behind the run's first words, then asks one rank to stop."""
        until = time.time() + 30
        while not self.wrote() and child.poll() is None and time.time() < until:
            time.sleep(0.01)
        time.sleep(when)
        pids = [child.pid]
        if ranks > 1:
            pids = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split() if child.poll() is None else []
        if pids and child.poll() is None:
            try:
                os.kill(int(pids[-1]), signal.SIGUSR1)
            except ProcessLookupError:
                pass

    def wrote(self):
        return (self.dir / "stderr").stat().st_size > 0

    def run(self, name, ranks, sets, when=None):
        file = self.dir / f"{name}.toml"
        tables = {}
        for key, value in sets.items():
            table, key = key.rsplit(".", 1)
            tables.setdefault(table, {})[key] = value
        tables.setdefault("job", {})["dir"] = name
        tables.setdefault("model", {}).update(actor="model")
        tables.setdefault("data", {}).update(prompts=["../rows.jsonl"], prompt_key="prompt")
        if sets["job.kind"] == "sft":
            tables["data"]["response_key"] = "demonstration"
        text = "".join(f"[{table}]\n" + "".join(f"{k} = {toml(v)}\n" for k, v in keys.items()) for table, keys in tables.items())
        file.write_text(text)
        return self.call(ranks, ["run", file.name], when)

    def metrics(self, name):
        path = self.dir / name / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def computed(self, name):
        return [{k: v for k, v in line.items() if not TIMELESS.search(k)} for line in self.metrics(name)]

    def export(self, name):
        return (self.dir / name / "export/model.safetensors").read_bytes()


def ended(done, code, what):
    if done.returncode != code:
        raise Failed(f"{what}: exit {done.returncode}, wanted {code}:\n{done.stderr[-3000:]}")


def size(words):
    number, unit = words.split()
    return float(number) * 1024 ** ["B", "KiB", "MiB", "GiB"].index(unit)


def checked(place, name, done, sets, log):
    """What every run to the end holds."""
    if re.search(r"panicked|nan\b", done.stderr):
        raise Failed(f"{name}: says {done.stderr[-2000:]}")
    lines = place.metrics(name)
    steps = [line for line in lines if not any(key.startswith("eval") for key in line)]
    if len(steps) != sets["job.steps"]:
        raise Failed(f"{name}: {len(steps)} steps of {sets['job.steps']}")
    for line in lines:
        bad = [key for key, value in line.items() if isinstance(value, float) and not math.isfinite(value) or value is None]
        if bad:
            raise Failed(f"{name}: {bad} in {line}")
    drawn = "as drawn, with other bits" in done.stderr
    mesh_differs = sets.get("mesh.sequence", 1) > 1 or "reshard" in json.dumps(steps) or "in training:" in done.stderr
    may_differ = sets.get("ppo.old_logprobs") == "rollout" and (drawn or mesh_differs or sets.get("job.products") in ("fast", "auto"))
    if sets["job.kind"] == "ppo" and not may_differ:
        gaps = [line["logprob_gap_max"] for line in steps]
        if any(gaps):
            raise Failed(f"{name}: gaps {gaps}")
    found = re.search(r"(\d[\d.]* \w+) at most above the start, (\d[\d.]* \w+) planned", done.stderr)
    if found and sets["job.device"] == "gpu":
        # Words have one digit behind the point; of little, 5 % are less than a page of the cache. Under "auto" and
        # with job.check the start takes more memory than a small job does.
        measured, planned = steps[-1]["memory_peak_bytes"], size(found[2])
        rounding = size("0.05 " + found[2].split()[1])
        apart = max(0, abs(planned - measured) - rounding)
        log["plan"].append((math.copysign(apart, planned - measured) / measured, place.dir.name, name))
        if apart > max(0.05 * measured, 48 << 10) and sets["job.products"] != "auto" and not sets["job.check"]:
            words = f"{name}: {measured} bytes, {found[0]}"
            if not place.args.plan:
                raise Failed(words)
            log["apart"].append(f"{place.dir.name}, {words}")


def same(place, one, other):
    a, b = place.computed(one), place.computed(other)
    if len(a) != len(b):
        raise Failed(f"{one} has {len(a)} lines, {other} {len(b)}")
    for x, y in zip(a, b):
        differ = {key: (x.get(key), y.get(key)) for key in x.keys() | y.keys() if x.get(key) != y.get(key)}
        if differ:
            raise Failed(f"{one} and {other}, step {x.get('step')}: {differ}")
    if place.export(one) != place.export(other):
        raise Failed(f"{one} and {other}: exports differ")


def held_to_the_bit(place, name, sets):
    """Which products `auto` takes is measured, and may differ from start to start."""
    if sets.get("job.products") != "auto":
        same(place, name, "whole")


def near(place, one, other, keys, relative, absolute):
    a, b = place.computed(one), place.computed(other)
    for x, y in list(zip(a, b))[:1]:
        for key in keys:
            if key in x and key in y and abs(x[key] - y[key]) > max(relative * abs(y[key]), absolute):
                raise Failed(f"{one} and {other}: {key} {x[key]} against {y[key]}")


def stopped_and_resumed(place, draw, name, ranks, sets, seconds, by_signal):
    """Asked to stop five times, then let go."""
    for start in range(5):
        own = dict(sets)
        if not by_signal:
            own["checkpoint.max_hours"] = draw.choice([1e-9, draw.random() * seconds / 3600])
        done = place.run(name, ranks, own, draw.random() * seconds if by_signal else None)
        if done.returncode == 0:
            return done
        ended(done, 85, f"{name}, start {start}")
        place.log["stops"] += 1
    ended(place.run(name, ranks, sets), 0, f"{name}, at last")


def follow(place, draw, ranks, sets, then, log):
    """What is drawn to be done with a job that ran."""
    seconds, place.log = place.last, log
    if then == "stops":
        stopped_and_resumed(place, draw, "stops", ranks, sets, seconds, False)
        held_to_the_bit(place, "stops", sets)
    elif then == "signal":
        stopped_and_resumed(place, draw, "signal", ranks, sets, seconds, True)
        held_to_the_bit(place, "signal", sets)
    elif then == "elsewhere":
        steps = max(2, sets["job.steps"])
        own = dict(sets) | {"job.steps": steps, "checkpoint.max_hours": 1e-9}
        for stop in range(draw.choice([1, 2, 3])):
            done = place.run("elsewhere", ranks, own)
            if done.returncode == 0:
                break
            ended(done, 85, f"elsewhere, stop {stop}")
        own.pop("checkpoint.max_hours")
        other = draw.choice([n for n in (1, 2, 4) if n != ranks or draw.random() < 0.3] or [1])
        for key in [key for key in own if key.startswith("mesh.") or key in ("rollout.tensor", "rollout.data", "gradient.order", "gradient.chunks")]:
            own.pop(key)
        kept = dict(own)
        if own["job.device"] == "gpu" and draw.random() < 0.5:
            own["job.device"] = "cpu"
            own["job.products"] = "exact"
            own.pop("job.collectives", None)
        layout(draw, other, own["job.kind"], own["job.device"], own)
        done = place.run("elsewhere", other, own)
        if done.returncode == 2 and refused(done):
            log["refused"].append((place.dir.name, done.stderr[done.stderr.find("error: "):].splitlines()[:2]))
            done = place.run("elsewhere", 1, kept)
        ended(done, 0, "elsewhere, resumed")
        # The first run's plan may be another's.
        checked(place, "elsewhere", subprocess.CompletedProcess("", 0, "", ""), own | {"ppo.old_logprobs": "rollout", "job.products": "auto"}, log)
    elif then == "indifferent":
        own = dict(sets)
        own["rollout.batch_max"] = draw.choice([1, 2, 4, 256])
        own["rollout.prefill_tokens_max"] = draw.choice([1, 7, 2048])
        own["rollout.graphs"] = not own.get("rollout.graphs", True)
        own.pop("rollout.kv_bytes_max", None)
        if draw.random() < 0.5 and own["job.device"] == "gpu":
            own["mesh.offload"] = [] if own.get("mesh.offload") else ["optimizer", "roles"]
        ended(place.run("indifferent", ranks, own), 0, "indifferent")
        if sets.get("job.products") not in ("fast", "auto"):
            same(place, "indifferent", "whole")
    elif then in ("one", "cpu"):
        own = {k: v for k, v in sets.items() if not k.startswith("mesh.") and k not in ("rollout.tensor", "rollout.data")}
        if then == "cpu":
            own |= {"job.device": "cpu", "job.products": "exact", "model.dtype": "f32"}
            own.pop("job.collectives", None)
            if "rollout.kv_bytes_max" in own:
                own["rollout.kv_bytes_max"] *= 2  # the same pages in f32
        ended(place.run(then, 1, own), 0, then)
        if sets["job.kind"] == "sft":
            near(place, "whole", then, ["loss", "grad_norm"], 0.03, 0.01)
        else:
            near(place, "whole", then, ["entropy"], 0.05, 0.05)
            # Some tokens are drawn otherwise.
            near(place, "whole", then, ["grad_norm_actor", "grad_norm_critic", "value_loss"], 0.5, 0.2)


def refused(done):
    text = done.stderr
    return re.search("^error: ", text, re.M) and "step 0, " not in text and "step 1, " not in text and "panicked" not in text and bool(KEY.search(text) or OF_A_MODEL.search(text))


def one(number, args, log):
    draw, ranks, config, sets, then = job(args.seed, number, args)
    name = f"{args.seed}-{number}"
    words = f"{name}: {ranks} x {sets['job.kind']} {config['model_type']} {config['head_dim']} {then}"
    place = Place(args, name, ranks, config)
    try:
        done = place.run("whole", ranks, sets)
        if done.returncode == 2 and refused(done):
            log["refused"].append((name, done.stderr[done.stderr.find("error: "):].splitlines()[:2]))
            kind = "refused"
        else:
            ended(done, 0, "whole")
            checked(place, "whole", done, sets, log)
            follow(place, draw, ranks, sets, then, log)
            kind = "passed"
    except Failed as why:
        kind = "FAILED"
        (place.dir / "why").write_text(str(why))
        print(f"{words}: {why}", flush=True)
    log[kind] += [] if kind == "refused" else [name]
    log["counts"][(sets["job.kind"], ranks, then, kind)] += 1
    print(f"{words}: {kind}, {place.seconds:.1f} s", flush=True)
    if kind != "FAILED" and not args.keep:
        shutil.rmtree(place.dir)


def prepare(args):
    root = Path(args.work)
    root.mkdir(parents=True, exist_ok=True)
    if (root / "tokenizer").exists():
        return
    for words in ("corpus --rows 200 --seed 1 --out rows.jsonl --digits 2", "tokenizer rows.jsonl --vocabulary 264 --out tokenizer"):
        subprocess.run([args.binary] + words.split(), cwd=root, check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--work", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--device", default="gpu", choices=["gpu", "cpu"])
    parser.add_argument("--kind", choices=["ppo", "sft"])
    parser.add_argument("--plan", action="store_true", help="only tell where plan and run are apart")
    parser.add_argument("--keep", action="store_true")
    args = parser.parse_args()
    args.binary = str(Path(args.binary).resolve())
    prepare(args)
    log = {"refused": [], "passed": [], "FAILED": [], "plan": [], "stops": 0, "apart": [], "counts": Counter()}
    for number in range(args.first, args.first + args.count):
        one(number, args, log)
    print("\nrefused:")
    for name, lines in log["refused"]:
        print(f"  {name}: {' | '.join(lines)}")
    for (kind, ranks, then, how), count in sorted(log["counts"].items()):
        print(f"  {kind} on {ranks}, {then}: {count} {how}")
    for words in log["apart"]:
        print(f"  plan: {words}")
    if log["plan"]:
        worst = sorted(log["plan"])
        print(f"plan beside measured: {100 * worst[0][0]:.1f} % ({worst[0][1]}) to {100 * worst[-1][0]:.1f} % ({worst[-1][1]})")
    print(f"{len(log['passed'])} passed, {len(log['refused'])} refused, {len(log['FAILED'])} failed, {log['stops']} stops: {' '.join(log['FAILED'])}")
    sys.exit(bool(log["FAILED"]))


if __name__ == "__main__":
    main()
