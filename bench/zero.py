"""Makes the table of zero.sh: zero.py FOLDER CSV "RANKS" "STAGES"."""

import csv
import json
import sys
from pathlib import Path

MIB = 1 << 20


def measured(run: Path):
    """Peak bytes of the fullest rank: resident, and of tensors."""
    last = json.loads(run.joinpath("metrics.jsonl").read_text().splitlines()[-1])
    return last["memory_peak_bytes"], last["memory_arena_peak_bytes"]


def predicted(plan: Path):
    memory = json.loads(plan.read_text())["chosen"]["placed"][0]["memory"]
    return memory["peak_bytes"], memory["resident_bytes"]


def main():
    folder, table, ranks, stages = Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(), sys.argv[4].split()
    print("| ranks | stage | predicted tensors | measured tensors | off | predicted resident | measured resident | off |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    with open(table, "w", newline="") as file:
        out = csv.writer(file)
        names = ["predicted_tensors", "measured_tensors", "predicted_resident", "measured_resident", "baseline"]
        out.writerow(["ranks", "stage"] + [name + "_bytes" for name in names])
        for n in ranks:
            resident, tensors = measured(folder / f"base-{n}")
            baseline = resident - tensors
            for stage in stages:
                plan_tensors, plan_resident = predicted(folder / f"plan-{n}-{stage}.json")
                resident, tensors = measured(folder / f"run-{n}-{stage}")
                resident -= baseline
                out.writerow([n, stage, plan_tensors, int(tensors), plan_resident, int(resident), int(baseline)])
                cells = [f"{n}", stage]
                for expected, found in [(plan_tensors, tensors), (plan_resident, resident)]:
                    cells += [f"{expected / MIB:.0f}", f"{found / MIB:.0f}", f"{100 * (expected / found - 1):+.1f} %"]
                print("| " + " | ".join(cells) + " |")


main()
