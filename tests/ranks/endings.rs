//! How jobs end: each scene runs under its own mpirun, and this side looks at what came out.

use crate::launch::{Job, mpirun, started};
use rlhf_hpc::comm::{Stream, World, abort, phase, shutdown};
use rlhf_hpc::error::{self, Error, Kind};
use rlhf_hpc::tensor::arena::{self, Buffer};
use std::path::Path;
use std::time::Duration;

pub struct Ending {
    pub name: &'static str,
    pub check: fn(&Path) -> Result<(), String>,
}

pub const ENDINGS: &[Ending] = &[
    Ending { name: "a rank that fails ends the job within 10 s, its message once and in logs", check: error_ends },
    Ending { name: "a rank that panics ends the job within 10 s, its message once and in logs", check: panic_ends },
    Ending {
        name: "a tensor beyond the arena's limit ends the job with what was asked for and a hint",
        check: full_ends,
    },
    Ending { name: "a panic on a stream ends the job within 10 s, as one elsewhere", check: stream_panics },
    Ending { name: "a stopped rank is found by the watchdog from a collective of a stream", check: stopped_stream },
    Ending { name: "an agreed error is shown once, with the rank where it arose", check: agreed_once },
    Ending { name: "an error that all ranks meet alike is shown once", check: alike_once },
    Ending { name: "kill -9 of a rank ends the job within 10 s", check: killed },
    Ending { name: "a stopped rank is found by the watchdog and named", check: stopped_rank },
    Ending { name: "a rank that is late in its own work is told apart from a dead one", check: busy_rank },
    Ending { name: "mpirun passes SIGUSR1 on, and all ranks end with 85", check: asked_to_stop },
    Ending { name: "without a launcher there is a world of one, and MPI is not started", check: alone },
    Ending { name: "a world of another size than the launcher's is refused", check: singletons },
];

const RANKS: usize = 3;

/// What a rank does in a scene.
pub fn play(scene: &str, logs: &Path) {
    let world = match World::start() {
        Ok(world) => world,
        Err(error) => abort::fail(&error),
    };
    let limit = if scene == "busy" || scene.starts_with("stopped") { 1.0 } else { 60.0 };
    abort::install(&world, Some(logs), Some(Duration::from_secs_f64(limit)));
    phase::set(3, "train");
    let result = act(scene, &world);
    if let Err(error) = result {
        abort::fail(&error);
    }
    shutdown();
}

