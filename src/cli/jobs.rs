//! `jobs`: the job recipes in the binary, as starting points for a user's own job.

use super::out::{note, say};
use crate::config;
use crate::error::{Error, Result};
use argh::FromArgs;
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// List the job recipes, or copy one to edit: `rlhf-hpc jobs copy grpo`.
#[derive(FromArgs, Debug)]
#[argh(subcommand, name = "jobs")]
pub struct Args {
    #[argh(subcommand)]
    what: Option<What>,
}

#[derive(FromArgs, Debug)]
#[argh(subcommand)]
enum What {
    Copy(CopyArgs),
}

/// Write a recipe to edit, with the files that it names, and print the keys to change and the next command. Existing
/// files are not overwritten.
#[derive(FromArgs, Debug)]
#[argh(subcommand, name = "copy")]
struct CopyArgs {
    /// the name of a recipe; `rlhf-hpc jobs` lists them
    #[argh(positional)]
    name: String,
    /// output file or directory (default: NAME.toml in the current directory)
    #[argh(option)]
    to: Option<PathBuf>,
}

struct Recipe {
    name: &'static str,
    about: &'static str,
    /// The file name; `name` with `.toml` if empty.
    file: &'static str,
    text: &'static str,
    /// Files that the recipe names; they are written next to it.
    beside: &'static [(&'static str, &'static str)],
    change: &'static str,
    /// The next command. FILE is replaced by the recipe's path, DIR and NAME by the two parts of the path.
    next: &'static str,
}

macro_rules! text {
    ($($path:literal),*) => {
        include_str!(concat!("../../jobs/", $($path),*))
    };
}

const REWARD: (&str, &str) = ("reward.py", text!("recipes/reward.py"));
/// The keys to change in a recipe whose reward is a rule.
const RL_CHANGE: &str = "model.actor, data.prompts and data.label_key; reward: a rule, python, http, models or judge (rlhf-hpc help rewards)";
const SLURM: (&str, &str) = ("slurm.sh", text!("slurm.sh"));
const SBATCH: &str = "cd DIR && RLHF_HPC=BINARY RLHF_JOB=JOB.toml sbatch NAME";

/// The default of a recipe: one file with the recipe's name.
const JOB: Recipe =
    Recipe { name: "", about: "", file: "", text: "", beside: &[], change: "", next: "rlhf-hpc run FILE --dry-run" };

/// A recipe of jobs/recipes: its name, which is also its file's, a description, and the keys to change.
macro_rules! recipe {
    ($name:literal, $about:literal, $change:expr) => {
        Recipe { name: $name, about: $about, text: text!("recipes/", $name, ".toml"), change: $change, ..JOB }
    };
}

const RECIPES: &[Recipe] = &[
    recipe!("sft", "supervised fine-tuning on prompts with responses", "model.actor, data.prompts"),
    recipe!(
        "reward-model",
        "reward model: scores responses, trained on pairs of a chosen and a rejected response",
        "model.actor, data.prompts"
    ),
    recipe!(
        "dpo",
        "DPO: trains a policy on the same pairs, without a reward model; also IPO, SimPO and ORPO",
        "model.actor, data.prompts"
    ),
    recipe!(
        "kto",
        "KTO: trains a policy on single responses that are labeled good or bad",
        "model.actor, data.prompts and data.label_key"
    ),
    recipe!(
        "step-reward",
        "process reward model: predicts after each step of an answer whether the step is correct",
        "model.actor, data.prompts and data.label_key, step_reward.placeholder"
    ),
    recipe!(
        "distill",
        "distillation: a student learns a teacher's token distributions on given responses",
        "model.actor, model.teachers, data.prompts"
    ),
    recipe!(
        "distill-on-policy",
        "on-policy distillation: the same on the student's own responses",
        "model.actor, model.teachers, data.prompts; optionally reward"
    ),
    recipe!("grpo", "GRPO: a group of responses to each prompt, a rule as reward, no critic", RL_CHANGE),
    recipe!("dapo", "DAPO: GRPO on prompts whose responses differ in reward, a higher upper clip, no KL", RL_CHANGE),
    recipe!("rloo", "RLOO: the other responses to a prompt as baseline, no critic", RL_CHANGE),
    recipe!("remax", "ReMax: the greedy response to each prompt as baseline, no critic, no groups", RL_CHANGE),
    recipe!("reinforce++", "REINFORCE++: one response to each prompt, no critic, no groups", RL_CHANGE),
    Recipe {
        beside: &[REWARD],
        ..recipe!(
            "ppo-python-reward",
            "PPO with a critic, scored by a Python function (reward.py)",
            "model.actor, data.prompts and data.label_key, the function in reward.py"
        )
    },
    recipe!(
        "eval",
        "evaluation of a model or a checkpoint: several sets, pass@k, majority vote; no training",
        "model.actor, data.prompts, data.eval_sets, data.label_key, and the reward as in training"
    ),
    recipe!(
        "long-context",
        "rows of 32,768 tokens, sharded over several ranks: sequence axis, ring attention",
        "model.actor, data.prompts, mesh.sequence for your rows and GPUs"
    ),
    Recipe {
        name: "ppo-7b",
        about: "PPO of Llama-2-7B with a critic on 2 nodes x 8 GPUs; can be planned without weights",
        text: text!("llama2-7b.toml"),
        beside: &[
            REWARD,
            ("models/llama2-7b-sft/config.json", text!("models/llama2-7b-sft/config.json")),
            ("models/llama2-7b-rm/config.json", text!("models/llama2-7b-rm/config.json")),
        ],
        change: "model.actor, model.reference and model.critic, data.prompts, the function in reward.py",
        next: "rlhf-hpc plan FILE --ranks 16 --gpu a800-80g",
        ..JOB
    },
    Recipe {
        name: "slurm",
        about: "batch script: starts the ranks, saves before the time limit, requeues itself",
        file: "ppo.sbatch",
        text: text!("ppo.sbatch"),
        beside: &[SLURM],
        change: "the #SBATCH lines: nodes, ranks per node, cores, time, and your site's partition and account",
        next: SBATCH,
    },
    Recipe {
        name: "slurm-gpu",
        about: "the same on nodes with 8 GPUs, one rank per GPU",
        file: "llama2-7b.sbatch",
        text: text!("llama2-7b.sbatch"),
        beside: &[SLURM],
        change: "the #SBATCH lines: nodes, GPUs and ranks per node, cores, time, and your site's partition and account",
        next: SBATCH,
    },
    Recipe {
        name: "quickstart",
        about: "PPO of a small model on arithmetic, as jobs/quickstart/run.sh runs it on a CPU",
        text: text!("quickstart/ppo.toml"),
        change: "nothing in jobs/quickstart, whose run.sh makes the model and the data; elsewhere model.actor and data.prompts",
        ..JOB
    },
];

