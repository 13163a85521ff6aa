//! Folders of rows: those of `save_to_disk`, and folders of files whose names, or whose folders, give their splits.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::foreign;
use crate::error::{Error, Result};
use crate::sys::{files, stderr};

/// A file of rows, and the split given by its folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InputFile {
    pub path: PathBuf,
    pub split: Option<String>,
}

/// Whether a file has the name extension of a file of rows.
pub(super) fn is_file_of_rows(path: &Path) -> bool {
    let name = path.to_string_lossy();
    let plain = name.strip_suffix(".gz").unwrap_or(&name);
    let ends = |name: &str, of: &[&str]| Path::new(name).extension().is_some_and(|end| of.iter().any(|of| end == *of));
    ends(plain, &["jsonl", "json", "ndjson"]) || ends(&name, &["parquet", "arrow"])
}

/// Names of splits in the names of files and folders, as in Hugging Face's datasets.
const KEYWORDS: [(&str, &[&str]); 3] = [
    ("train", &["train", "training"]),
    ("validation", &["validation", "valid", "dev", "val"]),
    ("test", &["test", "testing", "eval", "evaluation"]),
];
/// Files of JSON that describe a data set.
const NOT_ROWS: [&str; 5] =
    ["config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"];
/// The depth of folders that are searched for rows.
const DEPTH: usize = 3;

/// The files of rows in a folder, and the split of each.
pub(super) fn files_in(path: &Path) -> Result<Vec<InputFile>> {
    let read = || -> Result<Vec<InputFile>> {
        if let Some(saved) = saved(path)? {
            return Ok(saved);
        }
        let (mut others, mut unread) = (Vec::new(), Vec::new());
        let found = named(path, None, DEPTH, &mut others, &mut unread)?;
        if !found.is_empty() {
            unread.extend(others);
            warn_of_unread(path, &found, &unread)?;
            return Ok(found);
        }
        unread.iter().try_for_each(|file| foreign::check_name(file))?;
        if others.is_empty() {
            return Err(Error::data("the folder has no dataset_dict.json, state.json or Parquet files, and no JSONL")
                .hint("give a folder of save_to_disk, a folder of Parquet files, or files of rows"));
        }
        let names: Vec<String> = others.iter().map(|other| other.display().to_string()).collect();
        Err(Error::data(format!("the folder itself has no rows, but these have: {}", names.join(", ")))
            .hint(format!("give one of them, such as {}", names[0])))
    };
    read().map_err(|e| e.within(path.display()))
}

/// Warns of files and folders that may have further rows, and of splits that only the README of a data set names.
fn warn_of_unread(path: &Path, found: &[InputFile], unread: &[PathBuf]) -> Result<()> {
    if !unread.is_empty() {
        let names: Vec<String> = unread.iter().map(|file| file.display().to_string()).collect();
        stderr::warn_once(&format!("{}: not read: {}", path.display(), names.join(", ")));
    }
    let readme = path.join("README.md");
    let text = files::if_any(&readme, files::read_to_string)?.unwrap_or_default();
    let card = text.strip_prefix("---").and_then(|text| text.split("\n---").next()).unwrap_or_default();
    let is_unnamed = |file: &&InputFile| file.split.is_none();
    if let (true, Some(file)) = (card.contains("data_files:"), found.iter().find(is_unnamed)) {
        stderr::warn_once(&format!(
            "{} assigns files to splits (data_files), but only names of files and folders do so here, and {} has no such \
             name: its rows are used for training",
            readme.display(),
            file.path.display()
        ));
    }
    Ok(())
}

/// The files of a folder of `save_to_disk`: a dataset, or several with their splits.
fn saved(path: &Path) -> Result<Option<Vec<InputFile>>> {
    let within = |name: &str| {
        let is_plain = Path::new(name).file_name().is_some_and(|file| file == name);
        if is_plain {
            Ok(path.join(name))
        } else {
            Err(Error::data(format!("{name:?} is not the name of a file in this folder")))
        }
    };
    let list = |file: &str, of: &dyn Fn(&Value) -> Option<Vec<String>>| -> Result<Option<Vec<String>>> {
        let text = match files::read(&path.join(file)) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            read => read.map_err(|e| Error::io("read", path.join(file), &e))?,
        };
        let names = serde_json::from_slice(&text).ok().as_ref().and_then(of);
        names.map(Some).ok_or_else(|| Error::data(format!("{file} was not written by save_to_disk")))
    };
    let texts = |list: &Value, of: fn(&Value) -> Option<&Value>| -> Option<Vec<String>> {
        list.as_array()?.iter().map(|item| of(item)?.as_str().map(str::to_owned)).collect()
    };
    let mut all = Vec::new();
    if let Some(splits) = list("dataset_dict.json", &|dict| texts(&dict["splits"], |name| Some(name)))? {
        for split in splits {
            let folder = within(&split)?;
            if !folder.join("state.json").is_file() {
                return Err(Error::data(format!(
                    "dataset_dict.json names the split {split:?}, whose folder has no state.json"
                )));
            }
            let files = files_in(&folder)?;
            all.extend(files.into_iter().map(|file| InputFile { split: Some(split.clone()), ..file }));
        }
    } else if let Some(names) = list("state.json", &|state| texts(&state["_data_files"], |f| f.get("filename")))? {
        for name in names {
            all.push(InputFile { path: within(&name)?, split: None });
        }
    } else {
        return Ok(None);
    }
    Ok(Some(all))
}

