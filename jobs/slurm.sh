# shellcheck shell=bash
# Sourced by the batch scripts beside it, which ask Slurm for what their jobs need: starts the ranks, passes Slurm's notice on, and
# puts the job back into the queue.
#
#   run_job JOB.toml [key.path=value ...]
#
# RLHF_JOB names another job file, RLHF_HPC another binary, RLHF_LAUNCHER=srun another launcher than mpirun.

# What a job on GPUs runs under, where nothing else was set. Its script asks for GPUs by the node, unbound: each rank sees all of its
# node and takes its own. --gpus-per-task hides them from each other, so that NCCL finds no way between two of a node; and the task
# of mpirun is its daemon, whose one GPU all ranks of the node would share.
for_gpus() {
  # MPI gets the host's memory alone. Built with CUDA, UCX and Open MPI would ask the driver what each buffer is, and open the
  # transports of GPUs in every rank.
  export UCX_TLS=${UCX_TLS-^cuda} OMPI_MCA_opal_cuda_support=${OMPI_MCA_opal_cuda_support-0}
  # Six streams and those of NCCL: of the default 8 queues two streams may share one, and then a collective waits behind a kernel
  # that it has nothing to do with. 32 is the most.
  export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS-32}
  # Each channel between two GPUs has buffers of its own: without a limit the first exchange among 8 GPUs takes up to 4 GB of each
  # (NVIDIA/nccl#1685), which no plan counts.
  export NCCL_MAX_P2P_NCHANNELS=${NCCL_MAX_P2P_NCHANNELS-4}
}

# The launcher's command line: both take ranks and hosts from Slurm.
launcher() {
  case ${RLHF_LAUNCHER:-mpirun} in
    # Ranks are not bound to single cores: each divides the cores that it may use with the other ranks of its host. -q leaves out
    # mpirun's own message about an exit code that is not 0.
    mpirun)
      command=(mpirun -q --bind-to none -n "${SLURM_NTASKS:-16}")
      [ "$(id -u)" != 0 ] || command+=(--allow-run-as-root)
      ;;
    # Since 22.05 srun does not take the cores of a rank from sbatch. A rank that dies ends the others.
    srun) command=(srun --mpi=pmix --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}") ;;
    *)
      echo "error: RLHF_LAUNCHER=$RLHF_LAUNCHER, needed mpirun or srun" >&2
      exit 2
      ;;
  esac
}

# From the source tree, or from a release archive.
find_binary() {
  local root file
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  binary=$root/target/release/rlhf-hpc
  [ ! -e "$root/bin/rlhf-hpc" ] || binary=$root/bin/rlhf-hpc
  binary=${RLHF_HPC:-$binary}
  for file in "$binary" "$job"; do
    [ -e "$file" ] && continue
    echo "error: $file does not exist" >&2
    echo "hint: RLHF_HPC names the binary, and RLHF_JOB the job file" >&2
    exit 2
  done
}

# Before the time limit (--signal) Slurm sends USR1 to the batch script, which passes it on to all ranks: the run stops at the next
# boundary, saves a checkpoint and exits 85. Then the job goes back into the queue, and its next start resumes.
run_job() {
  local job=${RLHF_JOB:-$1} binary command pid interrupted=0 status code=1
  shift
  find_binary
  launcher
  echo "job ${SLURM_JOB_ID:-none}, start $((${SLURM_RESTART_COUNT:-0} + 1)), nodes ${SLURM_JOB_NODELIST:-$HOSTNAME}, $(date '+%F %T')"
  "${command[@]}" "$binary" run "$job" "$@" &
  pid=$!
  trap 'interrupted=1; echo "notice from Slurm: asking all ranks to save and stop"; kill -USR1 "$pid" 2>/dev/null' USR1
  while :; do
    interrupted=0
    wait "$pid"
    status=$?
    # 127: the launcher was waited for already, just as the notice came in.
    [ "$status" = 127 ] || code=$status
    if [ "$interrupted" = 0 ] || [ "$status" = 127 ]; then break; fi
  done
  if [ "$code" = 85 ] && [ -n "${SLURM_JOB_ID:-}" ]; then
    echo "stopped with a checkpoint: job $SLURM_JOB_ID goes back to the queue"
    scontrol requeue "$SLURM_JOB_ID"
  fi
  exit "$code"
}
