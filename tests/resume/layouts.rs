//! Whole jobs on every axis of the mesh: the samples and numbers of one rank, and a resume on another layout.

use crate::resume::families;
use crate::resume::job::Job;

/// Ranks and axes.
const LAYOUTS: &[(usize, &str)] = &[
    (3, "mesh.zero=3"),
    (4, "mesh.sequence=2 mesh.tensor=2 mesh.zero=2"),
    (4, "mesh.zero=3 rollout.tensor=2"),
    (2, "mesh.tensor=2 rollout.tensor=1"),
    (2, "mesh.tensor=2"),
    (2, "mesh.pipeline=2"),
    (4, "mesh.pipeline=2 mesh.zero=3"),
    (4, "mesh.pipeline=2 mesh.tensor=2 rollout.tensor=4"),
];

/// Every metric of the first line. If its step has one update, policy_kl is 0 but for rounding, as the gaps are.
fn assert_near(job: &Job, alone: &Job, layout: &str) {
    let (mine, theirs) = (&job.timeless_metrics()[0], &alone.timeless_metrics()[0]);
    // A stage knows the experts of its layers alone.
    let is_known = |key: &str| !(layout.contains("pipeline") && key == "experts_equal_ratio");
    for (key, value) in theirs.iter().filter(|(key, _)| is_known(key)) {
        let (a, b) = (mine[key].as_f64().expect("a number"), value.as_f64().expect("a number"));
        let is_rounding = key.ends_with("gap_max") || key == "policy_kl" && b == 0.0;
        let near = if is_rounding { a.abs() <= 1e-4 } else { (a - b).abs() <= 1e-5 * b.abs().max(1e-3) };
        assert!(near, "{key} on {layout}: {a} against {b}");
    }
}

#[test]
fn a_ppo_step_on_any_layout_has_the_samples_and_the_metrics_of_one_rank() {
    let masked = "ppo.loss=clip rollout.keep_sampling_mask=true";
    for (name, loss, layouts) in [
        ("clip", "ppo.loss=clip", LAYOUTS),
        ("gspo", "ppo.loss=gspo ppo.advantage=remax", &LAYOUTS[..2]),
        ("mask", masked, &LAYOUTS[2..]),
        ("masked", "ppo.loss=masked ppo.lambda_alpha=0.5 ppo.critic_epochs=2 ppo.mask_truncated=true", &LAYOUTS[..2]),
        ("trust", "ppo.loss=sequence_trust ppo.sequence_kl_max=0.01 ppo.advantage=flash-reinforce", &LAYOUTS[1..2]),
    ] {
        let sets = format!(
            "job.steps=1 ppo.epochs=1 {loss} ppo.entropy_coef=0.01 ppo.kl_in=loss ppo.kl_estimator=k3 \
             rollout.top_k=100 ppo.minibatch_samples=16 ppo.ptx_coef=0.1 data.pretrain=[\"texts.jsonl\"]"
        );
        // These losses do not recompute the log-probabilities at sampling.
        let is_against_sampler = ["masked", "trust"].contains(&name);
        let alone = Job::ppo(&format!("layout-{name}-alone")).with(&sets).done();
        for (i, (ranks, layout)) in layouts.iter().enumerate() {
            // A batch smaller than a rank's share: ranks claim prompts whenever they have a free slot.
            let job = Job::ppo(&format!("layout-{name}-{i}")).on(*ranks).with(&sets).with("rollout.batch_max=3");
            let job = job.with(layout).done();
            let (mine, theirs) = (&job.rollouts()["step_000001"], &alone.rollouts()["step_000001"]);
            for what in ["tokens", "token_offsets", "response_offsets", "prompt_id", "sample", "finish"] {
                assert_eq!(mine[what], theirs[what], "{what} on {layout}");
            }
            assert_near(&job, &alone, layout);
            let has = |word: &str| layout.contains(word);
            let line = &job.metrics()[0];
            for key in ["sampler_gap_max", "time_old_logprobs_s"] {
                let again = !is_against_sampler && (has("sequence") || has("rollout"));
                assert_eq!(line.contains_key(key), again, "{key} on {layout}: sampling has another order of sums");
            }
            let gap = line["logprob_gap_max"].as_f64().expect("a number");
            assert!(gap == 0.0 || is_against_sampler && gap < 1e-4, "{gap} on {layout}");
            for key in ["reshard_bytes", "time_reshard_s"] {
                let is_moved = ["zero=3", "rollout", "pipeline"].into_iter().any(has);
                assert_eq!(line.contains_key(key), is_moved, "{key} on {layout}");
            }
            assert!(line["rollout_prompts_stolen"].as_f64() >= Some(0.0), "{layout}");
            assert!(line["time_comm_exposed_s"].as_f64() > Some(0.0), "{layout}");
            assert!(line["time_train_slowest_ratio"].as_f64() >= Some(1.0), "{layout}");
        }
    }
}

