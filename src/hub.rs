//! Repositories of the Hugging Face Hub: their names, and their snapshots in the local cache. The cache has the layout
//! of `huggingface_hub`: `models--ORG--NAME` with the folders `blobs`, `refs` and `snapshots`. Nothing here uses the
//! network.

use crate::error::Error;
use std::fmt;
use std::path::{Component, Path, PathBuf};
use std::{env, fs};

/// The beginning of a name that is never a local path.
pub const SCHEME: &str = "hf://";
/// The revision that a name without one means.
const MAIN: &str = "main";
/// Digits of a commit in messages.
const SHORT: usize = 12;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Model,
    Dataset,
}

impl Kind {
    /// The name of the kind in the Hub's URLs and in the cache.
    pub fn plural(self) -> &'static str {
        match self {
            Self::Model => "models",
            Self::Dataset => "datasets",
        }
    }

    fn words(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Dataset => "data set",
        }
    }
}

/// A repository at a revision, and a path within it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repository {
    pub kind: Kind,
    /// `ORG/NAME`.
    pub id: String,
    /// A branch, tag or commit; empty for `main`.
    pub revision: String,
    /// A file or folder of a data set; empty for all of it.
    pub path: String,
}

impl Repository {
    /// Parses `[hf://][models/|datasets/]ORG/NAME[@REVISION][/PATH]`; `None` for another text. Only a data set has a path.
    pub fn parse(text: &str, kind: Kind) -> Option<Self> {
        let text = text.strip_prefix(SCHEME).unwrap_or(text);
        let named = |kind: Kind| text.strip_prefix(kind.plural()).and_then(|rest| rest.strip_prefix('/'));
        let with_kind = |kind| named(kind).filter(|rest| rest.contains('/')).map(|rest| (kind, rest));
        let (kind, text) = with_kind(Kind::Dataset).or_else(|| with_kind(Kind::Model)).unwrap_or((kind, text));
        let (org, rest) = text.split_once('/')?;
        let end = rest.find(['@', '/']).unwrap_or(rest.len());
        let (name, rest) = rest.split_at(end);
        let (revision, path) = match rest.strip_prefix('@') {
            Some(rest) => split_revision(rest, kind),
            None => ("", rest.strip_prefix('/').unwrap_or_default()),
        };
        let is_path = kind == Kind::Dataset && is_relative(path) || path.is_empty();
        let is_revision = rest.is_empty() || !rest.starts_with('@') || is_relative(revision);
        let is_valid = is_word(org) && is_word(name) && is_path && is_revision;
        let id = format!("{org}/{name}");
        is_valid.then(|| Self { kind, id, revision: revision.to_owned(), path: path.to_owned() })
    }

    pub fn revision(&self) -> &str {
        if self.revision.is_empty() { MAIN } else { &self.revision }
    }

    /// The folder of the repository in a cache.
    pub fn folder(&self, cache: &Path) -> PathBuf {
        cache.join(format!("{}--{}", self.kind.plural(), self.id.replace('/', "--")))
    }

    /// The snapshot in `cache` of a commit, or of the commit that `refs` has for a branch or tag.
    fn snapshot_in(&self, cache: &Path) -> Option<PathBuf> {
        let folder = self.folder(cache);
        let of =
            |commit: &str| Some(folder.join("snapshots").join(commit)).filter(|dir| is_commit(commit) && dir.is_dir());
        let of_ref = || of(fs::read_to_string(folder.join("refs").join(self.revision())).ok()?.trim());
        of(self.revision()).or_else(of_ref)
    }

    /// Its snapshot in the cache of this user, or the path within it.
    pub fn cached(&self) -> Option<PathBuf> {
        let snapshot = self.snapshot_in(&cache()?)?;
        Some(if self.path.is_empty() { snapshot } else { snapshot.join(&self.path) })
    }

    /// The command that fills the cache.
    pub fn command(&self) -> String {
        let option = if self.kind == Kind::Dataset { "--data " } else { "" };
        let revision = if self.revision.is_empty() { String::new() } else { format!("@{}", self.revision) };
        format!("rlhf-hpc download {option}{}{revision}", self.id)
    }

