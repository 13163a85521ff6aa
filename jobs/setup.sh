# shellcheck shell=bash
# Sourced by jobs/quickstart/run.sh and tests/run.sh. It installs the packages that the build needs, builds the binary, and
# defines `launch`. As root on Debian or Ubuntu it installs packages with apt. Otherwise it lists the missing packages and stops.

packages_missing() {
  command -v mpirun >/dev/null && command -v mpicc >/dev/null || echo openmpi-bin libopenmpi-dev
  command -v cmake >/dev/null || echo cmake
  command -v cc >/dev/null && command -v c++ >/dev/null && command -v make >/dev/null || echo build-essential
  command -v pkg-config >/dev/null || echo pkg-config
  command -v python3 >/dev/null || echo python3
  has_libclang || echo libclang-dev
}

# Checks that libclang is in a folder that bindgen searches, with the headers of its compiler, which the package of the
# library does not contain. libclang-cpp, which comes with LLVM's own packages, is another library.
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

# apt_install PACKAGES: installs packages with apt. It fails without apt or without root.
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
  echo "hint: sudo apt-get install ${missing[*]}   (or their names on your system, e.g. \`module load openmpi cmake llvm\`)" >&2
  exit 2
}

ensure_rust() {
  local needs has
  [ -x "$HOME/.cargo/bin/cargo" ] && PATH="$HOME/.cargo/bin:$PATH"
  needs=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' "$(dirname "${BASH_SOURCE[0]}")/../Cargo.toml")
  if ! command -v cargo >/dev/null; then
    echo "error: Rust (cargo) is missing" >&2
  elif ! has=$(rustc --version) || ! has=$(cut -d' ' -f2 <<<"$has") || [ -z "$has" ]; then
    echo "error: cargo is installed, but rustc does not run" >&2
  elif [ "$(printf '%s\n' "$needs" "$has" | sort -V | head -n 1)" != "$needs" ]; then
    echo "error: the build needs Rust $needs or newer ($(command -v rustc) is $has)" >&2
  else
    return 0
  fi
  echo "hint: install Rust $needs or newer with rustup (https://rustup.rs), or update it with rustup update stable" >&2
  exit 2
}

# from_pypi DIR PACKAGES: installs packages of PyPI into DIR, completely or not at all.
from_pypi() {
  local dir=$1
  shift
  if ! python3 -m pip --version >/dev/null 2>&1 && ! apt_install python3-pip; then
    echo "error: CUDA's compilers are installed with pip, and $(command -v python3 || echo python3) has no pip" >&2
    echo "hint: sudo apt-get install python3-pip, or set RLHF_NVCC to an nvcc" >&2
    exit 2
  fi
  rm -rf "$dir.partial"
  mkdir -p "$(dirname "$dir")"
  # An environment variable, because pip before 22.1 (Ubuntu 22.04) has no such option.
  PIP_ROOT_USER_ACTION=ignore python3 -m pip install -q --no-deps --only-binary=:all: --disable-pip-version-check \
    --target "$dir.partial" "$@"
  rm -rf "$dir"
  mv "$dir.partial" "$dir"
}

# Installs nvcc and NVRTC for builds that must compile every kernel: about 330 MB, in the user's cache. NVRTC 12.2 is the
# newest one whose cubins an old driver (535) still loads.
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

# Installs a browser for the tests that open a report.
ensure_chromium() {
  [ -z "${RLHF_CHROMIUM:-}" ] || return 0
  command -v chromium >/dev/null || apt_install chromium || {
    echo "error: chromium is missing; the tests open a report with it" >&2
    echo "hint: sudo apt-get install chromium, or set RLHF_CHROMIUM to a browser based on it" >&2
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

# binary ROOT: sets RLHF_HPC to the path of the binary: the one that it names already, that of a release archive, or a new build.
binary() {
  if [ -n "${RLHF_HPC:-}" ]; then
    [ -f "$RLHF_HPC" ] && [ -x "$RLHF_HPC" ] || { echo "error: RLHF_HPC must name the binary (got $RLHF_HPC)" >&2; exit 2; }
    RLHF_HPC=$(realpath "$RLHF_HPC")
  elif [ -x "$1/bin/rlhf-hpc" ]; then
    RLHF_HPC=$1/bin/rlhf-hpc
  else
    build "$1"
  fi
}

# enter ROOT HERE: finds the binary and changes to HERE. Results go to its folder `work`. FRESH=1 removes them first.
enter() {
  binary "$1"
  cd "$2"
  [ -z "${FRESH:-}" ] || rm -rf work
  mkdir -p work
}

say() { printf '\n== %s\n' "$*"; }

# launch N ARGS...: runs the binary under mpirun on N ranks of this machine.
launch() {
  local ranks=$1
  shift
  # Open MPI counts cores, which may be fewer than the threads that nproc counts.
  local flags=(--oversubscribe --bind-to none -n "$ranks")
  [ "$(id -u)" != 0 ] || flags+=(--allow-run-as-root)
  mpirun "${flags[@]}" "$RLHF_HPC" "$@"
}
