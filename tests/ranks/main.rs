//! Tests of several ranks. This program has no libtest (MPI starts once per process, libtest is threaded): it starts
//! itself under mpirun with 1 to 16 ranks, and every rank walks the same tests.
//!
//! To add tests, write `fn(&World)` in a file next to this one and name it in that file's `TESTS`. A test fails by
//! panicking. Tests of how jobs end start mpirun themselves: see `endings.rs`.
//!
//! `cargo test --release --test ranks -- [PART OF A NAME]`

mod checkpoints;
mod collect;
mod collectives;
mod combination;
mod endings;
mod layouts;
#[path = "../models.rs"]
mod models;
mod pipeline;
#[path = "../process.rs"]
mod process;
mod relayout;
mod reshard;
mod stream;
mod tensor;
mod tensor_models;
mod tensor_rollout;
mod traces;
mod verify;
mod vision;
#[path = "../weights.rs"]
mod weights;
mod zero;

use endings::ENDINGS;
use rlhf_hpc::comm::{World, shutdown};
use std::collections::BTreeSet;
use std::path::Path;
use std::process::ExitCode;

/// Tests of endings mostly wait for launchers and time limits, so several run at a time.
const ENDINGS_AT_A_TIME: usize = 4;

/// A test that all ranks of a world check together.
pub struct Test {
    pub name: &'static str,
    /// World sizes it is checked with.
    pub ranks: &'static [usize],
    pub check: fn(&World),
}

fn tests() -> Vec<&'static Test> {
    let all = [
        collectives::TESTS,
        stream::TESTS,
        checkpoints::TESTS,
        collect::TESTS,
        tensor::TESTS,
        tensor_rollout::TESTS,
        zero::TESTS,
        pipeline::TESTS,
        reshard::TESTS,
        combination::TESTS,
        relayout::TESTS,
        verify::TESTS,
        traces::TESTS,
        vision::TESTS,
    ];
    all.into_iter().flatten().collect()
}

/// Checks how a job ends, with a directory for its logs.
type Check = Box<dyn Fn(&Path) -> Result<(), String> + Sync>;

fn main() -> ExitCode {
    rlhf_hpc::sys::environment::keep_off_network();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some(names) = std::env::var_os("RANKS_FACTS") {
        walk(&names.to_string_lossy());
        return ExitCode::SUCCESS;
    }
    if let Some(scene) = std::env::var_os("RANKS_SCENE") {
        let logs = std::env::var_os("RANKS_LOGS").expect("a scene has a place for its logs");
        endings::run_scene(&scene.to_string_lossy(), logs.as_ref());
        return ExitCode::SUCCESS;
    }
    let filter = arguments.iter().find(|a| !a.starts_with('-')).map_or("", String::as_str);
    let mut passed = Vec::new();
    let worlds: BTreeSet<usize> = tests().iter().flat_map(|f| f.ranks.iter().copied()).collect();
    for ranks in worlds {
        let names: Vec<&str> =
            tests().iter().filter(|f| f.ranks.contains(&ranks) && f.name.contains(filter)).map(|f| f.name).collect();
        check_on(ranks, &names, &mut passed);
    }
    let endings = ENDINGS.iter().map(|ending| (ending.name, Box::new(|logs: &Path| ending.check(logs)) as Check));
    let alone = ("without a launcher there is a world of one, without MPI", Box::new(endings::alone) as Check);
    let endings: Vec<_> = endings.chain([alone]).filter(|(name, _)| name.contains(filter)).collect();
    for some in endings.chunks(ENDINGS_AT_A_TIME) {
        let in_its_logs = |check: &Check| {
            let logs = tempfile::tempdir().expect("a temporary directory");
            check(&logs.path().join("logs"))
        };
        let results: Vec<Result<(), String>> = std::thread::scope(|scope| {
            let running: Vec<_> = some.iter().map(|(_, check)| scope.spawn(|| in_its_logs(check))).collect();
            running.into_iter().map(|thread| thread.join().expect("an ending gives a result")).collect()
        });
        passed.extend(some.iter().zip(results).map(|((name, _), result)| ended(name, result)));
    }
    let failed = passed.iter().filter(|passed| !**passed).count();
    println!("\n{} passed, {failed} failed", passed.len() - failed);
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Says how a test ended, and whether it passed.
fn ended(name: &str, result: Result<(), String>) -> bool {
    let is_ok = result.is_ok();
    println!("{name} ... {}", result.map_or_else(|why| format!("FAILED\n{why}"), |()| "ok".into()));
    is_ok
}

/// One mpirun for all tests of a world size. If a test ends it, another one runs the later tests.
fn check_on(ranks: usize, names: &[&str], passed: &mut Vec<bool>) {
    let mut left = names;
    while let Some(&first) = left.first() {
        let mut command = process::launched(&std::env::current_exe().expect("this program has a path"), ranks);
        command.env("RANKS_FACTS", left.join("\n"));
        let job = process::Running::new(command).end();
        let done = left.iter().take_while(|name| job.stdout.lines().any(|l| l == format!("held: {name}"))).count();
        passed.extend(left[..done].iter().map(|name| ended(&format!("{ranks} ranks: {name}"), Ok(()))));
        if done < left.len() {
            let why = format!("exit {:?}\n{}{}", job.code, job.stdout, job.stderr);
            passed.push(ended(&format!("{ranks} ranks: {}", left[done]), Err(why)));
        } else if job.code != Some(0) {
            passed.push(ended(&format!("{ranks} ranks: the world that began with {first} ends well"), Err(job.stderr)));
        }
        left = &left[(done + 1).min(left.len())..];
    }
}

/// Runs the tests on each rank under mpirun.
fn walk(names: &str) {
    let world = World::start().unwrap_or_else(|error| panic!("{error}"));
    for name in names.lines() {
        let test = tests().into_iter().find(|f| f.name == name).expect("the name comes from the table");
        (test.check)(&world);
        world.group().barrier();
        if world.rank == 0 {
            println!("held: {name}");
        }
    }
    shutdown();
}
