# shellcheck shell=bash
# Sourced by the batch scripts in this folder, which ask Slurm for the resources of their jobs. It starts the ranks, passes
# Slurm's signal on, and puts the job back into the queue.
#
#   run_job JOB.toml [key.path=value ...]
#
# RLHF_JOB names another job file, RLHF_HPC another binary. RLHF_LAUNCHER=srun uses srun instead of mpirun.

# Sets the environment of a job on GPUs. Variables that are already set stay as they are. The batch script requests GPUs per
# node, unbound: each rank sees all GPUs of its node and uses its own. --gpus-per-task would hide the GPUs from each other,
# and NCCL could not connect two of a node. With mpirun, the task is its daemon, so all ranks of a node would share one GPU.
for_gpus() {
  # MPI only gets host memory. UCX and Open MPI built with CUDA would query the driver for the type of each buffer, and open
  # the GPU transports in every rank.
  export UCX_TLS=${UCX_TLS-^cuda} OMPI_MCA_opal_cuda_support=${OMPI_MCA_opal_cuda_support-0}
  # The program uses six streams, and NCCL has its own. With the default of 8 queues, two streams may share one. A collective
  # then waits for an unrelated kernel. The maximum is 32.
  export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS-32}
  # Each channel between two GPUs has its own buffers. Without a limit, the first exchange among 8 GPUs takes up to 4 GB of
  # each (NVIDIA/nccl#1685), which the plan does not count.
  export NCCL_MAX_P2P_NCHANNELS=${NCCL_MAX_P2P_NCHANNELS-4}
}

# Sets the command line of the launcher. Both launchers get ranks and hosts from Slurm.
launcher() {
  case ${RLHF_LAUNCHER:-mpirun} in
    # Ranks are not bound to single cores. Each shares the cores that it may use with the other ranks of its host.
    # -q suppresses mpirun's own message about a nonzero exit code.
    mpirun)
      command=(mpirun -q --bind-to none -n "${SLURM_NTASKS:-16}")
      [ "$(id -u)" != 0 ] || command+=(--allow-run-as-root)
      ;;
    # Since 22.05, srun does not inherit the cores per rank from sbatch. If a rank dies, the others end, too.
    srun) command=(srun --mpi=pmix --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}") ;;
    *)
      echo "error: RLHF_LAUNCHER must be mpirun or srun (got $RLHF_LAUNCHER)" >&2
      exit 2
      ;;
  esac
}

# Finds the binary in the source tree or in a release archive, and checks that it and the job file exist.
find_binary() {
  local root file
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  binary=$root/target/release/rlhf-hpc
  [ ! -e "$root/bin/rlhf-hpc" ] || binary=$root/bin/rlhf-hpc
  binary=${RLHF_HPC:-$binary}
  for file in "$binary" "$job"; do
    [ -e "$file" ] && continue
    echo "error: $file does not exist" >&2
    echo "hint: set RLHF_HPC to the binary and RLHF_JOB to the job file" >&2
    exit 2
  done
}

# Before the time limit (--signal), Slurm sends USR1 to the batch script, which passes it on to all ranks. The run stops at
# the next boundary, saves a checkpoint and exits with code 85. The job then goes back into the queue, and its next start
# resumes.
run_job() {
  local job=${RLHF_JOB:-$1} binary command pid interrupted=0 status code=1
  shift
  find_binary
  launcher
  echo "job ${SLURM_JOB_ID:-none}, start $((${SLURM_RESTART_COUNT:-0} + 1)), nodes ${SLURM_JOB_NODELIST:-$HOSTNAME}, $(date '+%F %T')"
  "${command[@]}" "$binary" run "$job" "$@" &
  pid=$!
  trap 'interrupted=1; echo "signal from Slurm: all ranks save and stop"; kill -USR1 "$pid" 2>/dev/null' USR1
  while :; do
    interrupted=0
    wait "$pid"
    status=$?
    # 127: the launcher had already ended when the signal arrived.
    [ "$status" = 127 ] || code=$status
    if [ "$interrupted" = 0 ] || [ "$status" = 127 ]; then break; fi
  done
  if [ "$code" = 85 ] && [ -n "${SLURM_JOB_ID:-}" ]; then
    echo "stopped with a checkpoint: job $SLURM_JOB_ID goes back to the queue"
    scontrol requeue "$SLURM_JOB_ID"
  fi
  exit "$code"
}
