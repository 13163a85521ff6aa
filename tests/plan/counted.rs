//! What a run does is counted: reward models, a rollout that runs ahead, sampling masks, and every owner of memory.

use super::models::{NAMED, a800, arch, archs, job, mixture, small};
use rlhf_hpc::config::job::DeviceName;
use rlhf_hpc::config::mesh::RoleName::{Actor, Reward, Rollout};
use rlhf_hpc::config::{self, Config};
use rlhf_hpc::launch::layout::{Layout, Swap};
use rlhf_hpc::mesh::Mesh;
use rlhf_hpc::model::Head;
use rlhf_hpc::plan::choose::Candidate;
use rlhf_hpc::plan::time::{Stage, Time};
use rlhf_hpc::plan::{self, Device, Job, Memory, Phase, memory, microbatch};
use rlhf_hpc::train::{self, Archs};
use std::fs;
use std::path::Path;

/// Few samples, which are planned sooner.
const FEW: [&str; 4] = [
    "rollout.prompts_per_step=32",
    "ppo.minibatch_samples=32",
    "data.prompt_tokens_max=64",
    "rollout.response_tokens_max=64",
];

fn chosen(more: &[&str], archs: &Archs, ranks: usize) -> Candidate {
    let config = job(&[&FEW[..], &NAMED, more].concat());
    plan::choose(&Job::new(&config, archs, None), ranks, &a800()).expect("it fits").chosen
}

/// FLOPs of the parts with this name while models score.
fn scored(time: &Time, name: &str) -> f64 {
    let parts = time.parts.iter().filter(|part| part.stage == Stage::Scoring && part.name == name);
    parts.map(|part| part.work.flops).sum()
}

#[test]
fn the_forward_of_a_reward_model_is_counted_on_the_ranks_that_hold_it() {
    let [without, with] =
        [false, true].map(|reward| chosen(&["ppo.old_logprobs=rollout"], &archs(&small(), reward), 2));
    let time = &with.main().time;
    // Reference and critic have the shape of the reward model, and the reward model sees the same tokens.
    let (of_reward, of_others) = (scored(time, "gemm of reward models"), scored(time, "gemm"));
    assert!((2.0 * of_reward / of_others - 1.0).abs() < 0.05, "{of_reward} and {of_others}");
    assert!(with.seconds_of(Stage::Scoring) > 1.2 * without.seconds_of(Stage::Scoring));
    let place = "mesh.placement=[{ roles = [\"actor\", \"reference\", \"critic\"], ranks = \"0..1\" }, \
                 { roles = [\"reward\"], ranks = \"1..2\" }]";
    let apart = chosen(&[place], &archs(&small(), true), 2);
    let found = apart.placed.iter().map(|placed| scored(&placed.time, "gemm of reward models") > 0.0);
    assert_eq!(found.collect::<Vec<_>>(), [false, true]);
}

#[test]
fn a_step_takes_as_long_as_the_slower_side_if_the_rollout_is_async() {
    let place = "mesh.placement=[{ roles = [\"actor\", \"reference\", \"critic\"], ranks = \"0..1\" }, \
                 { roles = [\"rollout\", \"reward\"], ranks = \"1..2\" }]";
    let mut archs = archs(&small(), true);
    archs.0.push((Rollout, Head::LanguageModel, arch(&small())));
    let in_step = chosen(&[place], &archs, 2);
    assert_eq!(in_step.sides(Time::of_stage), None);
    for updates in [1, 2] {
        let ahead = chosen(&[place, &format!("mesh.async_updates_max={updates}")], &archs, 2);
        let [rollout, learning] = ahead.sides(Time::of_stage).expect("two sides");
        assert_eq!(ahead.step_s(), f64::max(rollout, learning));
        assert!(rollout > 0.0 && learning > 0.0 && ahead.step_s() < in_step.step_s());
        assert!(rollout + learning >= in_step.step_s(), "{rollout} + {learning}, {} in step", in_step.step_s());
    }
}

#[test]
fn an_evaluation_with_beams_scores_one_response_of_a_search_and_decodes_all() {
    let flops = |beams: usize, reward: bool| -> f64 {
        let beams = format!("eval.beams={beams}");
        let eval = ["job.kind=eval", "data.eval_split=test", "eval.samples_max=8", &beams];
        let parts = chosen(&eval, &archs(&small(), reward), 1).main().time.parts.clone();
        parts.iter().map(|part| part.work.flops).sum()
    };
    let scoring = [1, 4].map(|beams| flops(beams, true) - flops(beams, false));
    assert!(scoring[0] > 0.0 && scoring[0] == scoring[1], "{scoring:?}");
    let searching = [1, 4].map(|beams| flops(beams, false));
    assert!(searching[1] > 1.5 * searching[0], "{searching:?}");
}