pub fn run(args: &Args) -> Result<()> {
    if let Some(What::Copy(copy)) = &args.what {
        return self::copy(copy);
    }
    let width = RECIPES.iter().map(|recipe| recipe.name.len()).max().unwrap_or(0);
    for Recipe { name, about, .. } in RECIPES {
        say!("{name:width$}  {about}");
    }
    note!("`rlhf-hpc jobs copy NAME [--to FILE]` writes a copy to edit");
    Ok(())
}

fn copy(args: &CopyArgs) -> Result<()> {
    let names: Vec<&str> = RECIPES.iter().map(|recipe| recipe.name).collect();
    let recipe = RECIPES.iter().find(|recipe| recipe.name == args.name).ok_or_else(|| {
        let error = Error::usage(format!("there is no recipe `{}`", args.name));
        match config::nearest(&args.name, &names) {
            Some(near) => error.hint(format!("did you mean `{near}`?")),
            None => error.hint(format!("recipes: {}", names.join(", "))),
        }
    })?;
    let own = if recipe.file.is_empty() { format!("{}.toml", recipe.name) } else { recipe.file.to_string() };
    let file = match &args.to {
        Some(to) if to.is_dir() || to.as_os_str().to_string_lossy().ends_with('/') => to.join(own),
        Some(to) => to.clone(),
        None => PathBuf::from(own),
    };
    let dir = file.parent().unwrap_or(Path::new(""));
    if !write_new(&file, recipe.text)? {
        return Err(Error::usage(format!("{} exists already", file.display())).hint("name another file with --to"));
    }
    note!("{}: the recipe `{}`", file.display(), recipe.name);
    for (name, text) in recipe.beside {
        let path = dir.join(name);
        let was_written = write_new(&path, text)?;
        note!(
            "{}: {}",
            path.display(),
            if was_written { "written next to it" } else { "exists already, not overwritten" }
        );
    }
    note!("change: {}", recipe.change);
    let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    let name = file.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    let places = [("FILE", file.display().to_string()), ("DIR", dir.display().to_string()), ("NAME", name)];
    let next = places.iter().fold(recipe.next.to_string(), |next, (word, place)| next.replace(word, place));
    note!("next:   {next}");
    Ok(())
}

/// Writes a new file, with the directories above it; false if the file exists.
fn write_new(path: &Path, text: &str) -> Result<bool> {
    if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
        fs::create_dir_all(dir).map_err(|e| Error::io("create", dir, &e))?;
    }
    match File::create_new(path) {
        Ok(mut file) => file.write_all(text.as_bytes()).map(|()| true).map_err(|e| Error::io("write", path, &e)),
        Err(e) if e.kind() == ErrorKind::AlreadyExists => Ok(false),
        Err(e) => Err(Error::io("create", path, &e)),
    }
}
