//! Memory of whole runs: the arena's limit, and state that is offloaded to files.

use crate::resume::job::{Job, place, with_context};

const OFFLOAD: &str = "mesh.offload=[\"optimizer\",\"roles\"]";

/// The most that was in use, of the fullest rank.
fn peak(job: &Job) -> f64 {
    *job.numbers("memory_arena_peak_bytes").last().expect("a step was recorded")
}

/// Runs `job` with its state in memory and in files. The results are bit-identical, and the second uses less memory.
fn offloaded(name: &str, job: impl Fn(&str) -> Job) {
    let keeps = job(&format!("{name}-keeps")).done();
    let moves = job(&format!("{name}-moves")).with(OFFLOAD).done();
    moves.assert_same(&keeps);
    assert!(peak(&moves) < peak(&keeps), "{name}: {} and {}", peak(&moves), peak(&keeps));
    assert!(keeps.numbers("time_offload_s").is_empty(), "{name}: nothing was moved");
    let seconds = moves.numbers("time_offload_s");
    assert!(!seconds.is_empty() && seconds.iter().all(|s| *s > 0.0), "{name}: {seconds:?}");
    let left = std::fs::read_dir(moves.dir.join("offload")).expect("it was made").count();
    assert_eq!(left, 0, "{name}: unnamed files are gone at the end");
}

#[test]
fn offloading_changes_no_bit_in_any_zero_stage_and_uses_less_memory() {
    offloaded("offload-sft", |name| Job::sft(name).with("job.steps=3"));
    for (stage, dtype) in [(1, "f32"), (3, "bf16")] {
        let sets = format!("mesh.zero={stage} model.dtype={dtype} job.steps=3");
        offloaded(&format!("offload-zero-{stage}-{dtype}"), |name| Job::ppo(name).on(2).with(&sets));
    }
}

#[test]
fn automatic_micro_batches_equal_those_of_the_value_in_the_resolved_job() {
    let sets =
        "job.steps=2 ppo.epochs=1 gradient.recompute=none rollout.kv_bytes_max=100000 mesh.arena_bytes_max=3500000";
    let job = |name: &str, tokens: &str| Job::ppo(name).with(&format!("{sets} ppo.microbatch_tokens_max={tokens}"));
    let auto = job("micro-batches-auto", "auto").done();
    let resolved: toml::Table =
        String::from_utf8(auto.read("config.resolved.toml")).expect("text").parse().expect("TOML");
    let tokens = resolved["ppo"]["microbatch_tokens_max"].as_integer().expect("a number");
    assert!(tokens < 16384, "{tokens} within the limit");
    let named = job("micro-batches-named", &tokens.to_string()).done();
    named.assert_same(&auto);
}

#[test]
fn a_run_stays_within_its_memory_limit_or_ends_with_an_error() {
    for ranks in [0, 2] {
        let sets = "job.steps=2 gradient.recompute=none";
        let job = |name: &str| Job::ppo(&format!("limit-{ranks}-{name}")).on(ranks).with(sets);
        let free = job("none").with("rollout.kv_bytes_max=1000000").done();
        let most = peak(&free);
        let limited = |name: &str, bytes: f64| {
            job(name).with(&format!("rollout.kv_bytes_max=1000000 mesh.arena_bytes_max={}", bytes as u64))
        };
        let within = limited("within", most * 1.125).done();
        within.assert_same(&free);
        assert!(peak(&within) <= most * 1.125, "{} of {most}", peak(&within));
        for (share, words) in [(0.9375, &["step 1, ", "a tensor of ", " does not fit: "][..]), (0.25, &[])] {
            let beyond = limited("beyond", most * share).run();
            let all = ["error: ", "mesh.arena_bytes_max allows", "hint: use more sequence or tensor ranks"];
            beyond.assert(2, &[&all, words].concat());
        }
    }
}

/// A model with a long context, and one long row of digits, each of which is one token.
fn long_row() {
    with_context("far", 8192);
    let digits: String = (0..4001u32).map(|i| char::from(b'0' + (i * i % 7) as u8)).collect();
    let row = format!("{{\"prompt\": \"1+1=\", \"response\": \"{digits}\"}}\n");
    std::fs::write(place().join("far.jsonl"), row).expect("writes");
}

#[test]
fn four_ranks_train_a_sequence_that_the_limit_of_one_cannot_hold() {
    long_row();
    let job = |name: &str| {
        let sets = "model.actor=far data.prompts=[\"far.jsonl\"] data.prompt_split= data.eval_split= job.steps=2 \
                    sft.minibatch_samples=1 sft.microbatch_tokens_max=8192 checkpoint.every_steps=0";
        Job::sft(&format!("long-{name}")).with(sets)
    };
    let free = job("free").done();
    assert!(free.numbers("tokens")[0] > 2000.0, "a long row: {:?}", free.numbers("tokens"));
    let limit = format!("mesh.arena_bytes_max={}", (peak(&free) * 0.6) as u64);
    let alone = job("alone").with(&limit).with("gradient.recompute=none").run();
    alone.assert(2, &["step 1, train: a tensor of ", "mesh.arena_bytes_max allows", "hint: use more sequence"]);
    // Without an explicit setting, the plan chooses recomputation for such a limit.
    let again = job("again").with(&limit);
    again.run().assert(0, &["  recompute    each block except its input"]);
    again.assert_same(&free);
    let ring = job("ring").on(4).with("mesh.sequence=4").with(&limit).done();
    assert!(peak(&ring) <= 0.6 * peak(&free), "{} of {}", peak(&ring), peak(&free));
    for (a, b) in ring.numbers("loss").into_iter().zip(free.numbers("loss")) {
        assert!((a - b).abs() <= 1e-5 * b.abs(), "loss {a} on four ranks, {b} on one");
    }
}

/// The memory of a rank is counted from its own chunks only. Here it has one, which waits for no other.
#[test]
fn a_fixed_gradient_order_runs_in_the_memory_that_it_needs() {
    let job = |name: &str| {
        let sets = "job.steps=2 gradient.order=fixed gradient.chunks=4 mesh.zero=1 checkpoint.every_steps=0";
        Job::sft(&format!("fixed-{name}")).on(4).with(sets)
    };
    let free = job("free").done();
    let within = job("within").with(&format!("mesh.arena_bytes_max={}", (peak(&free) * 1.125) as u64)).done();
    within.assert_same(&free);
}