    /// What the cache has instead of it, for an error: no snapshot, or snapshots of other commits.
    pub fn absence(&self) -> String {
        let Some(cache) = cache() else { return "there is no Hugging Face cache, as HOME is not set".to_owned() };
        let all = fs::read_dir(self.folder(&cache).join("snapshots")).into_iter().flatten().flatten();
        let mut others: Vec<String> = all.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        others.sort();
        let (shown, what, id) = (cache.display(), self.kind.words(), &self.id);
        match (&self.revision[..], others.is_empty()) {
            (_, true) => format!("the Hugging Face cache {shown} has no {what} {id}"),
            ("", false) => format!("the Hugging Face cache {shown} has {id} only as {id}@{}", others.join(", @")),
            (wanted, false) => format!("the Hugging Face cache {shown} has no revision {wanted} of {id}"),
        }
    }
}

impl fmt::Display for Repository {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}{}{}", self.id, if self.revision.is_empty() { "" } else { "@" }, self.revision)
    }
}

/// Splits the text after `@`. The revision of a data set ends at a slash, but that of `refs/pr/1` has two.
fn split_revision(text: &str, kind: Kind) -> (&str, &str) {
    if kind == Kind::Model {
        return (text, "");
    }
    let slashes = if text.starts_with("refs/") { 2 } else { 0 };
    match text.match_indices('/').nth(slashes) {
        Some((at, _)) => (&text[..at], &text[at + 1..]),
        None => (text, ""),
    }
}

/// Whether a text can be the name of an organization or of a repository.
fn is_word(text: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    !text.is_empty() && text.chars().all(is_part) && !text.starts_with(['.', '-']) && !text.contains("--")
}

/// Whether a path stays in its folder: names between slashes, none of which is `.` or `..`.
pub fn is_relative(path: &str) -> bool {
    !path.contains(['\\', '\0']) && path.split('/').all(|part| !["", ".", ".."].contains(&part))
}

pub fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// The user's folder of Hugging Face, with the cache and the token.
pub fn home() -> Option<PathBuf> {
    let of = |name: &str, rest: &str| Some(Path::new(&set(name)?).join(rest));
    of("HF_HOME", "").or_else(|| of("XDG_CACHE_HOME", "huggingface")).or_else(|| of("HOME", ".cache/huggingface"))
}

/// The cache of this user; `None` if no environment variable names a folder.
pub fn cache() -> Option<PathBuf> {
    let given = set("HF_HUB_CACHE").or_else(|| set("HUGGINGFACE_HUB_CACHE")).map(PathBuf::from);
    let cache = given.or_else(|| Some(home()?.join("hub")))?;
    std::path::absolute(&cache).ok()
}

fn set(name: &str) -> Option<std::ffi::OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}

/// The directory of the model that a name means: a path from `here`; or if there is none, the snapshot of a repository
/// in the cache. `notes` gets a line if there are both. A name that means neither remains a path.
pub fn model_dir(here: &Path, name: &Path, notes: &mut Vec<String>) -> PathBuf {
    let (text, local) = (name.to_string_lossy(), here.join(name));
    let repository = Repository::parse(&text, Kind::Model).filter(|found| found.kind == Kind::Model);
    if text.starts_with(SCHEME) {
        return repository.and_then(|found| found.cached()).unwrap_or_else(|| name.to_owned());
    }
    let cached = repository.and_then(|found| found.cached());
    match cached {
        Some(snapshot) if !local.exists() => snapshot,
        Some(snapshot) => {
            let (local, snapshot) = (local.display(), snapshot.display());
            let note = format!("{text} is the directory {local}, not the model of this name in the cache, {snapshot}");
            if !notes.contains(&note) {
                notes.push(note);
            }
            here.join(name)
        }
        None => local,
    }
}

