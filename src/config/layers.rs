//! The files of a job: the job file, the one that its key `base` names, the base of that one, and so on.

use crate::error::{Error, Result};
use std::fs;
use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// The key outside of all tables.
pub(super) const KEY: &str = "base";

/// A file of a job.
pub(super) struct Layer {
    /// Empty for a text without a file.
    pub path: PathBuf,
    pub text: String,
    /// Its keys, without `base`.
    pub table: Table,
    base: Option<String>,
}

impl Layer {
    /// # Errors
    /// `Usage` if the text is not TOML, or if `base` is not a path.
    pub fn parse(path: &Path, text: String) -> Result<Self> {
        let mut table: Table = text.parse().map_err(|e| as_one_line(&text, &e))?;
        let base = match table.remove(KEY) {
            None => None,
            Some(Value::String(base)) if !base.is_empty() => Some(base),
            Some(other) => return Err(Error::usage(format!("base must be the path of a job file (got {other})"))),
        };
        Ok(Self { path: path.to_owned(), text, table, base })
    }

    fn open(path: &Path) -> Result<Self> {
        // Opening a FIFO would block until a writer opens it.
        if fs::metadata(path).is_ok_and(|found| !found.is_file() && !found.is_dir()) {
            return Err(Error::usage(format!("job file {} is not a regular file", path.display())));
        }
        let text = fs::read_to_string(path).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => Error::usage(format!("job file {} does not exist", path.display())),
            _ => Error::io("read", path, &e),
        })?;
        check_format(&text).and_then(|()| Self::parse(path, text)).map_err(|e| e.within(path.display()))
    }

    pub fn has_base(&self) -> bool {
        self.base.is_some()
    }

    /// The folder of the file.
    pub fn folder(&self) -> PathBuf {
        self.path.parent().filter(|p| !p.as_os_str().is_empty()).map_or_else(|| PathBuf::from("."), Path::to_path_buf)
    }
}

/// The files of a job, the job file first.
///
/// # Errors
/// `Usage` if a file does not exist or is not TOML, or if files are each other's bases.
pub(super) fn read(path: &Path) -> Result<Vec<Layer>> {
    let hint = "pass the path of a TOML job, e.g. `rlhf-hpc ppo.toml`, or run `rlhf-hpc --help` for the verbs";
    let is_missing = !path.exists();
    let mut all = vec![Layer::open(path).map_err(|e| if is_missing { e.hint(hint) } else { e })?];
    let mut seen = vec![path.canonicalize().unwrap_or_else(|_| path.to_owned())];
    while let Some(layer) = all.last()
        && let Some(base) = &layer.base
    {
        let of = |e: Error| e.within(format_args!("{}: base = {base:?}", layer.path.display()));
        let file = layer.path.parent().unwrap_or(Path::new("")).join(base);
        let next = Layer::open(&file).map_err(of)?;
        let real = file.canonicalize().map_err(|e| of(Error::io("find", &file, &e)))?;
        if seen.contains(&real) {
            let chain: Vec<String> = all.iter().map(|layer| layer.path.display().to_string()).collect();
            return Err(of(Error::usage("a job file must not be its own base, nor that of its bases")).hint(format!(
                "remove one `base` of {} -> {}",
                chain.join(" -> "),
                file.display()
            )));
        }
        seen.push(real);
        all.push(next);
    }
    Ok(all)
}

/// Rejects a job in YAML or JSON. In YAML, the first line with text is `KEY:` or `KEY: VALUE`, or `---`.
fn check_format(text: &str) -> Result<()> {
    let first = text.lines().map(str::trim).find(|line| !line.is_empty() && !line.starts_with('#')).unwrap_or_default();
    let is_key = |key: &str| key.chars().all(|c| c.is_alphanumeric() || "_-.".contains(c));
    let is_yaml = first == "---" || first.split_once(':').is_some_and(|(key, _)| is_key(key) && !key.is_empty());
    let what = if is_yaml {
        "YAML"
    } else if first.starts_with('{') {
        "JSON"
    } else {
        return Ok(());
    };
    Err(Error::usage(format!("a job is a TOML file (got {what})")).hint(
        "write tables as [job] and values as kind = \"ppo\"; `rlhf-hpc jobs` lists recipes, and `rlhf-hpc help KEY` \
         explains a key, also by its name in verl, TRL and OpenRLHF",
    ))
}

