//! The ends of jobs: each scene runs under its own mpirun, and this side checks the result.

use crate::process::{Ended, Running, launched};
use rlhf_hpc::comm::{Stream, World, abort, phase, shutdown};
use rlhf_hpc::error::{self, Error};
use rlhf_hpc::tensor::arena::{self, Buffer};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// The end of a scene's job: within 30 s, with `code`, each text of `said` on standard error as often as it is listed,
/// and `logged` in the log of a rank.
pub struct Ending {
    pub name: &'static str,
    scene: &'static str,
    code: i32,
    said: &'static [&'static str],
    logged: Option<(usize, &'static str)>,
}

const BROKEN: &[&str] = &["error: rank 1 (", "step 3, train: the sum broke (tests/ranks/endings.rs:"];

pub const ENDINGS: &[Ending] = &[
    Ending {
        name: "a rank that fails ends the job within 30 s, its message once and in logs",
        scene: "error",
        code: 65,
        said: &["error: rank 1 (", "), step 3, train: row 7 is empty", "hint: remove it"],
        logged: Some((1, "row 7 is empty")),
    },
    Ending {
        name: "a rank that fails on a stage of a pipeline is named with its stage",
        scene: "stage_error",
        code: 65,
        said: &["error: rank 1 (", "), stage 1 of 3, step 3, train: row 7 is empty", "hint: remove it"],
        logged: Some((1, "stage 1 of 3")),
    },
    Ending {
        name: "an agreed error of a stage is named with it",
        scene: "stage_agreed",
        code: 65,
        said: &["error: ", "rank 1 (", "), stage 1 of 3: row 7 is empty"],
        logged: Some((2, "row 7 is empty")),
    },
    Ending {
        name: "a rank that panics ends the job within 30 s, its message once and in logs",
        scene: "panic",
        code: 1,
        said: BROKEN,
        logged: Some((1, "the sum broke")),
    },
    Ending {
        name: "a tensor beyond the arena's limit ends the job with the requested size and a hint",
        scene: "full",
        code: 2,
        said: &[
            "error: rank 1 (",
            "), step 3, train: a tensor of 800.0 KiB does not fit: 608.0 KiB are in use, and mesh.arena_bytes_max allows 1.0 MiB per rank",
            "hint: use more sequence or tensor ranks",
            "gradient.recompute = \"block\"",
        ],
        logged: Some((1, "mesh.arena_bytes_max")),
    },
    Ending {
        name: "a panic on a stream ends the job within 30 s",
        scene: "stream_panic",
        code: 1,
        said: BROKEN,
        logged: Some((1, "the sum broke")),
    },
    Ending {
        name: "a panic that unwinds past a pending message ends the job at once",
        scene: "torn",
        code: 1,
        said: &["error: rank 1 failed while MPI sent or received its data; all ranks end at once"],
        logged: None,
    },
    Ending {
        name: "a stopped rank is found by the watchdog from a collective of a stream",
        scene: "stopped_stream",
        code: 1,
        said: &[
            "error: ",
            "a collective took longer than 1 s",
            "does not answer",
            "rank 1 (",
            "waiting in all_reduce_sum_ordered over world (40 bytes) on stream background",
            "waiting in all_reduce_sum_ordered over world (40 bytes) on stream background",
        ],
        logged: None,
    },
    Ending {
        name: "an agreed error is shown once, with the rank where it arose",
        scene: "agreed",
        code: 65,
        said: &["error: ", "rank 1 (", "row 7 is empty"],
        logged: Some((2, "row 7 is empty")),
    },
    Ending {
        name: "kill -9 of a rank ends the job within 30 s",
        scene: "killed",
        code: 137,
        said: &["signal 9 (Killed)"],
        logged: None,
    },
    Ending {
        name: "a stopped rank is found by the watchdog and named",
        scene: "stopped",
        code: 1,
        said: &[
            "error: ",
            "a collective took longer than 1 s",
            "does not answer",
            "rank 0 (",
            "rank 1 (",
            "rank 2 (",
            "waiting in all_reduce_sum_ordered over world (4000 bytes)",
            "waiting in all_reduce_sum_ordered over world (4000 bytes)",
        ],
        logged: Some((0, "a collective took longer")),
    },
    Ending {
        name: "a rank that is late in its own work is distinguished from a dead one",
        scene: "busy",
        code: 1,
        said: &["a collective took longer than 1 s", "is in no collective (its last was barrier over world); step 3"],
        logged: None,
    },
];

const RANKS: usize = 3;

