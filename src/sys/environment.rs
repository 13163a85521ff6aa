//! What mpirun, srun and mpiexec tell a rank through its environment.

fn number(name: &str) -> Option<usize> {
    std::env::var(name).ok()?.parse().ok()
}

/// How many ranks the launcher says it started; none without a launcher. A batch script's own shell has Slurm's
/// variables too, but not those of a step.
pub fn launched_ranks() -> Option<usize> {
    number("OMPI_COMM_WORLD_SIZE").or_else(|| number("PMI_SIZE")).or_else(|| {
        let in_step = std::env::var_os("SLURM_STEP_ID").is_some() && number("SLURM_PROCID").is_some();
        let pmix = std::env::var_os("PMIX_RANK").is_some();
        (in_step || pmix).then(|| number("SLURM_STEP_NUM_TASKS").or_else(|| number("SLURM_NTASKS"))).flatten()
    })
}

/// Place among all ranks, as the launcher says; none without a launcher.
pub fn launched_rank() -> Option<usize> {
    launched_ranks()?;
    ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"].into_iter().find_map(number)
}

/// Place among the ranks of this host. Open MPI's word comes first: under mpirun inside sbatch, SLURM_LOCALID is 0 on
/// every rank.
pub fn local_rank() -> Option<usize> {
    ["OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"].into_iter().find_map(number)
}

/// Ranks on this host.
pub fn local_ranks() -> Option<usize> {
    ["OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"].into_iter().find_map(number)
}