/// The path of the rows that a name means: a path from `here`, or one in a snapshot for `hf://ORG/NAME[@REVISION][/PATH]`.
/// A name that is not in the cache remains as it is.
pub fn rows_path(here: &Path, name: &str) -> PathBuf {
    if !name.starts_with(SCHEME) {
        return here.join(name);
    }
    let repository = Repository::parse(name, Kind::Dataset);
    repository.and_then(|found| found.cached()).unwrap_or_else(|| PathBuf::from(name))
}

/// The repository and the commit of a path in a snapshot.
pub fn snapshot_of(path: &Path) -> Option<(Repository, String)> {
    let parts: Vec<&str> = path.components().filter_map(|part| part.as_os_str().to_str()).collect();
    let at = parts.iter().position(|part| *part == "snapshots").filter(|at| *at > 0)?;
    let commit = parts.get(at + 1).filter(|commit| is_commit(commit))?;
    let (kind, id) = parts[at - 1].split_once("--")?;
    let kind = [Kind::Model, Kind::Dataset].into_iter().find(|known| known.plural() == kind)?;
    let id = id.replacen("--", "/", 1);
    Some((Repository { kind, id, revision: String::new(), path: parts[at + 2..].join("/") }, (*commit).to_owned()))
}

/// A path as messages show it: `ORG/NAME, commit c1899de289a0, PATH` for one in a snapshot.
pub fn describe(path: &Path) -> String {
    match snapshot_of(path) {
        Some((Repository { id, .. }, commit)) => format!("{id}, commit {}, {}", &commit[..SHORT], path.display()),
        None => path.display().to_string(),
    }
}

/// The repository that a path which does not exist may mean: that of its snapshot, or of its last two parts.
fn meant(path: &Path, kind: Kind) -> Option<Repository> {
    if let Some((found, commit)) = snapshot_of(path) {
        return Some(Repository { revision: commit, ..found });
    }
    let text = path.to_str()?;
    if text.starts_with(SCHEME) {
        return Repository::parse(text, kind);
    }
    let (before, revision) = text.split_once('@').unwrap_or((text, ""));
    let parts: Vec<&str> = Path::new(before).components().filter_map(normal).collect();
    let [.., org, name] = parts[..] else { return None };
    if !is_likely(org, name) {
        return None;
    }
    let at = if revision.is_empty() { "" } else { "@" };
    Repository::parse(&format!("{org}/{name}{at}{revision}"), kind)
}

/// Whether a path is `ORG/NAME` in the current folder.
fn is_two_names(path: &Path) -> bool {
    let here = env::current_dir().unwrap_or_default();
    let path = path.strip_prefix(&here).unwrap_or(path);
    !path.is_absolute() && path.components().filter_map(normal).count() == 2
}

fn normal(part: Component<'_>) -> Option<&str> {
    match part {
        Component::Normal(name) => name.to_str(),
        _ => None,
    }
}

/// Adds to the error of a path that does not exist, or of an incomplete snapshot, what the cache has and the command
/// that fills it.
#[must_use]
pub fn explain(path: &Path, kind: Kind, error: Error) -> Error {
    let Some(found) = meant(path, kind) else { return error };
    let way = format!("run `{}` where there is a network: jobs read only the cache", found.command());
    if snapshot_of(path).is_some() {
        return error.also(&format!("complete the snapshot: {way}"));
    }
    if kind == Kind::Dataset && !path.starts_with(SCHEME) {
        return error.also(&format!("for a data set of the Hub, write {SCHEME}{found} and {way}"));
    }
    if !is_two_names(path) && !path.starts_with(SCHEME) {
        return error.also(&format!("for a model of the Hub, {way}"));
    }
    let message = format!("{}; {}", error.message, found.absence());
    Error { message, ..error }.also(&way)
}

/// Names of folders that are no organizations.
const FOLDERS: [&str; 13] = [
    "data",
    "models",
    "model",
    "runs",
    "ckpt",
    "ckpts",
    "checkpoint",
    "checkpoints",
    "output",
    "outputs",
    "results",
    "examples",
    "rewards",
];
const FILES: [&str; 8] = ["json", "jsonl", "parquet", "arrow", "gz", "csv", "txt", "toml"];

