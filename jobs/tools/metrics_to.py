#!/usr/bin/env python3
"""Sends the metrics of a run to Weights & Biases or MLflow.

    jobs/tools/metrics_to.py wandb runs/first --project rlhf
    jobs/tools/metrics_to.py mlflow runs/first --project rlhf --follow

DIR/metrics.jsonl gives the metrics and steps, DIR/config.resolved.toml the configuration. With --follow, this script
continues until the last step of the run, also across stops and resumes. It writes nothing into DIR.

It is a separate process on any machine that sees DIR, so the run itself needs neither service. It needs Python 3.11 (or
tomli), and wandb or mlflow. These read their account and server from their own environment variables (WANDB_API_KEY,
MLFLOW_TRACKING_URI).
"""

import argparse
import json
import sys
import time
from pathlib import Path


def configuration(run):
    """Returns the keys of the job with their values. A key is a full path such as `optim.actor.lr`."""
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
    """Yields the complete lines of metrics.jsonl as (step, {key: number}). Null values, which are not finite, are left out."""
    try:
        text = (run / "metrics.jsonl").read_bytes()
    except FileNotFoundError:
        return
    # The last line may be incomplete.
    for line in text[: text.rfind(b"\n") + 1].splitlines():
        try:
            values = json.loads(line)
            step = values.pop("step")
        except (ValueError, KeyError, AttributeError, TypeError):
            continue  # The run itself reports damaged lines.
        numbers = {key: value for key, value in values.items() if type(value) in (int, float)}
        if type(step) is int:
            yield step, numbers


class Wandb:
    def __init__(self, args, config):
        import wandb

        self.run = wandb.init(project=args.project, name=args.name, id=args.id, resume="allow", config=config)
        # The steps that a continued run already has: wandb accepts no step twice.
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
            # The service accepts 100 at a time, with up to 500 characters each.
            for begin in range(0, len(params), 100):
                mlflow.log_params(dict(params[begin : begin + 100]))

    def send(self, step, numbers):
        if step >= self.first:
            self.mlflow.log_metrics(numbers, step=step)
            self.mlflow.set_tag(self.TAG, step)

    def end(self):
        self.mlflow.end_run()


def send_new(run, service, sent):
    """Sends the metrics that were not sent yet. `sent` contains the keys of each step. A run that resumes writes the same steps
    again. The metrics of an evaluation are added to the line of their step later than the others."""
    latest = max(sent, default=-1)
    for step, numbers in lines(run):
        new = {key: value for key, value in numbers.items() if key not in sent.get(step, ())}
        if new and (step in sent or step > latest):
            service.send(step, new)
            sent.setdefault(step, set()).update(new)
            latest = max(latest, step)


def is_over(config, sent):
    """Returns whether the last step was sent, with its evaluation if the job evaluates."""
    last = sent.get(config["job.steps"])
    is_evaluated = config.get("eval.every_steps", 0) == 0 or any(key.startswith("eval_") for key in last or ())
    return last is not None and is_evaluated


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("service", choices=["wandb", "mlflow"])
    parser.add_argument("run", type=Path, help="directory of the run (job.dir)")
    parser.add_argument("--project", default="rlhf-hpc", help="project in wandb, or experiment in MLflow")
    parser.add_argument("--name", help="name of the run in the service (default: job.name)")
    parser.add_argument("--id", help="continue this run of the service, as printed by an earlier call")
    parser.add_argument("--follow", action="store_true", help="continue until the run's last step")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two reads (default: 10)")
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
        sys.exit(f"error: {error}\nhint: give the directory (job.dir) of a run that has started")
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
    print(f"{len(sent)} step{'' if len(sent) == 1 else 's'} sent; continue with --id {service.id}", file=sys.stderr)


if __name__ == "__main__":
    main()
