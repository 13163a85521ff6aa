//! Tests of several ranks with an emulated GPU each: this target starts itself again under mpirun, and each rank runs
//! a scene.

use crate::jobs::launched;
use crate::{axes_check, device, emulation, graphs, nccl, reshard, skip_on_a_real_gpu};
use rlhf_hpc::comm::{World, shutdown};

/// The task of such a process: the module of its scene, and the scene.
const SCENE: &str = "EMULATED_SCENE";
/// GPUs that start work only when a caller waits for it; otherwise they work at once.
pub const LATE: (&str, &str) = (emulation::LATE, "1");

/// Lets `ranks` processes of this target, connected by the emulated NCCL, run a scene. Returns whether all succeed, and
/// their output. `None` on a real GPU, which the ranks would share.
pub fn run_scene(ranks: usize, scene: &str, env: &[(&str, &str)]) -> Option<(bool, String)> {
    if skip_on_a_real_gpu() {
        return None;
    }
    let mut command = launched(ranks);
    command
        .arg(std::env::current_exe().expect("the path of this target"))
        .args(["ranks::a_process_runs_its_rank", "--exact", "--nocapture", "--test-threads=1"])
        .env(emulation::LIBRARY, emulation::gpu())
        .env(SCENE, scene);
    // This process may open its own GPU at the same time.
    for name in emulation::CHECKED {
        command.env_remove(name);
    }
    let out = command.envs(env.iter().copied()).output().expect("mpirun starts");
    let said = [out.stdout, out.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert_eq!(said.matches("running 1 test").count(), ranks, "{scene}: {said}");
    Some((out.status.success(), said))
}

/// The same for a scene that must succeed.
pub fn assert_scene(ranks: usize, scene: &str, env: &[(&str, &str)]) {
    let Some((well, said)) = run_scene(ranks, scene, env) else { return };
    assert!(well, "{scene} on {ranks} ranks, {env:?}: {said}");
}

/// One of the ranks that other tests start.
#[test]
fn a_process_runs_its_rank() {
    let Ok(scene) = std::env::var(SCENE) else { return };
    let (_gpu, _one) = device();
    let world = World::start().expect("MPI starts");
    let (module, scene) = scene.split_once(": ").expect("a module and its scene");
    match module {
        "axes" => axes_check::scene(scene, &world),
        "graphs" => graphs::scene(scene, &world),
        "nccl" => nccl::scene(scene, &world),
        "reshard" => reshard::scene(&world),
        other => panic!("no scenes of {other}"),
    }
    shutdown();
}
