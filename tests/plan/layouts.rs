//! The chosen layouts, and rejected jobs.

use super::models::{NAMED, REFERENCE, a800, archs, job, llama2_7b, small};
use rlhf_hpc::config::job::Recompute;
use rlhf_hpc::config::mesh::RoleName;
use rlhf_hpc::config::{self, Config};
use rlhf_hpc::error::Error;
use rlhf_hpc::launch::layout::StateSwap;
use rlhf_hpc::plan::choose::Candidate;
use rlhf_hpc::plan::time::Stage;
use rlhf_hpc::plan::{Choice, Device, Job, choose, microbatch};
use rlhf_hpc::train::Archs;
use std::path::Path;

/// The workload with fewer samples and few sampled tokens, as a plan counts these step by step. Its rows have the same
/// length.
fn fewer(more: &[&str]) -> Config {
    let sets = ["rollout.prompts_per_step=128", "data.prompt_tokens_max=1920", "rollout.response_tokens_max=128"];
    job(&[&sets[..], more].concat())
}

fn chosen(more: &[&str], archs: &Archs, world: usize, device: &Device) -> Choice {
    let config = fewer(more);
    choose(&Job::new(&config, archs, None), world, device).unwrap_or_else(|e| panic!("{more:?}: {e}"))
}

fn refused(more: &[&str], archs: &Archs, world: usize, device: &Device) -> Error {
    let config = fewer(more);
    match choose(&Job::new(&config, archs, None), world, device) {
        Ok(choice) => panic!("{more:?} is laid out: {}", choice.chosen.layout().describe()),
        Err(error) => error,
    }
}

/// The job with short rows.
const SHORT: [&str; 3] = ["data.prompt_tokens_max=64", "rollout.response_tokens_max=64", "rollout.prompts_per_step=64"];

#[test]
fn on_gpus_the_fastest_layout_that_fits_is_chosen_with_a_reason_against_each_other_one() {
    let choice = chosen(&[], &archs(&llama2_7b(), true), 16, &a800());
    let chosen = &choice.chosen;
    assert!(chosen.fits() && choice.compared > 20 && choice.fitting > 1);
    assert!(choice.runners_up.len() >= 3);
    let faster = |c: &Candidate| c.fits() && c.step_s() < chosen.step_s();
    if choice.runners_up.iter().any(|other| faster(&other.candidate)) {
        assert!(choice.why.starts_with("predicted within 2 % of the fastest layout that fits ("), "{}", choice.why);
    }
    assert!(!choice.why.is_empty());
    for other in &choice.runners_up {
        assert!(other.why.contains(if faster(&other.candidate) { ", with " } else { ": " }), "{}", other.why);
        // Times within two percent count as equal.
        assert!(!other.candidate.fits() || other.candidate.step_s() * 1.021 >= chosen.step_s(), "{}", other.why);
        assert_ne!(&other.candidate, chosen);
    }
    assert!(chosen.fullest().memory.peak().1.bytes as u64 <= a800().memory_bytes);
}

#[test]
fn explicit_axes_are_kept_and_automatic_ones_are_filled_in() {
    let archs = archs(&llama2_7b(), false);
    let choice = chosen(&["mesh.tensor=4", "mesh.zero=2", "rollout.tensor=2"], &archs, 16, &a800());
    let layout = choice.chosen.layout();
    assert_eq!((layout.mesh.data, layout.mesh.tensor, layout.zero), (4, 4, 2));
    assert_eq!((layout.rollout_tensor, layout.rollout_data()), (2, 8));
    let choice = chosen(&["mesh.sequence=2", "mesh.tensor=1", "rollout.tensor=1"], &archs, 16, &a800());
    let layout = choice.chosen.layout();
    assert_eq!((layout.mesh.data, layout.mesh.sequence, layout.zero > 0), (8, 2, true));
}