/// The layers have eight experts.
#[test]
fn a_ppo_job_with_experts_on_several_ranks_has_the_metrics_of_one_rank_and_resumes_bitwise() {
    let layouts = [
        (2, "mesh.expert=2"),
        (4, "mesh.expert=2 mesh.tensor=2"),
        (4, "mesh.expert=2 mesh.pipeline=2"),
        (4, "mesh.expert=2 mesh.zero=3 rollout.tensor=2"),
        (4, "mesh.expert=4 mesh.zero=2"),
    ];
    for (model, layouts) in [("qwen3_moe-stacked", &layouts[..]), ("qwen3_5_moe_text", &layouts[..3])] {
        let made = format!("divided-{model}");
        families::make(model, &made);
        let sets = format!(
            "model.actor={made} job.steps=2 ppo.minibatch_samples=16 rollout.response_tokens_max=16 \
             model.router_aux_loss_coef=0.01 checkpoint.every_steps=1"
        );
        let alone = Job::ppo(&format!("{made}-alone")).with(&sets).done();
        for (i, (ranks, layout)) in layouts.iter().enumerate() {
            let job = |run: &str| Job::ppo(&format!("{made}-{i}-{run}")).on(*ranks).with(&sets).with(layout);
            let whole = job("whole").done();
            assert_near(&whole, &alone, layout);
            if !layout.contains("rollout") {
                assert_eq!(whole.numbers("logprob_gap_max"), [0.0; 2], "{layout}");
            }
            let is_cut = layout.contains("pipeline");
            assert_eq!(whole.numbers("experts_equal_ratio"), [1.0; 2][..if is_cut { 0 } else { 2 }], "{layout}");
            let stopped = job("stopped");
            for _ in 0..2 {
                stopped.clone().with("checkpoint.max_hours=1e-9").run().assert(85, &["stopped at step"]);
            }
            stopped.done().assert_same(&whole);
        }
    }
}

#[test]
fn adapters_on_experts_in_nf4_on_several_ranks_have_the_metrics_of_one_rank_and_resume_bitwise() {
    families::make("qwen3_moe-stacked", "quantized-experts");
    let sets = "model.actor=quantized-experts lora.rank=3 lora.alpha=6 optim.actor.lr=0.02 model.quantize=nf4 \
                job.steps=2 ppo.minibatch_samples=16 rollout.response_tokens_max=16 checkpoint.every_steps=1";
    let job = |run: &str, ranks, layout: &str| {
        Job::ppo(&format!("quantized-experts-{run}")).on(ranks).with(sets).with(layout)
    };
    let alone = job("alone", 0, "").done();
    let mut done = Vec::new();
    for (ranks, expert, stage) in [(2, 2, 1), (4, 2, 2), (4, 2, 3), (4, 4, 3)] {
        let (layout, run) = (format!("mesh.expert={expert} mesh.zero={stage}"), format!("{ranks}-{expert}-{stage}"));
        let whole = job(&run, ranks, &layout).done();
        assert_near(&whole, &alone, &layout);
        assert_eq!(whole.numbers("logprob_gap_max"), [0.0; 2], "{layout}");
        assert_eq!(whole.numbers("experts_equal_ratio"), [1.0; 2], "{layout}");
        let stopped = job(&format!("{run}-stopped"), ranks, &layout);
        for _ in 0..2 {
            stopped.clone().with("checkpoint.max_hours=1e-9").run().assert(85, &["stopped at step"]);
        }
        stopped.done().assert_same(&whole);
        done.push(whole);
    }
    done[2].assert_same(&done[1]);
}

