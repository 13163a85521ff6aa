//! `jobs`: the job recipes in the binary, as starting points for a user's own job.

use super::out::{note, say};
use crate::config;
use crate::error::{Error, Result};
use argh::{ArgsInfo, FromArgs};
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// List the job recipes, or copy one to edit: `rlhf-hpc jobs copy grpo`.
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "jobs")]
pub struct Args {
    #[argh(subcommand)]
    what: Option<What>,
}

#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand)]
enum What {
    Copy(CopyArgs),
}

/// Write a recipe to edit, with the files that it names, and print the keys to change and the next command. Existing
/// files are not overwritten.
#[derive(ArgsInfo, FromArgs, Debug)]
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
const SLURM: (&str, &str) = ("slurm.sh", text!("slurm.sh"));
const SBATCH: &str = "cd DIR && RLHF_HPC=BINARY RLHF_JOB=JOB.toml sbatch NAME";

/// The default of a recipe: one file with the recipe's name.
const JOB: Recipe =
    Recipe { name: "", about: "", file: "", text: "", beside: &[], change: "", next: "rlhf-hpc run FILE --dry-run" };

/// A recipe of jobs/recipes, which describes itself (`Recipe::about`, `Recipe::change`).
macro_rules! recipe {
    ($name:literal) => {
        Recipe { name: $name, text: text!("recipes/", $name, ".toml"), ..JOB }
    };
}

const RECIPES: &[Recipe] = &[
    recipe!("sft"),
    recipe!("reward-model"),
    recipe!("dpo"),
    recipe!("kto"),
    recipe!("step-reward"),
    recipe!("distill"),
    recipe!("distill-on-policy"),
    recipe!("grpo"),
    recipe!("dapo"),
    recipe!("rloo"),
    recipe!("remax"),
    recipe!("reinforce++"),
    Recipe { beside: &[REWARD], ..recipe!("ppo-python-reward") },
    recipe!("eval"),
    recipe!("long-context"),
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
        name: "gsm8k",
        about: "GRPO on GSM8K, as jobs/gsm8k/run.sh runs it",
        text: text!("gsm8k/grpo.toml"),
        change: "model.actor and data.prompts, or `rlhf-hpc download` both; with rows of verl data.prompt_key and data.label_key",
        ..JOB
    },
    Recipe {
        name: "quickstart",
        about: "PPO of a small model on arithmetic, as jobs/quickstart/run.sh runs it on a CPU",
        text: text!("quickstart/ppo.toml"),
        change: "nothing in jobs/quickstart, whose run.sh makes the model and the data; elsewhere model.actor and data.prompts",
        ..JOB
    },
];

impl Recipe {
    /// The first line of a recipe that describes itself.
    fn about(&self) -> String {
        if self.about.is_empty() { self.header(0).join(" ") } else { self.about.to_owned() }
    }

    /// The keys to change: the second line of a recipe that describes itself, after `Change:`, with its continuation.
    fn change(&self) -> String {
        let own = || self.header(1).join(" ").trim_start_matches("Change: ").to_owned();
        if self.change.is_empty() { own() } else { self.change.to_owned() }
    }

    /// A line of the header, with the indented lines that continue it.
    fn header(&self, n: usize) -> Vec<&'static str> {
        let lines = self.text.lines().map_while(|line| line.strip_prefix("# ")).collect::<Vec<_>>();
        let mut all = lines.chunk_by(|_, next| next.starts_with("  "));
        all.nth(n).unwrap_or_default().iter().map(|line| line.trim()).collect()
    }
}

pub fn run(args: &Args) -> Result<()> {
    if let Some(What::Copy(copy)) = &args.what {
        return self::copy(copy);
    }
    let width = RECIPES.iter().map(|recipe| recipe.name.len()).max().unwrap_or(0);
    for recipe in RECIPES {
        say!("{:width$}  {}", recipe.name, recipe.about());
    }
    note!("`rlhf-hpc jobs copy NAME [--to FILE]` writes a copy to edit");
    Ok(())
}

/// The names of all recipes.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    RECIPES.iter().map(|recipe| recipe.name)
}

fn copy(args: &CopyArgs) -> Result<()> {
    let names: Vec<&str> = names().collect();
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
    note!("change: {}", recipe.change());
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