/// Whether `ORG/NAME` is more likely a repository than a local path.
pub fn is_likely(org: &str, name: &str) -> bool {
    let extension = name.rsplit_once('.').map_or("", |(_, extension)| extension);
    is_word(org) && is_word(name) && !FOLDERS.contains(&org) && !FILES.contains(&extension)
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMIT: &str = "c1899de289a04d12100db370d81485cdf75e47ca";

    #[test]
    fn names_of_the_hub_have_an_organization_a_name_a_revision_and_for_rows_a_path() {
        let model = |text: &str| Repository::parse(text, Kind::Model).map(|r| [r.id, r.revision, r.path]);
        let rows = |text: &str| Repository::parse(text, Kind::Dataset).map(|r| [r.id, r.revision, r.path]);
        let is = |parts: [&str; 3]| Some(parts.map(str::to_owned));
        assert_eq!(model("Qwen/Qwen3-0.6B"), is(["Qwen/Qwen3-0.6B", "", ""]));
        assert_eq!(model("hf://Qwen/Qwen3-0.6B@v1"), is(["Qwen/Qwen3-0.6B", "v1", ""]));
        assert_eq!(model("a/b@refs/pr/3"), is(["a/b", "refs/pr/3", ""]));
        assert_eq!(rows("hf://openai/gsm8k/main"), is(["openai/gsm8k", "", "main"]));
        assert_eq!(rows("hf://datasets/openai/gsm8k@v2/main/a.parquet"), is(["openai/gsm8k", "v2", "main/a.parquet"]));
        assert_eq!(rows("hf://a/b@refs/convert/parquet/main"), is(["a/b", "refs/convert/parquet", "main"]));
        for wrong in ["Qwen", "a/b/c", "../a", "a/..", "a/b@", "a/b@../c", "/a/b", "a b/c", "a--b/c", "a/b@x//y"] {
            assert_eq!(model(wrong), None, "{wrong}");
        }
        for wrong in ["hf://a/b/../c", "hf://a/b//c", "hf://a/b@/c"] {
            assert_eq!(rows(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_snapshot_is_found_by_branch_tag_and_commit() {
        let cache = tempfile::tempdir().unwrap();
        let repository = |text: &str| Repository::parse(text, Kind::Model).unwrap();
        let folder = repository("a/b").folder(cache.path());
        assert!(folder.ends_with("models--a--b"));
        let snapshot = folder.join("snapshots").join(COMMIT);
        fs::create_dir_all(&snapshot).unwrap();
        fs::create_dir_all(folder.join("refs/refs/pr")).unwrap();
        assert_eq!(repository("a/b").snapshot_in(cache.path()), None);
        for name in ["main", "v1", "refs/pr/1"] {
            fs::write(folder.join("refs").join(name), format!("{COMMIT}\n")).unwrap();
        }
        // A branch whose snapshot is not there, and a text that leads out of the folder.
        fs::write(folder.join("refs/gone"), "0".repeat(40)).unwrap();
        fs::write(folder.join("refs/wrong"), "..").unwrap();
        for text in ["a/b", "a/b@main", "a/b@v1", "a/b@refs/pr/1", &format!("a/b@{COMMIT}")] {
            assert_eq!(repository(text).snapshot_in(cache.path()).as_ref(), Some(&snapshot), "{text}");
        }
        for text in ["a/b@gone", "a/b@wrong", "a/b@c1899de", "a/c"] {
            assert_eq!(repository(text).snapshot_in(cache.path()), None, "{text}");
        }
        let (found, commit) = snapshot_of(&snapshot.join("model.safetensors")).unwrap();
        assert_eq!((found.to_string(), &*found.path, &*commit), ("a/b".to_owned(), "model.safetensors", COMMIT));
        assert!(describe(&snapshot).starts_with("a/b, commit c1899de289a0, /"), "{}", describe(&snapshot));
    }
}