#[test]
fn gemms_by_cublaslt_or_auto_are_planned_with_recomputed_log_probabilities() {
    let archs = archs(&llama2_7b(), false);
    let scored = |gemm: &str| {
        let gemm = format!("job.gemm={gemm}");
        let choice = chosen(&[&NAMED[..], &["job.device=gpu", &gemm]].concat(), &archs, 16, &a800());
        let heads = choice.chosen.main().time.parts.iter();
        heads
            .filter(|part| part.name == "head" && part.stage == Stage::Scoring)
            .map(|part| part.work.flops)
            .sum::<f64>()
    };
    // The reference's head, and the actor's.
    assert_eq!((scored("cublaslt"), scored("auto")), (2.0 * scored("exact"), 2.0 * scored("exact")));
}

#[test]
fn on_cpus_the_simplest_layout_that_fits_is_chosen_at_every_start() {
    let archs = archs(&small(), false);
    let config = job(&SHORT);
    let roomy = Device::cpu(1 << 36, 2);
    let choice = choose(&Job::new(&config, &archs, None), 4, &roomy).expect("it fits");
    assert_eq!(
        (choice.chosen.layout().mesh.tensor, choice.chosen.layout().mesh.data, choice.chosen.layout().zero),
        (1, 4, 1)
    );
    assert_eq!(choose(&Job::new(&config, &archs, None), 4, &roomy).expect("it fits"), choice);
    // Where stage 1 does not fit, the next one that does.
    let bytes = |c: &Choice| c.chosen.fullest().memory.peak().1.bytes as u64;
    let tight = Device::cpu(bytes(&choice) - 1, 2);
    let choice = choose(&Job::new(&config, &archs, None), 4, &tight).expect("another layout fits");
    assert!(choice.chosen.layout().zero > 1 || choice.chosen.layout().mesh.tensor > 1);
    assert!(bytes(&choice) <= tight.memory_bytes);
}

#[test]
fn axes_that_do_not_divide_the_ranks_are_rejected() {
    let error = refused(&["mesh.data=3", "mesh.tensor=2"], &archs(&llama2_7b(), false), 16, &a800());
    assert_eq!(error.exit_code(), 2);
    assert!(error.message.contains("does not divide 16 ranks"), "{error}");
    assert!(error.hint.expect("a hint").contains("plan 6 ranks"));
}

#[test]
fn a_job_that_does_not_fit_is_rejected_with_layouts_that_fit() {
    let archs = archs(&llama2_7b(), true);
    let error = refused(&["mesh.zero=1", "mesh.tensor=1"], &archs, 4, &a800());
    assert_eq!(error.exit_code(), 2);
    assert!(error.message.contains("does not fit 4 ranks of a800-80g"), "{error}");
    assert!(error.message.contains("GiB in") && error.message.contains("79.2 GiB"), "{error}");
    let hint = error.hint.expect("what would fit");
    assert!(hint.contains("mesh.zero = ") || hint.contains("mesh.tensor = "), "{hint}");
    // The suggested layout fits.
    let offered = hint.split("it fits with ").nth(1).expect("ways").split(", or with ");
    let mut tried = 0;
    for way in offered.filter(|way| way.starts_with("mesh.") && !way.contains('[')) {
        let way = way.replace(' ', "");
        let more: Vec<&str> =
            ["mesh.zero=1", "mesh.tensor=1"].into_iter().filter(|m| !way.starts_with(&m[..m.len() - 1])).collect();
        chosen(&[&more[..], &[&way]].concat(), &archs, 4, &a800());
        tried += 1;
    }
    assert!(tried > 0, "{hint}");
}

#[test]
fn an_error_about_activations_suggests_recomputation_or_smaller_microbatches() {
    let archs = archs(&llama2_7b(), true);
    let more = [
        "gradient.recompute=none",
        "ppo.microbatch_tokens_max=65536",
        "rollout.prompts_per_step=512",
        "ppo.minibatch_samples=512",
    ];
    let error = refused(&[&NAMED[..], &more].concat(), &archs, 16, &a800());
    let hint = error.hint.expect("what would fit");
    assert!(hint.contains("gradient.recompute = \"block\"") && hint.contains("ppo.microbatch_tokens_max = "), "{hint}");
}

