//! The directories that `--model` and `--adapter` name.

use crate::error::{Error, Result};
use crate::model::adapter_config::{AdapterConfig, Task};
use crate::model::small_files::has_other_tokenizer;
use crate::model::{Arch, Head, adapter_files, other_kind};
use crate::sys::stderr;
use std::path::{Path, PathBuf};

/// A model, with its adapter if it has one.
#[derive(Debug)]
pub struct ModelDirs {
    pub model: PathBuf,
    pub adapter: Option<PathBuf>,
    /// The directory with the tokenizer.
    pub tokenizer: PathBuf,
    /// Whether the adapter has a head of scores.
    has_scores: bool,
}

impl ModelDirs {
    /// The directories of a model, for use with the head `head`. If `model` is an adapter, it is used with its own base
    /// model. The tokenizer is the adapter's, if it has one of its own.
    ///
    /// # Errors
    /// `Usage` or `Data`: no model; an adapter whose base model is not named, or that belongs to another head.
    pub fn find(model: &Path, adapter: Option<&Path>, head: Option<Head>) -> Result<Self> {
        let (mut model, mut adapter) = (model.to_path_buf(), adapter.map(Path::to_path_buf));
        if adapter_files::is_alone(&model) {
            let shown = model.display();
            if let Some(adapter) = &adapter {
                let what = format!("--model must be the base model of --adapter {} (got {shown}, ", adapter.display());
                return Err(Error::usage(what + "which has only an adapter)")
                    .hint("name the base model with --model, and one adapter with --adapter"));
            }
            let base = AdapterConfig::read(&model)?.base_dir(&model);
            let base = base.ok_or_else(|| other_kind(&model).expect("it is an adapter"))?;
            stderr::note_once(&format!("{shown} is an adapter; its base model is {}", base.display()));
            adapter = Some(std::mem::replace(&mut model, base));
        }
        let Some(adapter) = adapter else {
            return Ok(Self { tokenizer: model.clone(), model, adapter: None, has_scores: false });
        };
        let has_scores = AdapterConfig::read(&adapter)?.task == Task::Value;
        if has_scores && head == Some(Head::LanguageModel) {
            return Err(Error::data(format!("{} is the adapter of a value or reward model", adapter.display()))
                .hint("use the adapter of a causal language model"));
        }
        let mut tokenizer = model.clone();
        if has_other_tokenizer(&adapter, &model)? {
            stderr::note_once(&format!(
                "the tokenizer is the adapter's, {}, which differs from the base model's",
                adapter.display()
            ));
            tokenizer.clone_from(&adapter);
        }
        Ok(Self { model, adapter: Some(adapter), tokenizer, has_scores })
    }

    /// Reads the model's config.json.
    ///
    /// # Errors
    /// The errors of `Arch::load`.
    pub fn arch(&self) -> Result<Arch> {
        Arch::load(&self.model)
    }

    /// The head that the files have.
    pub fn head(&self, arch: &Arch) -> Head {
        if self.has_scores { Head::Value } else { arch.head }
    }
}
