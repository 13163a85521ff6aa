#!/usr/bin/env bash
# Makes an archive that runs after unpacking, without an installation. It runs on any x86-64 Linux whose glibc is new enough
# for the binary built here, with the site's own Open MPI of the same major version as on this machine.
#
#   jobs/tools/release.sh [folder]          default: target/archive
#
# It contains bin/rlhf-hpc (stripped), jobs/, README.md with the requirements of the site, LICENSE and LICENSE-THIRD-PARTY.
# Its size is at most 60 MiB. RLHF_NVCC or RLHF_NVRTC names the compiler of the kernels, as for any build (README, "For
# GPUs"). bench/bundle.sh makes a folder for machines without MPI.
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD
out=${1:-target/archive}
most_mib=60
# shellcheck source=jobs/setup.sh
. jobs/setup.sh
build "$root"

# The libraries that the binary loads. Any other library would have to be installed at every site.
dynamic=$(readelf -d --wide "$RLHF_HPC")
needed=$(sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' <<<"$dynamic")
others=$(grep -vE '^(libmpi\.so\.|libc\.so\.|libm\.so\.|libgcc_s\.so\.|libpthread\.so\.|libdl\.so\.|librt\.so\.|ld-linux)' <<<"$needed" || true)
[ -z "$others" ] || { echo "error: the binary needs ${others//$'\n'/, }, which sites may lack" >&2; exit 1; }
if grep -qE '\((RPATH|RUNPATH)\)' <<<"$dynamic"; then
  echo "error: the binary searches for libraries in folders of this machine (RUNPATH)" >&2
  exit 1
fi
libmpi=$(grep '^libmpi\.so\.' <<<"$needed")
mpi=$(mpirun --version | sed -n '1s/.*) //p')
glibc=$(objdump -T "$RLHF_HPC" | grep -o 'GLIBC_[0-9.]*' | sort -Vu | tail -1)
glibc=${glibc#GLIBC_}

version=$("$RLHF_HPC" --version | cut -d' ' -f2)
name=rlhf-hpc-$version-linux-x86_64-openmpi${mpi%%.*}
mkdir -p "$out"
out=$(cd "$out" && pwd)
staged=$out/$name
rm -rf "$staged" "$out/$name.tar.gz"
mkdir -p "$staged/bin"
install -m 755 -s "$RLHF_HPC" "$staged/bin/rlhf-hpc"
tar -c --exclude=work --exclude=runs --exclude=__pycache__ jobs | tar -x -C "$staged"
cp LICENSE "$staged/"
cargo metadata --locked --format-version 1 --filter-platform x86_64-unknown-linux-gnu |
  python3 jobs/tools/third_party.py >"$staged/LICENSE-THIRD-PARTY"

{
  cat <<END_OF_HEAD
# rlhf-hpc $version for Linux on x86-64, with the site's Open MPI ${mpi%%.*}

No installation is needed: unpack the archive in a folder that all nodes see.

- \`bin/rlhf-hpc info\` shows the hardware and libraries of the machine. Run it alone and under the site's \`mpirun\`.
- \`bin/rlhf-hpc jobs\` lists recipes to start from.
- \`jobs/quickstart/run.sh\` trains a small model.

The site must have:

| library | part of |
|---|---|
| \`$libmpi\`, and \`mpirun\` | Open MPI ${mpi%%.*} (built against $mpi). Debian, Ubuntu: \`apt-get install openmpi-bin\`; Rocky, RHEL: \`dnf install openmpi\`, then \`module load mpi/openmpi-x86_64\`; a cluster: its own module |
$(grep -v '^libmpi\.' <<<"$needed" | grep -vE '^libgcc_s' | sed 's/.*/`&`/' | paste -sd, | sed 's/,/, /g; s/.*/| & | glibc '"$glibc"' or newer (Debian 12, Ubuntu 22.04, Rocky or RHEL 9, and later) |/')
| \`libgcc_s.so.1\` | \`libgcc-s1\` (Debian, Ubuntu) or \`libgcc\` (Rocky, RHEL); every system has it |
| for GPUs: \`libcuda.so.1\` | NVIDIA's driver, 470 or newer; NVRTC if the driver is older than the compiler of the kernels below; NCCL for several GPUs |

The site also provides the libraries that \`libmpi\` needs (hwloc, libevent, UCX and others). Python rewards need a \`python3\`
on the nodes. The binary contains $("$RLHF_HPC" info | sed -n 's/^carried *//p').

LICENSE is the license of the program. LICENSE-THIRD-PARTY contains the licenses of its libraries. The rest of this file
is the README of the source tree. Its links to bench/ and src/ lead there. Skip its section "Install".

---

END_OF_HEAD
  cat README.md
} >"$staged/README.md"

# The same files give the same bytes, independent of user and time.
stamp=$(git log -1 --format=%ct 2>/dev/null || echo 0)
tar -c -C "$out" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$stamp" "$name" | gzip -9n >"$out/$name.tar.gz"
rm -rf "$staged"
bytes=$(stat -c %s "$out/$name.tar.gz")
echo "$out/$name.tar.gz: $((bytes / 1024 / 1024)) MiB; needs $(paste -sd' ' <<<"$needed"), glibc $glibc, Open MPI ${mpi%%.*}"
[ "$bytes" -le $((most_mib << 20)) ] || { echo "error: more than $most_mib MiB" >&2; exit 1; }