#[test]
fn a_decode_step_is_counted_once_on_any_rollout_tensor() {
    let read = |tensor: usize| {
        let sets = [format!("rollout.tensor={tensor}"), format!("mesh.tensor={tensor}")];
        let chosen = chosen(&[&sets[0], &sets[1], "mesh.data=1"], &archs(&small(), false), tensor);
        let parts = chosen.main().time.parts.clone();
        let decode = parts.iter().filter(|part| part.stage == Stage::Decode && part.name == "gemm");
        decode.map(|part| part.work.flops).sum::<f64>() * tensor as f64
    };
    let (one, two) = (read(1), read(2));
    assert!(one > 0.0 && (two / one - 1.0).abs() < 0.05, "{two} FLOPs of two ranks, {one} of one");
}

#[test]
fn the_rollout_of_pipeline_stages_sums_over_the_tensor_ranks_of_training() {
    let chosen = chosen(&["mesh.pipeline=2", "mesh.tensor=2", "rollout.tensor=2"], &archs(&small(), false), 4);
    let parts = &chosen.main().time.parts;
    let names = parts.iter().map(|part| part.name.as_str()).filter(|name| name.starts_with("decode: "));
    let sums: Vec<_> = names.filter(|name| name.contains("sum_ordered over tensor")).collect();
    assert_eq!(sums, ["decode: sum_ordered over tensor"]);
}

/// A job that trains adapters on a base in nf4.
fn on_nf4(more: &[&str], ranks: usize) -> Candidate {
    chosen(&[&["lora.rank=8", "model.quantize=nf4"], more].concat(), &archs(&small(), false), ranks)
}

#[test]
fn decoding_of_few_rows_on_a_base_in_nf4_reads_its_codes() {
    let [few, many] = [64, 128].map(|rows| {
        let rows = format!("rollout.batch_max={rows}");
        let chosen = on_nf4(&[&rows, "rollout.prompts_per_step=128", "ppo.minibatch_samples=128"], 1);
        let work = |name: &str| {
            let parts = &chosen.main().time.parts;
            let decode = parts.iter().filter(|part| part.stage == Stage::Decode && part.name == name);
            decode.map(|part| part.work.bytes).sum::<f64>()
        };
        ["gemm", "dequantize"].map(work)
    });
    assert!(few[1] == 0.0 && many[1] > 0.0, "{few:?} {many:?}");
    // Two batches read four bits, four times each; one reads sixteen once.
    assert!(few[0] < 2.5 * many[0], "{few:?} {many:?}");
}

#[test]
fn a_base_in_nf4_is_shared_over_data_ranks_at_stage_3() {
    let [whole, half] = [2, 3].map(|stage| {
        let chosen = on_nf4(&[&format!("mesh.zero={stage}")], 2);
        chosen.main().memory.bytes_of(Phase::Train, "weights of the frozen base")
    });
    assert!((0.95..1.05).contains(&(2.0 * half as f64 / whole as f64)), "{half} of {whole} bytes");
}

#[test]
fn an_expert_axis_divides_experts_in_nf4_and_its_traffic_is_counted() {
    let archs = archs(&mixture(), false);
    let on = |expert: usize, more: &[&str]| {
        let expert = format!("mesh.expert={expert}");
        let chosen = chosen(&[&["mesh.zero=2", &expert], more].concat(), &archs, 4);
        let parts = chosen.main().time.parts.iter().filter(|part| part.name.ends_with("all_to_all over expert"));
        (chosen.main().memory.clone(), parts.map(|part| part.work.bytes).sum::<f64>())
    };
    // Those of experts and routers have no kernels.
    let exclude = "lora.exclude=[\"gate_up_proj\",\"experts.down_proj\",\"mlp.gate\"]";
    let adapters = ["lora.rank=8", "model.quantize=nf4", exclude];
    let bases = [1, 2, 4].map(|expert| {
        let (memory, moved) = on(expert, &adapters);
        assert_eq!(moved > 0.0, expert > 1, "{moved} bytes");
        memory.bytes_of(Phase::Train, "weights of the frozen base") as f64
    });
    // With two ranks, half of the experts are elsewhere; with four, another quarter.
    let [half, quarter] = [bases[0] - bases[1], bases[1] - bases[2]];
    assert!(half > 0.3 * bases[0] && (1.9..2.1).contains(&(half / quarter)), "{bases:?}");
    let [(whole, _), (divided, moved)] = [1, 2].map(|expert| on(expert, &[]));
    let [whole, divided] = [whole, divided].map(|memory| memory.bytes_of(Phase::Train, "weights of the actor") as f64);
    assert!(moved > 0.0 && divided < 0.75 * whole, "{divided} of {whole} bytes, {moved} bytes moved");
}