#[test]
fn no_more_is_recomputed_than_necessary() {
    let all = archs(&llama2_7b(), true);
    let samples = ["rollout.prompts_per_step=512", "ppo.minibatch_samples=512"];
    let of = |tokens: &str| {
        let more = [&NAMED[..], &samples, &["gradient.recompute=auto", tokens]].concat();
        chosen(&more, &all, 16, &a800()).recompute
    };
    let taken = [8192, 16384, 32768].map(|tokens| of(&format!("ppo.microbatch_tokens_max={tokens}")));
    assert_eq!(taken, [Recompute::None, Recompute::Attention, Recompute::Block]);

    let archs = archs(&small(), false);
    let on = |recompute: &str, bytes: u64| {
        let more = [&SHORT[..], &["ppo.microbatch_tokens_max=65536", recompute]].concat();
        chosen(&more, &archs, 1, &Device::cpu(bytes, 1))
    };
    let bytes = |recompute: &str| on(recompute, 1 << 40).chosen.main().memory.peak().1.bytes as u64;
    let (kept, again) = (bytes("gradient.recompute=none"), bytes("gradient.recompute=block"));
    assert!(again < kept, "{again} and {kept} bytes");
    assert_eq!(on("gradient.recompute=auto", 2 * kept).recompute, Recompute::None);
    assert_ne!(on("gradient.recompute=auto", kept - 1).recompute, Recompute::None);
}

#[test]
fn automatic_micro_batches_have_enough_tokens_or_fill_the_memory_of_a_gpu() {
    let archs = archs(&small(), false);
    // 512 samples of 128 tokens in a minibatch.
    let samples = ["rollout.prompts_per_step=512", "ppo.minibatch_samples=512", "mesh.tensor=1", "mesh.zero=1"];
    let of = |more: &[&str]| fewer(&[&SHORT[..], &samples, more].concat());
    let bytes = |tokens: usize, recompute: &str| {
        let config = of(&[&format!("ppo.microbatch_tokens_max={tokens}"), recompute]);
        let choice = choose(&Job::new(&config, &archs, None), 1, &Device::cpu(1 << 40, 1)).expect("a large machine");
        choice.chosen.main().memory.peak().1.bytes as u64
    };
    let chosen = |recompute: &str, device: &Device| {
        let asked = of(&["ppo.microbatch_tokens_max=auto", recompute]);
        let resolved = microbatch::resolved(&asked, &archs, 1, device);
        assert_eq!(resolved.gradient, asked.gradient, "only micro-batches are chosen here");
        resolved.ppo.microbatch_tokens_max
    };
    let [none, block, auto] = ["none", "block", "auto"].map(|word| format!("gradient.recompute={word}"));
    let on = |bytes: u64| Device::cpu(bytes, 1);
    assert_eq!(chosen(&none, &on(1 << 40)), 4096, "a CPU gains nothing by more");
    assert_eq!(chosen(&none, &on(bytes(4096, &none))), 4096);
    assert_eq!(chosen(&none, &on(bytes(4096, &none) - 1)), 2048);
    assert_eq!(chosen(&none, &on(1 << 20)), 128, "where nothing fits, a row");
    // Recomputation is chosen before fewer tokens.
    assert_eq!(chosen(&auto, &on(bytes(4096, &none) - 1)), 4096);
    assert!(chosen(&auto, &on(bytes(4096, &block) - 1)) < 4096);
    // On a GPU, micro-batches fill the memory, and no more is recomputed for that.
    let large = self::archs(&llama2_7b(), true);
    let fixed = [&NAMED[..], &["gradient.recompute=auto"]].concat();
    for (archs, more, world, tokens) in [(&archs, &[][..], 1, 16384), (&large, &fixed[..], 16, 8192)] {
        let sets = ["ppo.microbatch_tokens_max=auto", "rollout.prompts_per_step=512", "ppo.minibatch_samples=512"];
        let asked = fewer(&[&sets[..], more].concat());
        let rows = Job::new(&asked, archs, None).rows;
        let (config, choice) = microbatch::chosen(&asked, archs, &rows, world, &a800()).expect("it fits");
        assert_eq!(config.ppo.microbatch_tokens_max, tokens);
        let again = choose(&Job::new(&config, archs, None), world, &a800()).expect("it fits");
        assert_eq!((choice.recompute, choice.chosen), (again.recompute, again.chosen), "{tokens}");
    }
    // "auto" survives serialization.
    let written = of(&["ppo.microbatch_tokens_max=auto"]).to_toml();
    assert!(written.contains("microbatch_tokens_max = \"auto\"") && config::parse(&written, &[]).is_ok(), "{written}");
    let error = config::parse(&written, &["ppo.microbatch_tokens_max=many".to_owned()]).expect_err("a word");
    assert!(error.message.contains("must be \"auto\" or an integer"), "{error}");
}

