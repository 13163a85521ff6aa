//! The load-balancing loss of routers, their measurements, and the linear layers of models with experts.

use super::golden::{Golden, compare_gradients, directory};
use rlhf_hpc::comm::Axes;
use rlhf_hpc::config::job::GradientConfig;
use rlhf_hpc::config::optim::OptimConfig;
use rlhf_hpc::device::Device;
use rlhf_hpc::learn::packed::PackedRow;
use rlhf_hpc::learn::sums::Sums;
use rlhf_hpc::learn::{Learner, MicroBatch, Objective, Pass, Role, routing};
use rlhf_hpc::model::tuning::Tuning;
use rlhf_hpc::model::{Arch, Head, ParamTable, load};
use rlhf_hpc::tensor::DType;

const MIXTURES: [&str; 8] = [
    "mixtral",
    "qwen3_moe",
    "qwen3_moe-stacked",
    "qwen3_next",
    "qwen3_5_moe_text",
    "qwen3_5_moe",
    "gpt_oss",
    "gpt_oss-mxfp4",
];

/// A loss that is always 0.
struct Nothing {
    rows: Vec<Vec<u32>>,
}

impl Objective for Nothing {
    fn lengths(&self) -> Vec<usize> {
        self.rows.iter().map(Vec::len).collect()
    }

    fn pack(&self, rows: &[usize]) -> PackedRow {
        let mut packed = PackedRow::new();
        for &row in rows {
            packed.push(&self.rows[row], 1);
        }
        packed
    }

    fn loss(&self, _: &MicroBatch, pass: Pass) -> Sums {
        pass.run(|head| {
            head.token_loss(1.0, &mut |_, _, _, dlogprobs, dentropy| {
                dlogprobs.fill(0.0);
                dentropy.fill(0.0);
            })
        });
        Sums::from_list([("loss", 0.0)])
    }
}

#[test]
fn the_load_balancing_loss_is_that_of_transformers_over_all_rows_in_any_number_of_microbatches() {
    for name in MIXTURES {
        let (golden, axes) = (Golden::read(name), Axes::one());
        let (tokens, ends) = (golden.integers("tokens"), golden.integers("cu_seqlens"));
        let rows = ends.windows(2).map(|ends| tokens[ends[0] as usize..ends[1] as usize].to_vec()).collect();
        let rows = Nothing { rows };
        let (arch, _) = load::load(Device::Cpu, &directory(name), Head::LanguageModel, DType::F32, 0).expect("a model");
        for (tokens_max, count) in [(1000, 1), (70, 2)] {
            let (_, weights) =
                load::load(Device::Cpu, &directory(name), Head::LanguageModel, DType::F32, 0).expect("a model");
            let role = Role::new("actor", &directory(name), &arch.clone().for_rows(128), weights, &axes);
            let (optim, gradient) = (OptimConfig::with_lr(1e-3), GradientConfig::default());
            let learner = Learner::new(Device::Cpu, role, &optim, &gradient, 10, &axes, 0).expect("a learner");
            let mut learner = learner.with_router_loss(1.0);
            learner.accumulate(&axes, tokens_max, &[&rows]);
            assert!(learner.microbatches.len() >= count, "{name}: {:?}", learner.microbatches);
            learner.sum.finish();
            compare_gradients(name, &golden, "aux.", &learner.sum.grads, 1e-4);
            let metrics = routing::metrics(&learner.measured);
            let value = |key: &str| metrics.iter().find(|(name, _)| name == key).expect("it is measured").1;
            let want = f64::from(golden.floats("aux_loss")[0]);
            assert!((value("router_aux_loss") - want).abs() < 1e-5, "{name}: {metrics:?}, not {want}");
            let experts = arch.feeds().find_map(|feed| feed.experts()).expect("experts").count;
            let loads: Vec<f64> = (0..experts).map(|e| value(&format!("expert_load_{e}"))).collect();
            assert!((loads.iter().sum::<f64>() / experts as f64 - 1.0).abs() < 1e-9, "{loads:?}");
            assert_eq!(value("expert_load_max"), loads.iter().copied().fold(0.0, f64::max));
            assert!((0.1..(experts as f64).ln()).contains(&value("router_entropy")), "{name}: {metrics:?}");
        }
    }
}

#[test]
fn a_frozen_mlp_has_frozen_routers_and_experts() {
    for name in MIXTURES {
        let arch = Arch::load(&directory(name)).expect("a model");
        let params = ParamTable::new(&arch, Head::LanguageModel).shapes();
        let frozen = Tuning::freeze(&["mlp".into()], "model.freeze", &params).expect("the rest trains");
        assert!(frozen.whole.iter().all(|name| !name.contains("experts") && !name.contains(".mlp.")), "{name}");
    }
}
