# shellcheck shell=bash
# Sourced by jobs/quickstart/run.sh and tests/run.sh: installs what the build needs, builds the binary, and gives `launch`.
# As root on Debian or Ubuntu it installs packages with apt; otherwise it says which are missing and stops.

packages_missing() {
  command -v mpirun >/dev/null && command -v mpicc >/dev/null || echo openmpi-bin libopenmpi-dev
  command -v cmake >/dev/null || echo cmake
  command -v cc >/dev/null && command -v c++ >/dev/null && command -v make >/dev/null || echo build-essential
  command -v pkg-config >/dev/null || echo pkg-config
  command -v python3 >/dev/null || echo python3
  has_libclang || echo libclang-dev
}

# libclang-cpp, which comes with LLVM's own packages, is another library.
has_libclang() {
  local pattern
  [ -z "${LIBCLANG_PATH:-}" ] || return 0
  for pattern in '/usr/lib/llvm-*/lib' '/usr/lib/*-linux-gnu' '/usr/lib64'; do
    compgen -G "$pattern/libclang.so*" >/dev/null && return 0
    compgen -G "$pattern/libclang-[0-9]*.so*" >/dev/null && return 0
  done
  return 1
}

ensure_packages() {
  local missing
  missing=$(packages_missing | tr '\n' ' ')
  [ -n "${missing// /}" ] || return 0
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing with apt: $missing" >&2
    apt-get update -qq
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
  else
    echo "error: these packages are missing: $missing" >&2
    echo "hint: sudo apt-get install $missing   (or the same under your system's names, e.g. \`module load openmpi cmake llvm\`)" >&2
    exit 2
  fi
}

ensure_rust() {
  [ -x "$HOME/.cargo/bin/cargo" ] && PATH="$HOME/.cargo/bin:$PATH"
  command -v cargo >/dev/null && return 0
  echo "error: Rust (cargo) is missing" >&2
  echo "hint: install it with rustup, version 1.90 or newer" >&2
  exit 2
}

# nvcc and NVRTC from PyPI, for builds that must compile every kernel: about 330 MB, into the user's cache. The newest NVRTC that
# an old driver (535) still takes the cubins of is 12.2.
ensure_nvcc() {
  local dir
  [ -z "${RLHF_NVCC:-}" ] || return 0
  dir=${XDG_CACHE_HOME:-$HOME/.cache}/rlhf-hpc/nvcc-13.0.88
  if [ ! -x "$dir/nvidia/cu13/bin/nvcc" ] || [ ! -f "$dir/nvidia/cuda_nvrtc/lib/libnvrtc.so.12" ]; then
    if ! python3 -m pip --version >/dev/null 2>&1 && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
      DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-pip >/dev/null
    fi
    rm -rf "$dir.partial"
    mkdir -p "$(dirname "$dir")"
    python3 -m pip install -q --no-deps --only-binary=:all: --disable-pip-version-check --root-user-action=ignore \
      --target "$dir.partial" nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 \
      nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 nvidia-cuda-nvrtc-cu12==12.2.140
    rm -rf "$dir"
    mv "$dir.partial" "$dir"
  fi
  export RLHF_NVCC=$dir/nvidia/cu13/bin/nvcc RLHF_NVRTC=$dir/nvidia/cuda_nvrtc/lib/libnvrtc.so.12
}

# Builds the release binary and sets RLHF_HPC to its path.
build() {
  ensure_packages
  ensure_rust
  (cd "$1" && cargo build --release --locked)
  RLHF_HPC=${CARGO_TARGET_DIR:-$1/target}/release/rlhf-hpc
}

# launch N ARGS...: the binary under mpirun on N ranks of this machine.
launch() {
  local ranks=$1
  shift
  local flags=(--bind-to none -n "$ranks")
  [ "$(id -u)" != 0 ] || flags+=(--allow-run-as-root)
  [ "$ranks" -le "$(nproc)" ] || flags+=(--oversubscribe)
  mpirun "${flags[@]}" "$RLHF_HPC" "$@"
}
