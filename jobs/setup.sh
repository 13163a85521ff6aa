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

# The library where bindgen looks for it, and the headers of its compiler, which the library's own package lacks. libclang-cpp,
# which comes with LLVM's own packages, is another library.
has_libclang() {
  local dir dirs
  [ -z "${LIBCLANG_PATH:-}" ] || return 0
  IFS=: read -ra dirs <<<"${LD_LIBRARY_PATH:-}"
  dirs+=("$(llvm-config --libdir 2>/dev/null || true)" '/usr/lib/llvm-*/lib' '/usr/lib/*-linux-gnu' /usr/lib64)
  for dir in "${dirs[@]}"; do
    [ -n "$dir" ] || continue
    compgen -G "$dir/libclang.so*" >/dev/null || compgen -G "$dir/libclang-[0-9]*.so*" >/dev/null || continue
    compgen -G "$dir/clang/*/include/stddef.h" >/dev/null && return 0
    compgen -G '/usr/lib*/clang/*/include/stddef.h' >/dev/null && return 0
    compgen -G '/usr/lib/llvm-*/lib/clang/*/include/stddef.h' >/dev/null && return 0
    [ -f "$(clang -print-resource-dir 2>/dev/null || true)/include/stddef.h" ] && return 0
  done
  return 1
}

# apt_install PACKAGES: with apt, as root; fails where that is not possible.
apt_install() {
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
  echo "installing with apt: $*" >&2
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

ensure_packages() {
  local missing
  read -ra missing <<<"$(packages_missing | tr '\n' ' ')"
  [ "${#missing[@]}" != 0 ] || return 0
  apt_install "${missing[@]}" && return 0
  echo "error: these packages are missing: ${missing[*]}" >&2
  echo "hint: sudo apt-get install ${missing[*]}   (or the same under your system's names, e.g. \`module load openmpi cmake llvm\`)" >&2
  exit 2
}

ensure_rust() {
  local needs has
  [ -x "$HOME/.cargo/bin/cargo" ] && PATH="$HOME/.cargo/bin:$PATH"
  needs=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' "$(dirname "${BASH_SOURCE[0]}")/../Cargo.toml")
  if ! command -v cargo >/dev/null; then
    echo "error: Rust (cargo) is missing" >&2
  elif ! has=$(rustc --version) || ! has=$(cut -d' ' -f2 <<<"$has") || [ -z "$has" ]; then
    echo "error: cargo is there, but rustc does not run" >&2
  elif [ "$(printf '%s\n' "$needs" "$has" | sort -V | head -n 1)" != "$needs" ]; then
    echo "error: $(command -v rustc) is Rust $has, and the build needs $needs or newer" >&2
  else
    return 0
  fi
  echo "hint: install Rust $needs or newer with rustup (https://rustup.rs), or update it: rustup update stable" >&2
  exit 2
}

# from_pypi DIR PACKAGES: installed into DIR, whole or not at all.
from_pypi() {
  local dir=$1
  shift
  if ! python3 -m pip --version >/dev/null 2>&1 && ! apt_install python3-pip; then
    echo "error: CUDA's compilers come by pip, which $(command -v python3 || echo python3) lacks" >&2
    echo "hint: sudo apt-get install python3-pip, or name an nvcc with RLHF_NVCC" >&2
    exit 2
  fi
  rm -rf "$dir.partial"
  mkdir -p "$(dirname "$dir")"
  # By the environment, because pip before 22.1 (Ubuntu 22.04) knows no such option.
  PIP_ROOT_USER_ACTION=ignore python3 -m pip install -q --no-deps --only-binary=:all: --disable-pip-version-check \
    --target "$dir.partial" "$@"
  rm -rf "$dir"
  mv "$dir.partial" "$dir"
}

# nvcc and NVRTC, for builds that must compile every kernel: about 330 MB, into the user's cache. The newest NVRTC that an old
# driver (535) still takes the cubins of is 12.2.
ensure_nvcc() {
  local dir
  [ -z "${RLHF_NVCC:-}" ] || return 0
  dir=${XDG_CACHE_HOME:-$HOME/.cache}/rlhf-hpc/nvcc-13.0.88
  if [ ! -x "$dir/nvidia/cu13/bin/nvcc" ] || [ ! -f "$dir/nvidia/cuda_nvrtc/lib/libnvrtc.so.12" ]; then
    from_pypi "$dir" nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 \
      nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 nvidia-cuda-nvrtc-cu12==12.2.140
  fi
  export RLHF_NVCC=$dir/nvidia/cu13/bin/nvcc RLHF_NVRTC=$dir/nvidia/cuda_nvrtc/lib/libnvrtc.so.12
}

# A browser, for the tests that look at a report.
ensure_chromium() {
  [ -z "${RLHF_CHROMIUM:-}" ] || return 0
  command -v chromium >/dev/null || apt_install chromium || {
    echo "error: chromium is missing, with which the tests look at a report" >&2
    echo "hint: sudo apt-get install chromium, or name a browser of its kind with RLHF_CHROMIUM" >&2
    exit 2
  }
  export RLHF_CHROMIUM=chromium
}

# Builds the release binary and sets RLHF_HPC to its path.
build() {
  ensure_packages
  ensure_rust
  (cd "$1" && cargo build --release --locked)
  RLHF_HPC=$(cd "$1" && realpath "${CARGO_TARGET_DIR:-target}")/release/rlhf-hpc
}

# binary ROOT: sets RLHF_HPC to the binary that a release archive has, or builds it.
binary() {
  if [ -x "$1/bin/rlhf-hpc" ]; then RLHF_HPC=$1/bin/rlhf-hpc; else build "$1"; fi
}

# enter ROOT HERE: finds the binary, and goes to HERE, whose folder `work` has what is made; FRESH=1 makes it anew.
enter() {
  binary "$1"
  cd "$2"
  [ -z "${FRESH:-}" ] || rm -rf work
  mkdir -p work
}

say() { printf '\n== %s\n' "$*"; }

# launch N ARGS...: the binary under mpirun on N ranks of this machine.
launch() {
  local ranks=$1
  shift
  # Open MPI counts cores, which may be fewer than the threads that nproc counts.
  local flags=(--oversubscribe --bind-to none -n "$ranks")
  [ "$(id -u)" != 0 ] || flags+=(--allow-run-as-root)
  mpirun "${flags[@]}" "$RLHF_HPC" "$@"
}