/// The memory of one rank on a CPU.
fn on_cpu(config: &Config, archs: &Archs) -> Memory {
    let layout = Layout { mesh: Mesh::data_only(1), zero: 1, chunks: 1, rollout_tensor: 1, swap: Swap::default() };
    let device = Device { threads: 1, ..Device::cpu(1 << 40, 1) };
    plan::count(&Job::new(config, archs, None), &layout, &device, &[Actor]).0
}

#[test]
fn sampling_masks_are_counted_at_the_largest_size_that_the_filters_allow() {
    let archs = archs(&small(), false);
    let masks = |more: &[&str]| {
        let memory = on_cpu(&job(&[&FEW[..], more].concat()), &archs);
        [Phase::Score, Phase::Train].map(|phase| memory.bytes_of(phase, "sampling masks"))
    };
    assert_eq!(masks(&["rollout.top_p=0.95"]), [0, 0]);
    let keep = "rollout.keep_sampling_mask=true";
    // A bit for each of 2048 tokens, or at most two bytes for each of ten.
    for (filter, bytes) in [("rollout.top_p=0.95", 2 + 2048 / 8), ("rollout.top_k=10", 20)] {
        assert_eq!(masks(&[keep, filter]), [2 * 32 * 64 * (bytes + 32); 2], "{filter}");
    }
}

/// Phases need no such test: `time` and `memory` match on all of them.
#[test]
fn the_memory_of_every_recipe_has_owners_that_are_in_the_tables() {
    let (root, dir) = (Path::new(env!("CARGO_MANIFEST_DIR")), tempfile::tempdir().expect("a folder"));
    let recipes = fs::read_dir(root.join("jobs/recipes")).expect("recipes").map(|entry| entry.expect("one").path());
    let recipes = recipes.filter(|path| path.extension().is_some_and(|end| end == "toml"));
    let mut planned = 0;
    for recipe in recipes.chain([root.join("jobs/async.toml"), root.join("jobs/llama2-7b.toml")]) {
        let copy = dir.path().join("jobs/recipes").join(recipe.file_name().expect("a name"));
        fs::create_dir_all(copy.parent().expect("a folder")).expect("made");
        fs::copy(&recipe, &copy).expect("copied");
        let sets = ["rollout.prompts_per_step=4", "reward.models=[]", "reward.rule=length"].map(String::from);
        let mut config = config::load(&copy, &sets).unwrap_or_else(|e| panic!("{}: {e}", recipe.display()));
        let named = [&config.model.actor, &config.model.reference, &config.model.critic];
        for model in named.into_iter().chain(&config.model.teachers).filter(|model| !model.as_os_str().is_empty()) {
            fs::create_dir_all(model).expect("made");
            fs::write(model.join("config.json"), small().to_string()).expect("written");
        }
        config.resolve_device(DeviceName::Cpu);
        config.set_microbatches(microbatch::ENOUGH);
        let mut archs = train::planned_archs(&config, None).unwrap_or_else(|e| panic!("{}: {e}", recipe.display()));
        if train::shape(&config).has_rollout() {
            archs.0.push((Reward, Head::Value, arch(&small())));
        }
        let memory = on_cpu(&config, &archs);
        assert!(memory.failed.is_none(), "{}: {:?}", recipe.display(), memory.failed);
        for owner in memory.peaks.values().flat_map(|peak| peak.parts.keys()) {
            assert!(memory::knows(owner), "{}: {owner}", recipe.display());
        }
        planned += 1;
    }
    assert!(planned > 10, "{planned} recipes");
}

#[test]
fn expected_responses_have_the_time_of_their_length_and_the_memory_of_the_longest() {
    let archs = archs(&small(), true);
    let count_with = |more: &[&str]| {
        let config = job(&[&FEW[..], &NAMED, more].concat());
        let layout = Layout { mesh: Mesh::data_only(2), zero: 3, chunks: 1, rollout_tensor: 1, swap: Swap::default() };
        plan::count(&Job::new(&config, &archs, None), &layout, &a800(), &[Actor])
    };
    let (memory, time) = count_with(&["rollout.response_tokens_max=384"]);
    let of_expected = ["rollout.response_tokens_max=384", "rollout.response_tokens_expected=96"];
    let (memory_expected, time_expected) = count_with(&of_expected);
    let (_, time_short) = count_with(&["rollout.response_tokens_max=96"]);
    assert_eq!((memory_expected.peaks, memory_expected.kv), (memory.peaks, memory.kv));
    assert!(memory_expected.kv_expected.is_some() && memory.kv_expected.is_none());
    assert_eq!((time_expected.tokens, time_expected.step_s()), (time_short.tokens, time_short.step_s()));
    assert!(time_expected.step_s() < 0.5 * time.step_s());
}