/// An error of the parser in one line, with the line of the text.
pub(super) fn as_one_line(text: &str, error: &toml::de::Error) -> Error {
    let mistake = Error::usage(error.message().replace('\n', " "));
    error.span().map_or(mistake.clone(), |span| mistake.within(line_at(text, span.start)))
}

/// Formats the line at a position: ``line 7: `steps = 2` ``.
pub(super) fn line_at(text: &str, at: usize) -> String {
    let line = text[..at.min(text.len())].matches('\n').count();
    format!("line {}: `{}`", line + 1, text.lines().nth(line).unwrap_or("").trim())
}

#[cfg(test)]
mod tests {
    use crate::config::{Config, load};
    use crate::error::Error;
    use std::fs;
    use tempfile::TempDir;

    const COMMON: &str = "
[job]
kind = \"ppo\"
seed = 7
[model]
actor = \"models/a\"
[data]
prompts = [\"rows.jsonl\", \"more.jsonl\"]
chat_template = true
[data.chat_template_args]
thinking = false
[reward]
rule = { kind = \"number\", tolerance = 0.1 }
[ppo]
clip_low = 0.1
[dpo]
beta = 0.3
";

    fn files(all: &[(&str, &str)]) -> TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in all {
            fs::create_dir_all(dir.path().join(name).parent().unwrap()).unwrap();
            fs::write(dir.path().join(name), text).unwrap();
        }
        dir
    }

    fn read(dir: &TempDir, name: &str, overrides: &[&str]) -> Result<Config, Error> {
        load(&dir.path().join(name), &overrides.iter().map(|item| (*item).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn a_file_overrides_its_base_and_the_command_line_overrides_both() {
        let own = "[job]\nsteps = 9\nseed = 8\n[data]\nprompts = \"mine.jsonl\"\n[data.chat_template_args]\nstyle = 1\n[reward]\nrule = \"exact\"\n[ppo]\nclip_high = 0.3\n";
        let whole = "[job]\nkind = \"ppo\"\nseed = 8\nsteps = 3\n[model]\nactor = \"models/a\"\n[data]\nprompts = \"mine.jsonl\"\nchat_template = true\nchat_template_args = { thinking = false, style = 1 }\n[reward]\nrule = \"exact\"\n[ppo]\nclip_low = 0.1\nclip_high = 0.4\n[dpo]\nbeta = 0.3\n";
        let middle = "base = \"common.toml\"\n[ppo]\nclip_high = 0.2\n";
        let dir = files(&[
            ("common.toml", COMMON),
            ("middle.toml", middle),
            ("own.toml", &format!("base = \"middle.toml\"\n{own}")),
            ("whole.toml", whole),
        ]);
        let of = |name: &str, overrides: &[&str]| read(&dir, name, overrides).unwrap();
        let based = of("own.toml", &["job.steps=3", "ppo.clip_high=0.4"]);
        assert_eq!(based.to_toml(), of("whole.toml", &[]).to_toml());
        let shown = based.bases().unwrap();
        assert!(shown.contains("own.toml, based on ") && shown.ends_with("common.toml"), "{shown}");
        assert_eq!(of("whole.toml", &[]).bases(), None);
        // A warning names the file of a key that is not the job's own.
        let warning = based.unused().unwrap();
        let place = dir.path().join("common.toml");
        assert!(warning.contains(&format!("dpo.beta in {} (needs", place.display())), "{warning}");
        let warning = of("own.toml", &["dpo.beta=0.2"]).unused().unwrap();
        assert!(warning.contains("dpo.beta (needs"), "{warning}");
    }

    #[test]
    fn paths_in_a_base_are_relative_to_its_folder() {
        let environment = "environment = [{ python = { file = \"agent.py\", interpreter = \"venv/bin/python\" } }]";
        let common = COMMON.replace("rule = ", &format!("{environment}\npython = \"reward.py\"\nrule = "));
        let own = "base = \"../site/common.toml\"\n[model]\ncritic = \"models/c\"\n";
        let dir = files(&[("site/common.toml", &common), ("jobs/own.toml", own)]);
        let config = read(&dir, "jobs/own.toml", &[]).unwrap();
        let root = dir.path().canonicalize().unwrap();
        let of_site = |name: &str| root.join("site").join(name);
        assert_eq!(config.model.actor, of_site("models/a"));
        assert_eq!(
            config.data.prompts,
            [of_site("rows.jsonl"), of_site("more.jsonl")].map(|p| p.display().to_string())
        );
        assert_eq!(config.reward.python[0].file, of_site("reward.py").display().to_string());
        let agent = &config.reward.environment[0].python[0];
        assert_eq!(
            [&agent.file, &agent.interpreter].map(std::path::PathBuf::from),
            ["agent.py", "venv/bin/python"].map(of_site)
        );
        assert_eq!(config.model.critic, dir.path().join("jobs/models/c"));
        // The default of job.dir is the job's own.
        assert_eq!(config.job.dir, dir.path().join("jobs/runs/rlhf"));
    }

    #[test]
    fn mistakes_of_bases_name_the_file() {
        let dir = files(&[
            ("common.toml", COMMON),
            ("a.toml", "base = \"b.toml\"\n"),
            ("b.toml", "base = \"a.toml\"\n"),
            ("self.toml", "base = \"self.toml\"\n"),
            ("wrong.toml", "[ppo]\nclip = 0.1\ngamma = \"x\"\n"),
            ("of-wrong.toml", "base = \"wrong.toml\"\n[job]\nkindd = \"ppo\"\n"),
            ("of-none.toml", "base = \"none.toml\"\n"),
            ("list.toml", "base = [\"common.toml\"]\n"),
            ("below.toml", "[job]\nbase = \"common.toml\"\n"),
            ("broken.toml", "[job\n"),
            ("of-broken.toml", "base = \"broken.toml\"\n"),
            ("own.toml", "base = \"common.toml\"\n"),
            ("of-yaml.toml", "base = \"job.yaml\"\n"),
            ("job.yaml", "job:\n  kind: ppo\n"),
        ]);
        for (name, overrides, words) in [
            ("a.toml", &[][..], &["a.toml", "its own base", "a.toml -> "][..]),
            ("self.toml", &[], &["its own base"]),
            ("of-wrong.toml", &[], &["wrong.toml: line 2: `clip = 0.1`", "wrong.toml: line 3", "unknown key `kindd`"]),
            ("of-none.toml", &[], &["of-none.toml: base = \"none.toml\"", "none.toml does not exist"]),
            ("list.toml", &[], &["base must be the path of a job file"]),
            ("below.toml", &[], &["unknown key `base`", "above the first [table]"]),
            ("of-broken.toml", &[], &["of-broken.toml: base = \"broken.toml\": ", "broken.toml: line 1"]),
            ("own.toml", &["base=common.toml"], &["only a file has a base"]),
            ("of-yaml.toml", &[], &["job.yaml: a job is a TOML file (got YAML)"]),
        ] {
            let error = read(&dir, name, overrides).unwrap_err();
            let text = format!("{} {}", error.message, error.hint.unwrap_or_default());
            assert!(words.iter().all(|word| text.contains(word)), "{name}: {words:?} in {text}");
        }
    }
}
