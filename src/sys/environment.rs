//! Environment variables of mpirun, srun and mpiexec with ranks and sizes.

/// A function that reads a variable. Tests pass their own.
type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

fn real(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

fn first(lookup: Lookup, names: &[&str]) -> Option<usize> {
    names.iter().find_map(|name| lookup(name)?.parse().ok())
}

unsafe extern "C" {
    static mut environ: *mut *mut libc::c_char;
}

/// Moves the environment to the heap and clears the copy that the kernel shows. `/proc/PID/environ` is zeros from now
/// on. Otherwise the child process of a reward could read keys there that its own environment lacks. Nothing changes
/// for the program itself. Call it in `main`, while there is one thread.
pub fn hide() {
    // SAFETY: no other thread reads or changes the environment yet. Each string ends with a zero byte and is in
    // writable memory. The copies live as long as the process, as the strings did.
    unsafe {
        let mut entry = environ;
        while !entry.is_null() && !(*entry).is_null() {
            let copy = libc::strdup(*entry);
            if !copy.is_null() {
                libc::explicit_bzero((*entry).cast(), libc::strlen(*entry));
                *entry = copy;
            }
            entry = entry.add(1);
        }
    }
}

/// Keeps Open MPI off the network if all ranks are on this host, unless the user has set its transport. The search for
/// a network takes 0.2 s at every start. Call it in `main`, while there is one thread.
pub fn keep_off_network() {
    if is_one_host(&real) && std::env::var_os(TRANSPORT).is_none() {
        // SAFETY: no other thread reads or changes the environment yet.
        unsafe { std::env::set_var(TRANSPORT, "ob1") };
    }
}

/// The blocks that NCCL starts for a collective at most, unless the user sets it: each takes a multiprocessor from the
/// computation that the collective overlaps with.
pub const NCCL_CTAS: usize = 8;

/// Limits the blocks of NCCL's collectives to `NCCL_CTAS`, unless the user has set how many it may or must have. Call it
/// in `main`, while there is one thread.
pub fn limit_nccl() {
    if leaves_nccl_open(&real) {
        // SAFETY: no other thread reads or changes the environment yet.
        unsafe { std::env::set_var(NCCL_MAX_CTAS, NCCL_CTAS.to_string()) };
    }
}

const NCCL_MAX_CTAS: &str = "NCCL_MAX_CTAS";

fn leaves_nccl_open(lookup: Lookup) -> bool {
    // Minima above the limit would contradict it. Channels are the older name of blocks.
    let names = [NCCL_MAX_CTAS, "NCCL_MIN_CTAS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS"];
    names.iter().all(|name| lookup(name).is_none())
}

/// Open MPI's parameter for its transport. "ob1" uses shared memory and TCP.
const TRANSPORT: &str = "OMPI_MCA_pml";

fn is_one_host(lookup: Lookup) -> bool {
    let size = |name| first(lookup, &[name]);
    size("OMPI_COMM_WORLD_SIZE").is_some_and(|all| size("OMPI_COMM_WORLD_LOCAL_SIZE") == Some(all))
}

/// The number of ranks that the launcher started; `None` without a launcher.
pub fn launched_ranks() -> Option<usize> {
    ranks_in(&real)
}

pub fn launched_rank() -> Option<usize> {
    launched_ranks()?;
    first(&real, &["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"])
}

/// The names of the variables by which a launcher marks its ranks. A child process without them is alone.
pub fn of_launcher() -> Vec<String> {
    const PREFIXES: [&str; 5] = ["OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_LOCAL"];
    const NAMES: [&str; 3] = ["SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"];
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    names.filter(|name| PREFIXES.iter().any(|prefix| name.starts_with(prefix)) || NAMES.contains(&&**name)).collect()
}

/// The number of ranks on this host.
pub fn local_ranks() -> Option<usize> {
    first(&real, &["OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"])
}

/// The number of launched ranks. The shell of a batch script has Slurm's variables too, but not those of a step: a
/// program that is started there without srun is a single rank.
fn ranks_in(lookup: Lookup) -> Option<usize> {
    first(lookup, &["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]).or_else(|| {
        let in_step = lookup("SLURM_STEP_ID").is_some() && lookup("SLURM_PROCID").is_some();
        let in_step = in_step || lookup("PMIX_RANK").is_some();
        in_step.then(|| first(lookup, &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"])).flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(set: &'static [(&str, &str)]) -> impl Fn(&str) -> Option<String> {
        move |name| set.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_string())
    }

    #[test]
    fn the_launcher_is_recognised_by_its_variables() {
        let ranks = |set| ranks_in(&with(set));
        assert_eq!(ranks(&[]), None);
        assert_eq!(ranks(&[("OMPI_COMM_WORLD_SIZE", "16"), ("SLURM_NTASKS", "2")]), Some(16));
        assert_eq!(ranks(&[("PMI_SIZE", "4")]), Some(4));
        assert_eq!(
            ranks(&[("PMIX_RANK", "3"), ("SLURM_STEP_ID", "0"), ("SLURM_PROCID", "3"), ("SLURM_STEP_NUM_TASKS", "8")]),
            Some(8)
        );
    }

    #[test]
    fn open_mpi_does_not_use_the_network_if_all_ranks_are_on_one_host() {
        let stays_off = |set| is_one_host(&with(set));
        assert!(stays_off(&[("OMPI_COMM_WORLD_SIZE", "4"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "4")]));
        assert!(!stays_off(&[("OMPI_COMM_WORLD_SIZE", "8"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "4")]));
        assert!(!stays_off(&[("PMIX_RANK", "3"), ("SLURM_NTASKS", "8")]));
    }

    #[test]
    fn blocks_of_nccl_are_limited_unless_the_user_sets_them() {
        assert!(leaves_nccl_open(&with(&[("NCCL_DEBUG", "WARN")])));
        assert!(!leaves_nccl_open(&with(&[("NCCL_MAX_CTAS", "16")])));
        assert!(!leaves_nccl_open(&with(&[("NCCL_MIN_NCHANNELS", "16")])));
    }

    #[test]
    fn a_batch_script_without_srun_is_a_world_of_one() {
        assert_eq!(ranks_in(&with(&[("SLURM_JOB_ID", "7"), ("SLURM_PROCID", "0"), ("SLURM_NTASKS", "16")])), None);
    }
}