fn act(scene: &str, world: &World) -> error::Result<()> {
    let group = world.group();
    let me = world.rank == 1;
    match scene {
        "alone" => assert!(world.size == 1 && !mpi::is_initialized(), "MPI was started"),
        "alone_error" => return Err(Error::data("row 7 is empty").hint("remove it")),
        "error" if me => return Err(Error::data("row 7 is empty").hint("remove it")),
        "panic" if me => {
            let _ = std::thread::spawn(|| panic!("the sum broke")).join();
        }
        "full" => {
            arena::set_limit(if me { 1 << 20 } else { 0 });
            if me {
                let room = Buffer::zeros(150_000);
                // On a thread of its own: layers run on those of the pool and of streams too.
                let _ = std::thread::spawn(|| Buffer::zeros(200_000)).join();
                drop(room);
            }
        }
        "stream_panic" => {
            let stream = Stream::new("background", &[&group]);
            let job = stream.submit(move |groups| {
                assert!(!me, "the sum broke");
                groups[0].barrier();
            });
            job.wait();
        }
        "stopped_stream" => {
            let stream = Stream::new("background", &[&group]);
            if me {
                kill_me("STOP");
            }
            stream.submit(|groups| groups[0].all_reduce_sum(&mut [0.0; 10])).wait();
        }
        "agreed" => group.agree(if me { Err(Error::data("row 7 is empty")) } else { Ok(()) })?,
        "alike" => return Err(Error::usage("steps = -1 is negative")),
        "killed" if me => kill_me("KILL"),
        "stopped" if me => kill_me("STOP"),
        "busy" if me => std::thread::sleep(Duration::from_secs(30)),
        "usr1" => {
            rlhf_hpc::sys::signals::install();
            group.barrier();
            if world.rank == 0 {
                println!("ready");
            }
            loop {
                let mut asked = [f64::from(u8::from(rlhf_hpc::sys::signals::stop_requested()))];
                group.all_reduce_max_f64(&mut asked);
                if asked[0] != 0.0 {
                    return Err(Error::new(Kind::Stopped, "stopped on request"));
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        _ => {}
    }
    group.all_reduce_sum(&mut [0.0; 1000]);
    Ok(())
}

fn kill(signal: &str, pid: u32) {
    let status = std::process::Command::new("kill").args([&format!("-{signal}"), &pid.to_string()]).status();
    assert!(status.is_ok_and(|s| s.success()), "kill -{signal} {pid}");
}

fn kill_me(signal: &str) {
    kill(signal, std::process::id());
    // The signal may need a moment to arrive.
    std::thread::sleep(Duration::from_secs(5));
}

fn run(scene: &str, logs: &Path) -> Job {
    let logs = logs.to_str().expect("a temporary path is UTF-8");
    mpirun(RANKS, &[("RANKS_SCENE", scene), ("RANKS_LOGS", logs)])
}

/// The job ended in time with `code`, and each text stands on standard error exactly once.
fn ended(job: &Job, code: i32, once: &[&str]) -> Result<(), String> {
    let said = || format!("after {:.1} s, exit {:?}:\n{}", job.seconds, job.code, job.stderr);
    if job.seconds > 10.0 {
        return Err(format!("took too long, {}", said()));
    }
    if job.code != Some(code) {
        return Err(format!("exit {code} expected, {}", said()));
    }
    for text in once {
        if job.stderr.matches(text).count() != 1 {
            return Err(format!("'{text}' expected once, {}", said()));
        }
    }
    Ok(())
}

fn logged(logs: &Path, rank: usize, text: &str) -> Result<(), String> {
    let path = logs.join(format!("rank-{rank}.log"));
    let log = std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    if log.contains(text) { Ok(()) } else { Err(format!("'{text}' is not in {}:\n{log}", path.display())) }
}

fn error_ends(logs: &Path) -> Result<(), String> {
    let job = run("error", logs);
    ended(&job, 65, &["error: rank 1 (", "), step 3, train: row 7 is empty", "hint: remove it"])?;
    logged(logs, 1, "row 7 is empty")
}

fn panic_ends(logs: &Path) -> Result<(), String> {
    let job = run("panic", logs);
    ended(&job, 1, &["error: rank 1 (", "step 3, train: the sum broke (tests/ranks/endings.rs:"])?;
    logged(logs, 1, "the sum broke")
}

fn full_ends(logs: &Path) -> Result<(), String> {
    let job = run("full", logs);
    let words = "), step 3, train: a tensor of 800.0 KiB does not fit: 608.0 KiB are in use, and \
                 mesh.arena_bytes_max allows 1.0 MiB a rank";
    ended(&job, 2, &["error: rank 1 (", words, "hint: more sequence or tensor ranks", "gradient.recompute = true"])?;
    if job.stderr.contains("panicked") {
        return Err(job.stderr);
    }
    logged(logs, 1, "mesh.arena_bytes_max")
}

fn stream_panics(logs: &Path) -> Result<(), String> {
    let job = run("stream_panic", logs);
    ended(&job, 1, &["error: rank 1 (", "step 3, train: the sum broke (tests/ranks/endings.rs:"])?;
    logged(logs, 1, "the sum broke")
}

fn stopped_stream(logs: &Path) -> Result<(), String> {
    let job = run("stopped_stream", logs);
    ended(&job, 1, &["error: ", "a collective took longer than 1 s", "does not answer", "rank 1 ("])?;
    if job.stderr.matches("waits in all_reduce_sum over world (40 bytes) on stream background").count() == 2 {
        return Ok(());
    }
    Err(job.stderr)
}

fn agreed_once(logs: &Path) -> Result<(), String> {
    let job = run("agreed", logs);
    ended(&job, 65, &["error: ", "rank 1 (", "row 7 is empty"])?;
    (0..RANKS).try_for_each(|rank| logged(logs, rank, "row 7 is empty"))
}

fn alike_once(logs: &Path) -> Result<(), String> {
    ended(&run("alike", logs), 2, &["error: ", "steps = -1 is negative"])
}

fn killed(logs: &Path) -> Result<(), String> {
    ended(&run("killed", logs), 137, &["signal 9 (Killed)"])
}

fn stopped_rank(logs: &Path) -> Result<(), String> {
    let job = run("stopped", logs);
    ended(&job, 1, &["error: ", "a collective took longer than 1 s", "does not answer", "rank 1 ("])?;
    ended(&job, 1, &["rank 0 (", "rank 2 ("])?;
    if job.stderr.matches("waits in all_reduce_sum over world (4000 bytes)").count() != 2 {
        return Err(job.stderr);
    }
    logged(logs, 0, "a collective took longer")
}

fn busy_rank(logs: &Path) -> Result<(), String> {
    let job = run("busy", logs);
    ended(
        &job,
        1,
        &["a collective took longer than 1 s", "is in no collective; its last was barrier over world; step 3"],
    )
}

fn asked_to_stop(logs: &Path) -> Result<(), String> {
    let logs = logs.to_str().expect("a temporary path is UTF-8");
    let running = started(RANKS, &[("RANKS_SCENE", "usr1"), ("RANKS_LOGS", logs)]);
    running.wait_for("ready");
    kill("USR1", running.pid());
    ended(&running.finish(), 85, &["stopped on request"])
}

/// This program without mpirun, as if the launcher had set `environment`.
fn plainly(scene: &str, logs: &Path, environment: &[(&str, &str)]) -> Result<(Option<i32>, String), String> {
    let program = std::env::current_exe().expect("this program has a path");
    let output = std::process::Command::new(program)
        .env("RANKS_SCENE", scene)
        .env("RANKS_LOGS", logs)
        .envs(environment.iter().copied())
        .output()
        .map_err(|e| e.to_string())?;
    Ok((output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned()))
}

fn alone(logs: &Path) -> Result<(), String> {
    let (code, stderr) = plainly("alone", logs, &[])?;
    if (code, stderr.as_str()) != (Some(0), "") {
        return Err(format!("exit {code:?}\n{stderr}"));
    }
    let (code, stderr) = plainly("alone_error", logs, &[])?;
    if (code, stderr.as_str()) != (Some(65), "error: step 3, train: row 7 is empty\nhint: remove it\n") {
        return Err(format!("exit {code:?}\n{stderr}"));
    }
    logged(logs, 0, "row 7 is empty")
}

fn singletons(logs: &Path) -> Result<(), String> {
    // The launcher's word and MPI's part, as with the mpirun of another MPI.
    let (code, stderr) = plainly("error", logs, &[("OMPI_COMM_WORLD_SIZE", "4")])?;
    if code == Some(2) && stderr.contains("the launcher started 4 ranks, but MPI sees 1") {
        return Ok(());
    }
    Err(format!("exit {code:?}\n{stderr}"))
}