#[test]
fn offloaded_state_stays_on_the_gpu_for_all_updates_of_a_step_if_it_fits() {
    let archs = archs(&llama2_7b(), false);
    let actor = Archs(archs.0.into_iter().filter(|(role, ..)| *role != RoleName::Critic).collect());
    let sets = ["ppo.advantage=reinforce++", "mesh.tensor=1", "rollout.tensor=1", "gradient.recompute=block"];
    let of = |more: &[&str]| fewer(&[&sets[..], &["rollout.prompts_per_step=512"], more].concat());
    let device = Device::gpu("a100-40g", 25.0).expect("it is in the table");
    let on = |config: &Config| choose(&Job::new(config, &actor, None), 8, &device).expect("it fits").chosen;
    let waits = |candidate: &Candidate| candidate.layout().swap.state;
    let many = on(&of(&[]));
    assert_eq!(waits(&many), StateSwap::BetweenSteps, "{}", many.layout().describe());
    assert!(many.layout().describe().contains("during the rollout"), "{}", many.layout().describe());
    // Explicit offloading is kept, and with one update per step nothing is saved.
    let asked = on(&of(&["mesh.offload=[\"optimizer\"]"]));
    assert_eq!(waits(&asked), StateSwap::BetweenUpdates);
    assert!(asked.step_s() > many.step_s(), "{} and {} s", asked.step_s(), many.step_s());
    assert_ne!(waits(&on(&of(&["ppo.minibatch_samples=512"]))), StateSwap::BetweenSteps);
}

#[test]
fn recomputation_is_a_name_or_a_boolean_as_in_older_jobs() {
    let of = |value: &str| job(&[&format!("gradient.recompute={value}")]).gradient.recompute;
    let words = ["auto", "none", "attention", "block", "false", "true"].map(of);
    let (none, block) = (Recompute::None, Recompute::Block);
    assert_eq!(words, [Recompute::Auto, none, Recompute::Attention, block, none, block]);
    let error =
        config::load(Path::new(REFERENCE), &["gradient.recompute=layer".to_string()]).expect_err("no such word");
    assert_eq!(error.hint.as_deref(), Some("use one of auto, none, attention, block"), "{error}");
}

#[test]
fn the_plan_respects_the_arena_limit() {
    let archs = archs(&small(), false);
    let device = Device::cpu(1 << 40, 1);
    let error = refused(&[&SHORT[..], &["mesh.arena_bytes_max=50000000"]].concat(), &archs, 1, &device);
    assert!(error.message.contains("47.7 MiB"), "{error}");
}

#[test]
fn placed_roles_are_planned_on_their_own_ranks() {
    let archs = archs(&llama2_7b(), true);
    let place = "mesh.placement=[{ roles = [\"actor\", \"reference\"], ranks = \"0..8\" }, \
                 { roles = [\"critic\", \"reward\"], ranks = \"8..16\" }]";
    let choice = chosen(&[&NAMED[..], &[place]].concat(), &archs, 16, &a800());
    let [first, second] = &choice.chosen.placed[..] else { panic!("two parts") };
    assert_eq!((first.ranks.clone(), second.ranks.clone()), (0..8, 8..16));
    assert_eq!(second.roles, [RoleName::Critic, RoleName::Reward]);
    assert!(first.memory.kv.is_some() && second.memory.kv.is_none());
    assert_eq!(first.layout.mesh.ranks(), 8);
    let error = refused(&[&place.replace("\"critic\", ", "")], &archs, 16, &a800());
    assert!(error.message.contains("no place for the critic"), "{error}");
    let error = refused(&[&place.replace("8..16", "8..17")], &archs, 16, &a800());
    assert!(error.message.contains("17 ranks"), "{error}");
}
