//! `jobs` and `schema`: what a job of one's own starts from.

use super::fixture::Fixture;
use rlhf_hpc::config;

#[test]
fn every_recipe_is_copied_with_its_files_and_is_a_job() {
    let fixture = Fixture::new();
    let listed = fixture.run(&["jobs"]).well();
    let names: Vec<&str> = listed.stdout.lines().map(|line| line.split("  ").next().expect("a name")).collect();
    assert_eq!(
        names,
        [
            "sft",
            "reward-model",
            "dpo",
            "kto",
            "step-reward",
            "distill",
            "distill-on-policy",
            "grpo",
            "rloo",
            "remax",
            "reinforce++",
            "ppo-python-reward",
            "long-context",
            "ppo-7b",
            "slurm",
            "quickstart"
        ]
    );
    for name in names {
        let to = format!("copied/{name}/");
        let copied = fixture.run(&["jobs", "copy", name, "--to", &to]).well();
        assert!(copied.stderr.contains("change: ") && copied.stderr.contains("next:   "), "{}", copied.stderr);
        let file = copied.stderr.split(": the recipe").next().expect("a path").to_string();
        if name == "slurm" {
            assert!(file.ends_with("ppo.sbatch") && fixture.text(&file).starts_with("#!/bin/bash"));
            continue;
        }
        let job = config::load(&fixture.path(&file), &[]).and_then(|job| job.check().map(|()| job));
        let job = job.unwrap_or_else(|e| panic!("{e}"));
        for python in job.reward.python {
            assert!(fixture.path(&to).join(python.file).is_file(), "{name}");
        }
        let again = fixture.run(&["jobs", "copy", name, "--to", &file]);
        again.refused(2, &["exists already"]);
    }
}

#[test]
fn a_file_beside_a_recipe_stays_as_it_is_where_there_is_one() {
    let fixture = Fixture::new();
    fixture.write("reward.py", "mine");
    let copied = fixture.run(&["jobs", "copy", "ppo-python-reward"]).well();
    assert!(copied.stderr.contains("reward.py: is there already"), "{}", copied.stderr);
    assert!(copied.stderr.contains("next:   rlhf-hpc run ppo-python-reward.toml --dry-run"), "{}", copied.stderr);
    assert_eq!(fixture.text("reward.py"), "mine");
}

#[test]
fn the_command_that_the_recipe_of_7b_names_plans_it_without_weights() {
    let fixture = Fixture::new();
    let copied = fixture.run(&["jobs", "copy", "ppo-7b", "--to", "big.toml"]).well();
    let next = copied.stderr.lines().find_map(|line| line.strip_prefix("next:   rlhf-hpc ")).expect("a command");
    let plan = fixture.run(&next.split(' ').collect::<Vec<_>>()).well();
    assert!(plan.stdout.contains("a800") && plan.stdout.contains("16 ranks"), "{}", plan.stdout);
}

#[test]
fn schema_prints_the_schema_of_a_job_as_json() {
    let printed = Fixture::new().run(&["schema"]).well().stdout;
    assert_eq!(serde_json::from_str::<serde_json::Value>(&printed).expect("JSON"), config::schema());
}