/// The actions of one rank in a scenario.
pub fn run_scene(scene: &str, logs: &Path) {
    let world = match World::start() {
        Ok(world) => world,
        Err(error) => abort::fail(&error),
    };
    let limit = if scene == "busy" || scene.starts_with("stopped") { 1.0 } else { 60.0 };
    abort::install(&world, Some(logs), Some(Duration::from_secs_f64(limit)));
    phase::set(3, phase::Phase::Train);
    let scene = match scene.strip_prefix("stage_") {
        Some(scene) => {
            phase::set_stage(world.rank, world.size);
            scene
        }
        None => scene,
    };
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
            let stream = Stream::new("background", &group);
            let job = stream.submit(move |group| {
                assert!(!me, "the sum broke");
                group.barrier();
            });
            job.wait();
        }
        "stopped_stream" => {
            let stream = Stream::new("background", &group);
            if me {
                kill_me("STOP");
            }
            stream.submit(|group| group.all_reduce_sum_ordered(&mut [0.0; 10])).wait();
        }
        // A range outside the buffer, found after the receives have begun.
        "torn" => abort::caught(|| {
            let outside = if me { 7..8 } else { 2..3 };
            group.all_to_all(&[0.0f32; 3], &[0..1, 1..2, outside], &mut [0.0; 3], &[0..1, 1..2, 2..3]);
            Ok(())
        })?,
        "agreed" => group.agree(if me { Err(Error::data("row 7 is empty")) } else { Ok(()) })?,
        "killed" if me => kill_me("KILL"),
        "stopped" if me => kill_me("STOP"),
        "busy" if me => std::thread::sleep(Duration::from_secs(60)),
        _ => {}
    }
    group.all_reduce_sum_ordered(&mut [0.0; 1000]);
    Ok(())
}

fn kill_me(signal: &str) {
    let id = std::process::id().to_string();
    let status = Command::new("kill").args([&format!("-{signal}"), &id]).status();
    assert!(status.is_ok_and(|s| s.success()), "kill -{signal} {id}");
    // The signal may arrive a moment later.
    std::thread::sleep(Duration::from_secs(5));
}

fn run(ranks: usize, scene: &str, logs: &Path, environment: &[(&str, &str)]) -> Ended {
    let mut command = launched(&std::env::current_exe().expect("this program has a path"), ranks);
    command.env("RANKS_SCENE", scene).env("RANKS_LOGS", logs).envs(environment.iter().copied());
    Running::new(command).end()
}

impl Ending {
    pub fn check(&self, logs: &Path) -> Result<(), String> {
        let since = Instant::now();
        let ended = run(RANKS, self.scene, logs, &[]);
        let said = format!("after {:.1?}, exit {:?}:\n{}", since.elapsed(), ended.code, ended.stderr);
        if since.elapsed() > Duration::from_secs(30) || ended.code != Some(self.code) {
            return Err(format!("exit {} within 30 s expected, {said}", self.code));
        }
        let times = |text: &&str| self.said.iter().filter(|other| *other == text).count();
        if let Some(text) = self.said.iter().find(|text| ended.stderr.matches(*text).count() != times(text)) {
            return Err(format!("'{text}' expected {} times, {said}", times(text)));
        }
        let in_panic = self.scene == "full" && ended.stderr.contains("panicked");
        let aborts = self.scene.ends_with("agreed") && ended.stderr.contains("MPI_ABORT");
        if in_panic || aborts { Err(said) } else { self.logged.map_or(Ok(()), |(rank, text)| logged(logs, rank, text)) }
    }
}

fn logged(logs: &Path, rank: usize, text: &str) -> Result<(), String> {
    let path = logs.join(format!("rank-{rank}.log"));
    let log = std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    if log.contains(text) { Ok(()) } else { Err(format!("'{text}' is not in {}:\n{log}", path.display())) }
}

/// Without a launcher there is a world of one, and MPI is not started; a world of another size than the launcher's is
/// refused.
pub fn alone(logs: &Path) -> Result<(), String> {
    // The launcher's and MPI's world sizes differ, as with the mpirun of another MPI.
    let two_mpis = [("OMPI_COMM_WORLD_SIZE", "4")];
    for (scene, environment, code, words) in [
        ("alone", &[][..], 0, ""),
        ("alone_error", &[], 65, "error: step 3, train: row 7 is empty\nhint: remove it\n"),
        ("error", &two_mpis, 2, "the launcher started 4 ranks, but MPI sees 1"),
    ] {
        let Ended { code: got, stderr, .. } = run(0, scene, logs, environment);
        if got != Some(code) || !stderr.contains(words) || (code == 0 && !stderr.is_empty()) {
            return Err(format!("{scene}: exit {got:?}\n{stderr}"));
        }
    }
    logged(logs, 0, "row 7 is empty")
}