/// The files of rows in a folder, in `data`, and in folders with the name of a split. All belong to `split`, if it is
/// given. Adds other folders with rows to `others`, and other files that may have rows to `unread`.
fn named(
    path: &Path,
    split: Option<&str>,
    depth: usize,
    others: &mut Vec<PathBuf>,
    unread: &mut Vec<PathBuf>,
) -> Result<Vec<InputFile>> {
    let mut entries = files::entries(path)?;
    let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    entries.retain(|path| !name(path).starts_with('.'));
    entries.sort();
    let (folders, mut found): (Vec<_>, Vec<_>) = entries.into_iter().partition(|path| path.is_dir());
    // A file of plain text is often a license.
    let is_foreign =
        |path: &Path| foreign::check_name(path).is_err() && path.extension().is_some_and(|end| end != "txt");
    found.retain(|path| (is_file_of_rows(path) && !NOT_ROWS.contains(&&*name(path))) || is_foreign(path));
    // Other formats next to Parquet are usually copies of it, or describe it.
    let is_parquet = |path: &PathBuf| path.extension().is_some_and(|end| end == "parquet");
    let has_parquet = found.iter().any(is_parquet);
    let is_read = |path: &PathBuf| if has_parquet { is_parquet(path) } else { is_file_of_rows(path) };
    let (found, rest): (Vec<_>, Vec<_>) = found.into_iter().partition(is_read);
    unread.extend(rest);
    let of_file = |path: &Path| split.map(str::to_owned).or_else(|| split_of(&name(path)));
    let mut all: Vec<_> = found.into_iter().map(|path| InputFile { split: of_file(&path), path }).collect();
    for folder in folders.into_iter().filter(|_| depth > 0) {
        let of_folder = keyword_of(&name(&folder));
        let is_part = split.is_some() || of_folder.is_some() || name(&folder) == "data";
        let (mut deeper, mut left) = (Vec::new(), Vec::new());
        let within = named(&folder, split.or(of_folder), depth - 1, &mut deeper, &mut left)?;
        if is_part {
            all.extend(within);
            others.extend(deeper);
            unread.extend(left);
        } else if within.is_empty() {
            others.extend(deeper);
        } else {
            others.push(folder);
        }
    }
    Ok(all)
}

/// The split in a file's name: the word before the numbers, as in `train-00000-of-00002-6ef3.parquet`, or a usual name
/// of a split, as in `gsm8k_test.parquet`.
fn split_of(name: &str) -> Option<String> {
    let stem = name.split('.').next()?;
    let are_digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let numbered = || {
        let (before, after) = stem.rsplit_once("-of-")?;
        let (split, number) = before.rsplit_once('-')?;
        let (count, hash) = after.split_once('-').unwrap_or((after, ""));
        let is_hash = hash.bytes().all(|b| b.is_ascii_alphanumeric());
        (are_digits(number) && are_digits(count) && is_hash && !split.is_empty()).then(|| split.to_owned())
    };
    numbered().or_else(|| keyword_of(name).map(str::to_owned))
}

/// The split that a name contains as a word: `train`, `validation` or `test`.
pub(super) fn keyword_of(name: &str) -> Option<&'static str> {
    let name = name.to_lowercase();
    let mut words = name.split(|c: char| "-._ ".contains(c) || c.is_ascii_digit());
    words.find_map(|word| KEYWORDS.iter().find(|(_, words)| words.contains(&word)).map(|(split, _)| *split))
}

#[cfg(test)]
mod tests {
    use super::split_of;

    #[test]
    fn file_names_give_the_same_splits_as_in_hugging_face_datasets() {
        for (name, split) in [
            ("train-00000-of-00002.parquet", Some("train")),
            ("train_sft-00000-of-00001-6ef3991c06080e14.parquet", Some("train_sft")),
            ("test-00000-of-00001-ab12.parquet", Some("test")),
            ("train.parquet", Some("train")),
            ("gsm8k_test.jsonl", Some("test")),
            ("dev.json.gz", Some("validation")),
            ("my-val-data.parquet", Some("validation")),
            ("training_1.parquet", Some("train")),
            ("latest.parquet", None),
            ("contrast.parquet", None),
            ("rows.parquet", None),
            ("0000.parquet", None),
        ] {
            assert_eq!(split_of(name).as_deref(), split, "{name}");
        }
    }
}
