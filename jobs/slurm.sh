# shellcheck shell=bash
# Sourced by the batch scripts in this folder, which ask Slurm for the resources of their jobs. It starts the ranks, passes
# Slurm's signal on, and puts the job back into the queue. If a signal ends a rank, the last line of the log names it.
#
#   run_job JOB.toml [key.path=value ...]
#
# RLHF_JOB names another job file, RLHF_HPC another binary. RLHF_LAUNCHER=srun uses srun instead of mpirun.

# Sets the environment of a job on GPUs. Variables that are already set stay as they are. The batch script requests GPUs per
# node, unbound: each rank sees all GPUs of its node and uses its own. --gpus-per-task would hide the GPUs from each other,
# and NCCL could not connect two of a node. With mpirun, the task is its daemon, so all ranks of a node would share one GPU.
for_gpus() {
  # MPI only gets host memory. UCX and Open MPI built with CUDA would query the driver for the type of each buffer, and open
  # the GPU transports in every rank. Open MPI 4 has one name for this switch, and Open MPI 5 another.
  export UCX_TLS=${UCX_TLS-^cuda}
  export OMPI_MCA_opal_cuda_support=${OMPI_MCA_opal_cuda_support-0} OMPI_MCA_accelerator=${OMPI_MCA_accelerator-null}
  # The program uses six streams, and NCCL has its own. With the default of 8 queues, two streams may share one. A collective
  # then waits for an unrelated kernel. The maximum is 32.
  export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS-32}
  # Each channel between two GPUs has its own buffers. Without a limit, the first exchange among 8 GPUs takes up to 4 GB of
  # each (NVIDIA/nccl#1685), which the plan does not count.
  export NCCL_MAX_P2P_NCHANNELS=${NCCL_MAX_P2P_NCHANNELS-4}
}

# Prints an error and its hint, and ends the job.
refuse() {
  printf 'error: %s\nhint: %s\n' "$1" "$2" >&2
  exit 2
}

# Sets the command line of the launcher. All launchers get ranks and hosts from Slurm.
launcher() {
  local tool=${RLHF_LAUNCHER:-mpirun}
  case $tool in
    mpirun | srun) ;;
    *) refuse "RLHF_LAUNCHER must be mpirun or srun (got $tool)" "unset RLHF_LAUNCHER to use mpirun" ;;
  esac
  type "$tool" >/dev/null 2>&1 || refuse "$tool is not on PATH" "load the MPI module, or set RLHF_LAUNCHER=srun"
  if [ "$tool" = srun ]; then
    # Since 22.05, srun does not inherit the cores per rank from sbatch. If a rank dies, the others end, too.
    command=(srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}")
    # The site's choice stays. An MPI that is neither Open MPI nor of MPICH's family uses the site's default.
    [ -n "${SLURM_MPI_TYPE:-}" ] || case $(ldd "$binary" 2>/dev/null) in
      *libmpi.so.40*) command+=(--mpi=pmix) ;;
      *libmpich.so.* | *libmpi.so.12*) command+=(--mpi=pmi2) ;;
    esac
    return
  fi
  command=(mpirun -n "${SLURM_NTASKS:-16}")
  case $(mpirun --version 2>&1) in
    *"Open MPI"*)
      # Ranks are not bound to single cores. Each shares the cores that it may use with the other ranks of its host. The
      # mpirun of MPICH does that without an option.
      command+=(--bind-to none)
      [ "$(id -u)" != 0 ] || command+=(--allow-run-as-root)
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
    [ -e "$file" ] || refuse "$file does not exist" "set RLHF_HPC to the binary and RLHF_JOB to the job file"
  done
}

