#!/usr/bin/env python3
"""Sends the metrics of a run to Weights & Biases or MLflow.

    jobs/tools/metrics_to.py wandb runs/first --project rlhf
    jobs/tools/metrics_to.py mlflow runs/first --project rlhf --follow

DIR/metrics.jsonl becomes the metrics, with the steps of the run, and DIR/config.resolved.toml the configuration. --follow goes
on while the run does, also over its stops and resumes, and ends after its last step. Nothing is written into DIR.

The run needs neither service: this is a process of its own, on any machine that sees DIR. It needs Python 3.11 (or tomli), and
wandb or mlflow, which takes its account and server from its own environment variables (WANDB_API_KEY, MLFLOW_TRACKING_URI).
"""

import argparse
import json
import sys
import time
from pathlib import Path


def configuration(run):
    """The keys of the job with their values, as `optim.actor.lr`."""
    try:
        import tomllib
    except ImportError:
        import tomli as tomllib
    text = (run / "config.resolved.toml").read_text(encoding="utf-8")
    flat = {}

    def add(table, path):
        for key, value in table.items():
            if isinstance(value, dict):
                add(value, f"{path}{key}.")
            else:
                flat[f"{path}{key}"] = value

    add(tomllib.loads(text), "")
    return flat


def lines(run):
    """The whole lines of metrics.jsonl as (step, {key: number}). A value that is not finite is null there, and left out."""
    try:
        text = (run / "metrics.jsonl").read_bytes()
    except FileNotFoundError:
        return
    # The last one may be half written.
    for line in text[: text.rfind(b"\n") + 1].splitlines():
        try:
            values = json.loads(line)
            step = values.pop("step")
        except (ValueError, KeyError, AttributeError, TypeError):
            continue  # The run tells of damaged lines itself.
        numbers = {key: value for key, value in values.items() if type(value) in (int, float)}
        if type(step) is int:
            yield step, numbers


class Wandb:
    def __init__(self, args, config):
        import wandb

        self.run = wandb.init(project=args.project, name=args.name, id=args.id, resume="allow", config=config)
        # What a continued run has already: wandb takes no step twice.
        self.first = self.run.step if args.id else 0
        self.id = self.run.id

    def send(self, step, numbers):
        if step >= self.first:
            self.run.log(numbers, step=step)

    def end(self):
        self.run.finish()


class Mlflow:
    TAG = "rlhf_hpc.last_step"

    def __init__(self, args, config):
        import mlflow

        self.mlflow = mlflow
        mlflow.set_experiment(args.project)
        run = mlflow.start_run(run_id=args.id, run_name=args.name)
        self.id = run.info.run_id
        self.first = int(run.data.tags.get(self.TAG, -1)) + 1
        if not args.id:
            params = [(key, str(value)[:500]) for key, value in config.items()]
            # The service takes 100 at a time, and 500 characters of each.
            for begin in range(0, len(params), 100):
                mlflow.log_params(dict(params[begin : begin + 100]))

    def send(self, step, numbers):
        if step >= self.first:
            self.mlflow.log_metrics(numbers, step=step)
            self.mlflow.set_tag(self.TAG, step)

    def end(self):
        self.mlflow.end_run()


def send_new(run, service, sent):
    """Sends what was not sent yet; `sent` has the keys of each step. A run that resumes writes steps again: they are the same.
    The numbers of an evaluation come into the line of their step later than the others."""
    latest = max(sent, default=-1)
    for step, numbers in lines(run):
        new = {key: value for key, value in numbers.items() if key not in sent.get(step, ())}
        if new and (step in sent or step > latest):
            service.send(step, new)
            sent.setdefault(step, set()).update(new)
            latest = max(latest, step)


def is_over(config, sent):
    """Whether the last step is there, with its evaluation where there is one."""
    last = sent.get(config["job.steps"])
    is_evaluated = config.get("eval.every_steps", 0) == 0 or any(key.startswith("eval_") for key in last or ())
    return last is not None and is_evaluated


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("service", choices=["wandb", "mlflow"])
    parser.add_argument("run", type=Path, help="directory of the run (job.dir)")
    parser.add_argument("--project", default="rlhf-hpc", help="project of wandb, experiment of MLflow")
    parser.add_argument("--name", help="name of the run there (default: job.name)")
    parser.add_argument("--id", help="continue this run there, which an earlier call named")
    parser.add_argument("--follow", action="store_true", help="go on until the run's last step")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two looks (default: 10)")
    args = parser.parse_args()
    while args.follow and not (args.run / "config.resolved.toml").exists():
        time.sleep(args.every)
    try:
        config = configuration(args.run)
        args.name = args.name or config["job.name"]
        service = (Wandb if args.service == "wandb" else Mlflow)(args, config)
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}\nhint: python3 -m pip install {error.name}")
    except OSError as error:
        sys.exit(f"error: {error}\nhint: give the directory of a run (job.dir) that has started")
    sent = {}
    try:
        send_new(args.run, service, sent)
        while args.follow and not is_over(config, sent):
            time.sleep(args.every)
            send_new(args.run, service, sent)
    except KeyboardInterrupt:
        pass
    finally:
        service.end()
    print(f"{len(sent)} steps sent; --id {service.id} continues there", file=sys.stderr)


if __name__ == "__main__":
    main()
