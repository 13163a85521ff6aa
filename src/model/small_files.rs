//! The small files of a model directory: configuration, tokenizer and chat templates. Exports copy them.
//!
//! A directory from elsewhere may link to any file of this user, and an export would pass its content on. So an export
//! copies only what is the model's own.

use super::config_json::GENERATION;
use crate::error::{Error, Result};
use crate::sys::{files, stderr};
use std::path::{Path, PathBuf};

/// Tokenizer files that are copied if they exist, in addition to the files of `templates`.
pub const TOKENIZER_FILES: [&str; 12] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
];

/// The folder of chat templates that are not the default: a file `NAME.jinja` for each.
pub const TEMPLATES_DIR: &str = "additional_chat_templates";

/// The files of a model directory that belong to its tokenizer and may exist. Names have `/` for a folder.
///
/// # Errors
/// `Io` if the folder of chat templates cannot be listed.
pub fn of_tokenizer(dir: &Path) -> Result<Vec<String>> {
    Ok(TOKENIZER_FILES.map(str::to_owned).into_iter().chain(templates(dir)?).collect())
}

/// Whether the directory of an adapter has a tokenizer with other files than its base model's.
///
/// # Errors
/// `Io` if a file cannot be read.
pub fn has_other_tokenizer(adapter: &Path, base: &Path) -> Result<bool> {
    let read = |dir: &Path, name: &str| files::if_any(&dir.join(name), files::read);
    if !adapter.join("tokenizer.json").is_file() {
        return Ok(false);
    }
    for name in of_tokenizer(adapter)? {
        let own = read(adapter, &name)?;
        if own.is_some() && own != read(base, &name)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The small files of a model directory that may exist: configuration and tokenizer.
///
/// # Errors
/// The errors of `of_tokenizer`.
pub fn names(dir: &Path) -> Result<Vec<String>> {
    Ok(["config.json", GENERATION].map(str::to_owned).into_iter().chain(of_tokenizer(dir)?).collect())
}

/// The file `name` of the model directory `dir`, without links. None if it does not exist, or if it is not the model's
/// own, with a warning. The target of a link is the model's own if it is in the directory, or among the `blobs` of the
/// same repository in the cache of Hugging Face. `config.json` is always the model's own: only the description of a
/// model is read as one, and a checkpoint needs it.
///
/// # Errors
/// `Io` if a link cannot be resolved.
pub fn own(dir: &Path, name: &str) -> Result<Option<PathBuf>> {
    let path = dir.join(name);
    let Some(file) = files::if_any(&path, Path::canonicalize)? else { return Ok(None) };
    let own = dir.canonicalize().map_err(|e| Error::io("resolve", dir, &e))?;
    let is_own = file.starts_with(&own) || blobs(&own).is_some_and(|blobs| file.starts_with(blobs));
    if is_own || name == "config.json" {
        return Ok(Some(file));
    }
    stderr::warn_once(&format!(
        "{} is a link to {}, outside the model directory, so exports do not contain it; to export it, replace the link by \
         the file",
        path.display(),
        file.display()
    ));
    Ok(None)
}

/// The files of a directory's chat templates that have names of their own, in the order of their names.
fn templates(dir: &Path) -> Result<Vec<String>> {
    let list = |path: &Path| path.read_dir()?.map(|entry| Ok(entry?.file_name())).collect::<std::io::Result<Vec<_>>>();
    let names = files::if_any(&dir.join(TEMPLATES_DIR), list)?.unwrap_or_default();
    let names = names.iter().filter_map(|name| name.to_str().filter(|name| name.strip_suffix(".jinja").is_some()));
    let mut names: Vec<String> = names.map(|name| format!("{TEMPLATES_DIR}/{name}")).collect();
    names.sort_unstable();
    Ok(names)
}

/// Warns of the files of a model directory that exports will not contain.
///
/// # Errors
/// `Io` if a link cannot be resolved.
pub fn warn_of_foreign(dir: &Path) -> Result<()> {
    names(dir)?.iter().try_for_each(|name| own(dir, name).map(drop))
}

/// The directory of the files of a snapshot in Hugging Face's cache: `models--ORG--NAME/snapshots/REVISION` has links
/// to `models--ORG--NAME/blobs`.
fn blobs(dir: &Path) -> Option<PathBuf> {
    let snapshots = dir.parent().filter(|above| above.ends_with("snapshots"))?;
    let repository = snapshots.parent()?;
    let is_of_cache = repository.file_name()?.as_encoded_bytes().starts_with(b"models--");
    is_of_cache.then(|| repository.join("blobs"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_link_belongs_to_the_model_inside_its_directory_or_its_repository_in_the_cache() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        let put = |name: &str| {
            fs::create_dir_all(at(name).parent().unwrap()).unwrap();
            fs::write(at(name), name).unwrap();
        };
        for name in ["secret", "model/real", "hub/models--a--b/blobs/1", "hub/models--c/blobs/2", "other/blobs/3"] {
            put(name);
        }
        put("hub/models--a--b/snapshots/r1/own");
        put("other/snapshots/r1/own");
        let link = |to: &str, name: &str| symlink(to, at(name)).unwrap();
        link("real", "model/inside");
        link("../secret", "model/outside");
        link("nowhere", "model/dangling");
        link("../model", "model/folder");
        link("..", "model/above");
        link("model", "linked");
        link("../../blobs/1", "hub/models--a--b/snapshots/r1/blob");
        link("../../../models--c/blobs/2", "hub/models--a--b/snapshots/r1/blob-of-another");
        link("../../../../secret", "hub/models--a--b/snapshots/r1/outside");
        link("../../blobs/3", "other/snapshots/r1/blob");
        link("hub/models--a--b/snapshots/r1", "linked-snapshot");
        for (dir, name, target) in [
            ("model", "real", Some("model/real")),
            ("model", "inside", Some("model/real")),
            ("model", "folder/inside", Some("model/real")),
            ("linked", "inside", Some("model/real")),
            ("model", "outside", None),
            ("model", "above/secret", None),
            ("model", "dangling", None),
            ("model", "missing", None),
            ("hub/models--a--b/snapshots/r1", "own", Some("hub/models--a--b/snapshots/r1/own")),
            ("hub/models--a--b/snapshots/r1", "blob", Some("hub/models--a--b/blobs/1")),
            ("linked-snapshot", "blob", Some("hub/models--a--b/blobs/1")),
            ("hub/models--a--b/snapshots/r1", "blob-of-another", None),
            ("hub/models--a--b/snapshots/r1", "outside", None),
            ("other/snapshots/r1", "blob", None),
        ] {
            let found = own(&at(dir), name).unwrap();
            let target = target.map(|target| at(target).canonicalize().unwrap());
            assert_eq!(found, target, "{dir}/{name}");
        }
    }
}
