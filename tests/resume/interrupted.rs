//! Runs that are killed, asked to stop, or out of time, and are resumed.

use crate::process::Running;
use crate::resume::async_rollout::ahead;
use crate::resume::best::{FIRST, best};
use crate::resume::job::{Job, listens, signal};
use rlhf_hpc::checkpoint::newest;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Steps in which sampling takes most of the time, or training does.
const LONG_ROLLOUT: &str = "rollout.response_tokens_max=200 rollout.stop_token_ids=[] rollout.ignore_eos=true \
                            rollout.batch_max=2 ppo.epochs=1 ppo.minibatch_samples=16 checkpoint.every_steps=3";
const LONG_TRAINING: &str = "rollout.response_tokens_max=60 rollout.stop_token_ids=[] rollout.ignore_eos=true \
                             ppo.epochs=8 ppo.minibatch_samples=2 checkpoint.every_steps=0";
/// Settings with sampling masks that are kept, and numbers that carry over from step to step.
const MASKED: &str = "rollout.top_k=40 rollout.keep_sampling_mask=true ppo.kl_target=0.1 ppo.reward_normalize=true";

/// Waits a random time, up to `most` milliseconds.
fn wait_somehow(most: u64) {
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").subsec_nanos();
    std::thread::sleep(Duration::from_micros(u64::from(nanos / 7) % (most * 1000)));
}

/// The place at which a run was interrupted.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    BetweenSteps,
    Evaluation,
    /// In rollout; with finished responses or none.
    Rollout {
        finished: bool,
    },
    Training,
}

/// The place in the newest checkpoint: `work.bin` begins with the tag of `Work` and, in rollout, the number of finished
/// responses.
fn interrupted_in(job: &Job) -> Place {
    let checkpoint = newest(&job.checkpoints()).expect("whole").expect("one was saved");
    if checkpoint.file("work.bin").is_err() {
        let due = checkpoint.manifest.state["run"]["eval_due"] == true;
        return if due { Place::Evaluation } else { Place::BetweenSteps };
    }
    let work = checkpoint.file("work.bin").expect("listed");
    // Follows the next batch of an async rollout: whether the rest of a step is saved.
    if work[0] == 2 && work.last() == Some(&0) {
        return Place::BetweenSteps;
    }
    if work[0] == 0 { Place::Rollout { finished: work[1] > 0 } } else { Place::Training }
}

/// Runs `job` to its end, with a stop after each start, until it ends by itself. Returns where it was interrupted.
fn stopped_again_and_again(job: &Job, ask: impl Fn(&Job, &mut Running)) -> Vec<Place> {
    let mut places = Vec::new();
    for _ in 0..60 {
        let mut running = job.start();
        if places.len() < 4 {
            ask(job, &mut running);
        }
        let ended = running.end();
        if ended.code == Some(0) {
            return places;
        }
        ended.assert(85, &["stopped at step ", "and saved a checkpoint; run the same command again to resume"]);
        places.push(interrupted_in(job));
    }
    panic!("{} does not end: {places:?}", job.dir.display());
}

/// SIGUSR1 a moment after a new line of `metrics.jsonl`: within the next step.
fn ask_within_a_step(job: &Job, running: &mut Running) {
    let before = job.metrics().len();
    running.wait_until(|| job.metrics().len() > before);
    wait_somehow(40);
    signal("USR1", running.pid());
}

/// Runs a job that is stopped again and again, at least once in its rollout. It ends like an uninterrupted one.
fn usr1(name: &str, job: impl Fn(&str) -> Job) {
    let job = |name: &str| job(name).with(LONG_ROLLOUT).with("job.steps=5");
    let whole = job(&format!("{name}-whole")).done();
    // The machine decides where a stop falls, so another run gets another chance.
    for attempt in 0..10 {
        let job = job(&format!("{name}-{attempt}"));
        let places = stopped_again_and_again(&job, ask_within_a_step);
        job.assert_same(&whole);
        if places.contains(&(Place::Rollout { finished: true })) {
            return;
        }
        println!("{name}: interrupted in {places:?}");
    }
    panic!("{name}: was never interrupted where it should have been");
}

#[test]
fn a_ppo_run_stopped_in_rollout_resumes_bitwise_on_2_ranks() {
    let sets = format!("{MASKED} ppo.advantage=remax eval.every_steps=3");
    usr1("usr1-ppo", |name| Job::ppo(name).on(2).with(&sets));
}

#[test]
fn on_policy_distillation_stopped_in_rollout_resumes_bitwise() {
    let sets = "job.kind=distill distill.on_policy=true model.teachers=[\"model\"] distill.minibatch_samples=16";
    usr1("usr1-distill", |name| Job::ppo(name).with(sets));
}

