"""A Spack recipe for this source tree.

    spack repo create ~/rlhf-repo rlhf                    # once; it prints the folder of packages
    ln -s TREE/jobs/tools/spack ~/rlhf-repo/.../packages/rlhf_hpc
    spack repo add ~/rlhf-repo
    spack install rlhf-hpc ^openmpi@4

Use the folder that `spack repo create` prints, and the name that `spack create` would use: rlhf_hpc, or rlhf-hpc before
Spack 1.0. The sources are the git tree that contains this file.
"""

from pathlib import Path

from spack.package import *

try:
    from spack_repo.builtin.build_systems.cargo import CargoPackage  # Spack 1.0 and newer
except ImportError:
    from spack.build_systems.cargo import CargoPackage

TREE = Path(__file__).resolve().parents[3]


class RlhfHpc(CargoPackage):
    """RLHF post-training of language models on an HPC cluster: one binary under mpirun."""

    git = TREE.as_uri()

    license("Apache-2.0")

    version("develop", branch="main")

    depends_on("c", type="build")
    depends_on("cxx", type="build")
    depends_on("rust@1.90:", type="build")
    depends_on("cmake@3.16:", type="build")
    depends_on("pkgconfig", type="build")
    # bindgen reads mpi.h with libclang.
    depends_on("llvm+clang", type="build")
    depends_on("openmpi@4:5", type=("build", "link", "run"))
    # Python rewards need it.
    depends_on("python@3.8:", type="run")

    def setup_build_environment(self, env):
        env.set("LIBCLANG_PATH", self.spec["llvm"].prefix.lib)

    @run_after("install")
    def install_jobs(self):
        install_tree("jobs", self.prefix.share.join("rlhf-hpc").jobs)