/// Sinks of heads and biases of experts are divided, or whole on each rank.
#[test]
fn a_ppo_job_on_gpt_oss_on_several_ranks_has_the_metrics_of_one_rank() {
    families::make("gpt_oss", "sinks");
    let sets = "model.actor=sinks job.steps=2 ppo.epochs=1 ppo.minibatch_samples=16 rollout.response_tokens_max=16 \
                model.router_aux_loss_coef=0.01";
    let alone = Job::ppo("sinks-alone").with(sets).done();
    let layouts =
        [(2, "mesh.tensor=2"), (2, "mesh.sequence=2"), (2, "mesh.expert=2"), (4, "mesh.expert=4 mesh.zero=3")];
    for (i, (ranks, layout)) in layouts.into_iter().enumerate() {
        let job = Job::ppo(&format!("sinks-{i}")).on(ranks).with(sets).with(layout).done();
        assert_near(&job, &alone, layout);
        if !layout.contains("sequence") {
            assert_eq!(job.numbers("logprob_gap_max"), [0.0; 2], "{layout}");
        }
        assert_eq!(job.numbers("experts_equal_ratio"), [1.0; 2], "{layout}");
    }
}

#[test]
fn an_sft_step_and_evaluation_on_any_layout_have_the_metrics_of_one_rank() {
    let texts = "data.pretrain=[\"texts\"] data.pretrain_tokens_max=48 sft.pretrain_coef=0.5";
    let sets = &format!("job.steps=2 eval.every_steps=2 {texts}");
    let alone = Job::sft("layout-sft-alone").with(sets).done();
    assert!(
        alone.numbers("ptx_loss").iter().zip(alone.numbers("loss")).all(|(ptx, all)| *ptx > 0.5 && all > 0.5 * ptx)
    );
    // A budget of one token packs no rows together.
    let unpacked = (2, "mesh.zero=0 sft.microbatch_tokens_max=1");
    for (i, (ranks, layout)) in LAYOUTS.iter().take(2).chain([&unpacked]).enumerate() {
        let job = Job::sft(&format!("layout-sft-{i}")).on(*ranks).with(sets).with(layout).done();
        assert_near(&job, &alone, layout);
        let last = |job: &Job| job.metrics().iter().filter_map(|line| line.get("eval_loss")?.as_f64()).next_back();
        let (a, b) = (last(&job).expect("evaluated"), last(&alone).expect("evaluated"));
        assert!((a - b).abs() <= 1e-4 * b, "eval_loss on {layout}: {a} against {b}");
    }
}

#[test]
fn a_run_resumes_on_another_layout_and_reports_what_changed() {
    // The large eps makes an AdamW step smooth in the gradient, so rounding errors stay small over updates.
    // A schedule would depend on job.steps.
    let smooth = "optim.actor.eps=0.1 optim.actor.lr=0.05 optim.actor.schedule=constant optim.actor.warmup_ratio=0.0 \
                  optim.critic.eps=0.1 optim.critic.lr=0.05 optim.critic.schedule=constant optim.critic.warmup_ratio=0.0";
    let whole = Job::ppo("moved-layout-whole").with("job.steps=3").with(smooth).done();
    let job = Job::ppo("moved-layout").with(smooth);
    job.clone().on(4).with("job.steps=1 mesh.tensor=2 mesh.zero=2").done();
    let ended = job.clone().on(4).with("job.steps=2 mesh.sequence=2 mesh.zero=3").run();
    let words = "resuming with changes: job.steps = 2 (was 1), mesh.sequence = 2 (was 1), mesh.tensor = \"auto\" (was \
                 2), \
                 mesh.zero = 3 (was 2)";
    ended.assert(0, &[words]);
    let job = job.with("job.steps=3").done();
    assert_eq!(job.numbers("score_mean"), whole.numbers("score_mean"), "the same answers are right in every step");
    for key in ["policy_loss", "value_loss", "grad_norm_actor", "kl_mean"] {
        let numbers = job.numbers(key);
        assert_eq!(numbers.len(), 3);
        for (a, b) in numbers.iter().zip(whole.numbers(key)) {
            assert!((a - b).abs() <= 1e-4 * b.abs(), "{key}: {a} against {b}");
        }
    }
}
