//! `rlhf-hpc download`: a model or a data set of the Hub, into the local cache.

mod server;
mod store;

use super::out::{note, say};
use crate::error::{Error, Result, format_bytes};
use crate::hub::{self, Kind, Repository};
use crate::metrics::counted;
use argh::{ArgsInfo, FromArgs};
use server::{RemoteFile, Server};
use std::path::Path;
use store::Store;

/// Download a model or a data set of the Hugging Face Hub into the local cache, where jobs and other verbs find it.
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "download")]
#[argh(
    note = "The cache is HF_HUB_CACHE, or HF_HOME/hub, or ~/.cache/huggingface/hub, with the layout of huggingface_hub. The server is \
            HF_ENDPOINT, or https://huggingface.co. HF_TOKEN, or the token of `hf auth login`, opens gated and private repositories. \
            Run the command again to resume. The contents of each file are compared with its hash. This is the only verb that uses the Hub."
)]
pub struct Args {
    /// ORG/NAME[@REVISION]; with --data also ORG/NAME[@REVISION]/FOLDER, or one file
    #[argh(positional)]
    pub id: String,

    /// a data set instead of a model
    #[argh(switch)]
    pub data: bool,

    /// branch, tag or commit (default: main)
    #[argh(option)]
    pub revision: Option<String>,
}

/// Formats of weights that are not read. Repositories often have them next to safetensors.
const UNREAD: [&str; 14] = [
    "bin",
    "pt",
    "pth",
    "ckpt",
    "pkl",
    "gguf",
    "onnx",
    "onnx_data",
    "h5",
    "msgpack",
    "ot",
    "tflite",
    "mlmodel",
    "mlpackage",
];
/// Names of skipped files in a message.
const SHOWN: usize = 3;

pub fn run(args: &Args) -> Result<()> {
    let repository = asked(args)?;
    let cache = hub::cache().ok_or_else(|| Error::usage("HF_HOME, HF_HUB_CACHE or HOME must name the cache"))?;
    if std::env::var("HF_HUB_OFFLINE").is_ok_and(|on| ["1", "on", "yes", "true"].contains(&&*on.to_lowercase())) {
        return Err(Error::usage("HF_HUB_OFFLINE is set, and download uses the network").hint("unset HF_HUB_OFFLINE"));
    }
    let server = Server::open()?;
    let listing = server.listing(&repository)?;
    let files = chosen(&repository, listing.files)?;
    let store = Store::open(&cache, &repository, &listing.commit)?;
    let fetched = store.fill(&server, &files)?;
    let total: u64 = files.iter().map(|file| file.bytes).sum();
    note!(
        "download: {}, commit {}: {}, {} ({} downloaded now)",
        repository.id,
        listing.commit,
        counted(files.len(), "file"),
        format_bytes(total),
        format_bytes(fetched)
    );
    say!("{}", store.snapshot.display());
    Ok(())
}

/// The repository that the arguments name.
fn asked(args: &Args) -> Result<Repository> {
    let kind = if args.data { Kind::Dataset } else { Kind::Model };
    let form = || {
        Error::usage(format!("ID must be ORG/NAME of a repository of the Hub (got {:?})", args.id))
            .hint("for example Qwen/Qwen3-0.6B, Qwen/Qwen3-0.6B@main, or --data openai/gsm8k")
    };
    let mut found = Repository::parse(&args.id, kind).ok_or_else(form)?;
    if let Some(revision) = &args.revision {
        let is_new = found.revision.is_empty() || found.revision == *revision;
        Error::need(is_new, format!("{} and --revision {revision} name two revisions", args.id))?;
        Error::need(hub::is_relative(revision), format!("--revision {revision:?} is not the name of a revision"))?;
        found.revision.clone_from(revision);
    }
    Ok(found)
}

/// The files to download: for a model the ones in a format that is read, for a data set the ones in its path.
fn chosen(repository: &Repository, mut files: Vec<RemoteFile>) -> Result<Vec<RemoteFile>> {
    let Repository { kind, path, .. } = repository;
    let is_within = |file: &str| {
        path.is_empty() || file.strip_prefix(&**path).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    let is_unread = |file: &str| {
        let extension = Path::new(file).extension().map(|end| end.to_string_lossy().to_lowercase());
        *kind == Kind::Model && extension.is_some_and(|end| UNREAD.contains(&&*end))
    };
    let all: Vec<String> = files.iter().map(|file| file.path.clone()).collect();
    files.retain(|file| is_within(&file.path) && !is_unread(&file.path));
    let unread: Vec<&String> = all.iter().filter(|file| is_unread(file)).collect();
    if !unread.is_empty() {
        let shown: Vec<&str> = unread.iter().take(SHOWN).map(|file| file.as_str()).collect();
        let others = unread.len() - shown.len();
        let others = if others > 0 { format!(" and {others} more") } else { String::new() };
        note!("download: left out, as these formats are not read: {}{others}", shown.join(", "));
    }
    if files.is_empty() {
        let folders: std::collections::BTreeSet<&str> = all.iter().filter_map(|file| file.split('/').next()).collect();
        let has = folders.into_iter().collect::<Vec<_>>().join(", ");
        let what = if path.is_empty() { "no file to read".to_owned() } else { format!("no {path}") };
        return Err(Error::data(format!("{repository} has {what} (it has {has})")));
    }
    Ok(files)
}