#[test]
fn a_signal_to_one_rank_stops_all_of_them() {
    let job = Job::ppo("one-signal").on(2).with(LONG_TRAINING).with("job.steps=100000");
    let mut running = job.start();
    running.wait_until(|| !job.metrics().is_empty());
    signal("USR1", running.ranks()[1]);
    running.end().assert(85, &["stopped at step "]);
    assert!(!job.committed().is_empty());
}

#[test]
fn every_notice_of_a_batch_system_saves_and_stops() {
    for (name, words) in [
        ("USR1", "(SIGUSR1) and saved"),
        ("USR2", "(SIGUSR2) and saved"),
        ("HUP", "(SIGHUP, such as a closed terminal) and saved"),
        ("XCPU", "(SIGXCPU, the limit on CPU time) and saved"),
    ] {
        // Under nohup, processes ignore it, and so does the program.
        if name == "HUP" && ignores_hangups() {
            continue;
        }
        let job = Job::ppo(&format!("notice-{name}")).with("job.steps=100000 eval.every_steps=0");
        let mut running = job.start();
        running.wait_until(|| !job.metrics().is_empty());
        // Some batch systems repeat their signal.
        assert!(signal(name, running.pid()) && signal(name, running.pid()));
        running.end().assert(85, &["stopped at step ", words]);
        assert!(!job.committed().is_empty(), "{name}");
    }
}

/// Whether the processes that this one starts ignore SIGHUP, which is bit 0 of the mask.
fn ignores_hangups() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    ignored.is_some_and(|mask| u64::from_str_radix(mask.trim(), 16).is_ok_and(|mask| mask & 1 != 0))
}

/// Whether a Ctrl-C has not reached its process yet.
fn waits(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let waiting = status.lines().find_map(|line| line.strip_prefix("ShdPnd:"));
    waiting.is_some_and(|mask| u64::from_str_radix(mask.trim(), 16).is_ok_and(|mask| mask & 2 != 0))
}

#[test]
fn ctrl_c_saves_and_a_second_one_ends_at_once() {
    for (presses, code, words) in [(1, Some(85), "(Ctrl-C) and saved a checkpoint"), (2, None, "Ctrl-C again to stop")]
    {
        let job = Job::ppo(&format!("ctrl-c-{presses}")).with(LONG_TRAINING).with("job.steps=100000");
        let mut running = job.start();
        running.wait_until(|| !job.metrics().is_empty());
        let pid = running.pid();
        for _ in 0..presses {
            assert!(signal("INT", pid));
            // Two pending signals would be merged into one.
            running.wait_until(|| !waits(pid));
        }
        let ended = running.end();
        assert!(ended.code == code && ended.stderr.contains(words), "{:?}: {}", ended.code, ended.stderr);
        // The second signal may arrive after the first one's checkpoint.
        assert!(presses == 2 || !job.committed().is_empty());
    }
}

/// Runs the job in parts, each of which ends after one optimizer step, and as a whole. Returns the places of
/// interruption.
fn in_parts(whole: Job, parts: &Job) -> Vec<Place> {
    let hurried = parts.clone().with("checkpoint.max_hours=1e-9");
    let places = stopped_again_and_again(&hurried, |_, _| {});
    parts.assert_same(&whole.done());
    places
}

#[test]
fn with_a_time_limit_that_is_over_at_once_every_start_makes_an_optimizer_step() {
    let texts = "data.pretrain=[\"texts\"] data.pretrain_tokens_max=48 sft.pretrain_coef=0.5";
    for (name, job) in [
        ("at-once", Job::ppo("").on(2).with("ppo.epochs=1 ppo.minibatch_samples=16")),
        ("at-once-sft", Job::sft("").with(texts)),
        ("at-once-scorer", Job::pairs("", "job.kind=reward_model")),
        ("at-once-dpo", Job::pairs("", "job.kind=dpo").on(2)),
    ] {
        let job = job.with("job.steps=2 eval.every_steps=1");
        // Each evaluation is due after a step, and the next start makes it before its own step.
        let places = in_parts(job.named(&format!("{name}-whole")), &job.named(name));
        assert_eq!(places, [Place::Evaluation; 2], "{name}");
    }
}

#[test]
fn a_step_interrupted_after_each_of_its_updates_resumes_bitwise() {
    let texts = "ppo.critic_warmup_steps=1 ppo.ptx_coef=0.1 data.pretrain=[\"texts.jsonl\"]";
    let of = |job: Job| job.with("job.steps=2 checkpoint.every_steps=0 ppo.kl_target=0.1");
    // 2 epochs over 2 minibatches. In the interrupted runs the optimizer state is offloaded to files.
    for (name, job, more) in [
        ("updates", of(Job::ppo("").with(MASKED).with(texts)), ""),
        ("updates-offload", of(Job::ppo("").with("model.dtype=bf16")), "mesh.offload=[\"optimizer\",\"roles\"]"),
        ("updates-ahead", of(ahead("", 1, 1)).with("ppo.loss=masked ppo.lambda_alpha=1.5 ppo.critic_epochs=3"), ""),
    ] {
        let places = in_parts(job.named(&format!("{name}-whole")), &job.named(name).with(more));
        assert!(places.iter().filter(|place| **place == Place::Training).count() >= 4, "{name}: {places:?}");
    }
}