# Prints the exit code of a failed run. If a signal ended a rank, also prints the rank, its host and the signal, and sets the
# exit code. The launcher named them in the file $1.
explain_failure() {
  local said who='a rank' signal='' reason=''
  local open_mpi='process rank ([0-9]+) with PID [0-9]+ on node ([^ ]+) exited on +signal ([0-9]+)'
  local mpich='= +(RANK ([0-9]+) )?PID ([0-9]+) RUNNING AT ([^ ]+) .*(\(signal |SIGNAL: )([0-9]+)'
  local srun='srun: error: ([^ ]+): tasks? ([0-9,-]+): (Killed|Out Of Memory|Segmentation fault|Bus error|Aborted)'
  said=$(tail -n 200 "$1" | tr '\n' ' ')
  if [[ $said =~ $open_mpi ]]; then
    who="rank ${BASH_REMATCH[1]} (${BASH_REMATCH[2]})" signal=${BASH_REMATCH[3]}
  elif [[ $said =~ $mpich ]]; then
    # Some releases of MPICH name only the process.
    who="${BASH_REMATCH[2]:+rank ${BASH_REMATCH[2]} (${BASH_REMATCH[4]})}" signal=${BASH_REMATCH[6]}
    who=${who:-"a rank (process ${BASH_REMATCH[3]} on ${BASH_REMATCH[4]})"}
  elif [[ $said =~ $srun ]]; then
    who="rank ${BASH_REMATCH[2]} (${BASH_REMATCH[1]})"
    case ${BASH_REMATCH[3]} in
      Killed | "Out Of Memory") signal=9 ;;
      Segmentation*) signal=11 ;;
      Bus*) signal=7 ;;
      Aborted) signal=6 ;;
    esac
  elif [ "$code" -gt 128 ] && kill -l "$((code - 128))" >/dev/null 2>&1; then
    signal=$((code - 128))
  fi
  if [ -z "$signal" ]; then
    echo "error: the run ended with exit code $code; its own message is above the launcher's"
    return
  fi
  code=$((128 + signal))
  [ "$signal" != 9 ] || reason='; often the memory limit of the job, see --mem and the log of the node'
  echo "error: $who was killed by signal $signal (SIG$(kill -l "$signal")), exit code $code$reason"
}

# Before the time limit (--signal), Slurm sends USR1 to the batch script, which passes it on to all ranks. Other batch
# systems send other signals. The run stops at the next boundary, saves a checkpoint and exits with code 85. The job then
# goes back into the queue, and its next start resumes.
run_job() {
  local job=${RLHF_JOB:-$1} binary command pid output copies interrupted=0 status code=1
  shift
  find_binary
  launcher
  echo "job ${SLURM_JOB_ID:-none}, start $((${SLURM_RESTART_COUNT:-0} + 1)), nodes ${SLURM_JOB_NODELIST:-$HOSTNAME}, $(date '+%F %T')"
  # The launcher's report of a dead rank is on standard output or on standard error. Both are also copied to a file.
  output=$(mktemp) || refuse "no temporary file can be created" "set TMPDIR to a writable folder"
  trap 'rm -f "$output"' EXIT
  exec 3> >(exec tee -i -a "$output")
  copies=$!
  exec 4> >(exec tee -i -a "$output" >&2)
  copies="$copies $!"
  "${command[@]}" "$binary" run "$job" "$@" >&3 2>&4 3>&- 4>&- &
  pid=$!
  exec 3>&- 4>&-
  trap 'interrupted=1; echo "signal to stop: all ranks save and stop"; kill -USR1 "$pid" 2>/dev/null' USR1 USR2 HUP XCPU
  while :; do
    interrupted=0
    wait "$pid"
    status=$?
    # 127: the launcher had already ended when the signal arrived.
    [ "$status" = 127 ] || code=$status
    if [ "$interrupted" = 0 ] || [ "$status" = 127 ]; then break; fi
  done
  # The copies of the last lines are still on their way.
  for _ in {1..50}; do
    # shellcheck disable=SC2086 # two processes
    kill -0 $copies 2>/dev/null || break
    sleep 0.1
  done
  [ "$code" = 0 ] || [ "$code" = 85 ] || explain_failure "$output"
  if [ "$code" = 85 ] && [ -n "${SLURM_JOB_ID:-}" ]; then
    echo "stopped with a checkpoint: job $SLURM_JOB_ID goes back to the queue"
    scontrol requeue "$SLURM_JOB_ID"
  fi
  exit "$code"
}
