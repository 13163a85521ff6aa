#!/usr/bin/env bash
# Compares adapters (LoRA) with full training on this machine's CPU, on the questions of the quickstart and the pairs of
# jobs/rlhf, both of which it runs first if their results are missing:
#   PPO: all weights; adapters of actor and critic on one base, with three learning rates; the same on a base in nf4.
#   DPO and reward model: all weights, and adapters.
# Usage: jobs/lora/run.sh     (FRESH=1 starts over)
# Run the same command again to resume. All results are in jobs/lora/work.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
. "$root/jobs/setup.sh"
enter "$root" "$here"
quickstart=../quickstart rlhf=../rlhf

# job NAME JOB.toml [key.path=value ...]: runs the job in work/NAME unless it is finished.
job() {
  local name=$1 file=$2
  shift 2
  [ -d "work/$name/export" ] || launch 2 "$file" job.dir="work/$name" "$@"
}

[ -f $quickstart/work/sft/export/model.safetensors ] || FRESH='' $quickstart/run.sh
[ -f $rlhf/work/rm/export/model.safetensors ] || FRESH='' $rlhf/run.sh

adapters="lora.rank=16 lora.alpha=32"
say "PPO of all weights"
job ppo-full $quickstart/ppo.toml
for rate in 3e-4 1e-3 2e-3; do
  say "PPO of adapters with a learning rate of $rate"
  # shellcheck disable=SC2086
  job "ppo-lora-$rate" $quickstart/ppo.toml $adapters optim.actor.lr=$rate optim.critic.lr=3e-3
done
for rate in 3e-4 1e-3 2e-3; do
  say "PPO of adapters on a base in nf4 with a learning rate of $rate"
  # shellcheck disable=SC2086
  job "ppo-nf4-$rate" $quickstart/ppo.toml $adapters optim.actor.lr=$rate optim.critic.lr=3e-3 model.quantize=nf4
done
say "a reward model and DPO"
# shellcheck disable=SC2086
job rm-lora $rlhf/reward-model.toml $adapters optim.actor.lr=2e-3
# shellcheck disable=SC2086
job dpo-lora $rlhf/dpo.toml $adapters optim.actor.lr=1e-3
python3 results.py work $rlhf/work