#[test]
fn a_best_checkpoint_survives_interruptions_of_the_next_step() {
    let job = Job::ppo("").with(FIRST).with("job.steps=3 checkpoint.keep_last=1");
    let (whole, parts) = (job.named("best-whole"), job.named("best-parts"));
    in_parts(whole.clone(), &parts);
    assert_eq!((best(&whole), best(&parts)), ("step-1".to_string(), "step-1.best".to_string()));
}

/// Kills one rank, or all of them and mpirun.
fn kill_somehow(running: &Running, round: usize) {
    let ranks = running.ranks();
    if round.is_multiple_of(2) {
        signal("KILL", ranks[round / 2 % ranks.len()]);
    } else {
        for rank in ranks {
            signal("KILL", rank);
        }
        signal("KILL", running.pid());
    }
}

/// Waits for the next checkpoint and a little longer, or, every second time, just so: within the start, too.
fn wait_for_a_moment(job: &Job, running: &mut Running, round: usize) {
    let before = job.committed().len();
    if round.is_multiple_of(2) {
        running.wait_until(|| job.committed().len() > before);
        wait_somehow(30);
    } else {
        wait_somehow(400);
    }
}

/// Runs a job that is killed again and again. It ends like an uninterrupted one.
fn killed(job: &Job, whole: &Job) {
    for kills in 0..=4 {
        let mut running = job.start();
        let spared = kills == 4;
        if !spared {
            wait_for_a_moment(job, &mut running, kills);
        }
        let committed = job.committed();
        if !spared {
            kill_somehow(&running, kills);
        }
        let ended = running.end();
        let left = job.committed();
        assert!(committed.iter().all(|s| left.contains(s)), "{committed:?} were committed, {left:?} are left");
        if let Some(last) = left.last() {
            let found = newest(&job.checkpoints()).expect("they verify").expect("there is one");
            assert!(
                found.manifest.step == *last && found.skipped.is_empty(),
                "step {} of {left:?}",
                found.manifest.step
            );
        }
        if ended.code == Some(0) {
            assert!(kills > 0, "the job was never killed");
            job.assert_same(whole);
            let names = std::fs::read_dir(job.checkpoints()).expect("there").map(|e| e.expect("an entry").file_name());
            let partial: Vec<_> = names.filter(|name| name.to_string_lossy().starts_with('.')).collect();
            assert!(partial.is_empty(), "partial files remain: {partial:?}");
            return;
        }
        assert!(!spared && ended.code != Some(1), "{:?}: {}", ended.code, ended.stderr);
    }
    unreachable!("the last run is spared, and then ends well or fails above");
}

#[test]
fn kill_9_of_ranks_or_of_the_launcher_loses_no_committed_checkpoint_on_2_ranks() {
    let sets = "job.steps=10 checkpoint.keep_last=0 eval.every_steps=4";
    killed(&Job::ppo("killed-2").on(2).with(sets), &Job::ppo("killed-2-whole").on(2).with(sets).done());
}

#[test]
fn a_finished_run_started_again_changes_nothing() {
    let job = Job::ppo("again").with("job.steps=2").done();
    let before = (job.read("metrics.jsonl"), job.read("export/model.safetensors"), job.read("ledger.json"));
    job.run().assert(0, &["nothing left to do (2 of 2 steps); raise job.steps to continue"]);
    let after = (job.read("metrics.jsonl"), job.read("export/model.safetensors"), job.read("ledger.json"));
    assert!(before == after);
}

#[test]
fn a_signal_in_the_first_moments_of_a_start_stops_it_as_a_later_one_does() {
    for ranks in [0, 2] {
        for after_ms in [0, 100] {
            let job = Job::ppo(&format!("early-{ranks}-{after_ms}")).on(ranks).with("job.steps=100000");
            let mut running = job.start();
            let all_listen = |pids: Vec<u32>| pids.len() == ranks.max(1) && pids.into_iter().all(listens);
            while !all_listen(running.ranks()) {
                assert!(!running.is_over(), "{ranks} ranks ended by themselves");
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(Duration::from_millis(after_ms));
            assert!(running.ranks().into_iter().all(|pid| signal("USR1", pid)), "{ranks} ranks, {after_ms} ms");
            running.end().assert(85, &["stopped at step "]);
        }
    }
}
