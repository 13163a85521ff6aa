//! `rlhf-hpc chat`: a conversation with a model through its chat template.

use super::device::Options;
use super::hub;
use super::out::note;
use super::rows::{Row, object};
use super::talk::Talk;
use crate::config::job::DeviceName;
use crate::config::model::DTypeName;
use crate::config::rollout::RolloutConfig;
use crate::error::{Error, Result};
use crate::experience::Image;
use crate::text::images::encode_chat;
use argh::{ArgsInfo, FromArgs};
use serde_json::{Value, json};
use std::io::{BufRead, IsTerminal};
use std::path::{Path, PathBuf};

/// Chat with a model through its chat template: each line of standard input is a message, and the answer is streamed.
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "chat")]
#[argh(
    note = "/image FILE adds an image to the next message; /reset starts a new conversation; the end of the input (Ctrl-D) ends it. If the conversation no longer fits \
            the model's context, the oldest messages are dropped first."
)]
pub struct Args {
    /// a Hugging Face model directory with a chat template
    #[argh(option, from_str_fn(hub::model))]
    pub model: PathBuf,

    /// a directory with a LoRA adapter (PEFT) for --model; given as --model, it is used with its own base model
    #[argh(option, from_str_fn(hub::model))]
    pub adapter: Option<PathBuf>,

    /// the system message
    #[argh(option)]
    pub system: Option<String>,

    /// a JPEG or PNG file that the first message is about; may be repeated
    #[argh(option)]
    pub image: Vec<String>,

    /// extra variables for the chat template, e.g. '{"enable_thinking": false}'
    #[argh(option, default = "Row::new()", from_str_fn(object))]
    pub chat_template_args: Row,

    /// the maximum number of new tokens per answer (default: 512)
    #[argh(option, default = "512")]
    pub max_new_tokens: usize,

    /// sampling temperature; 0 is greedy (default: 0.7)
    #[argh(option, default = "0.7")]
    pub temperature: f32,

    /// sample from the most likely tokens whose total probability reaches p (default: 1, off)
    #[argh(option, default = "1.0")]
    pub top_p: f32,

    /// sampling seed (default: 0)
    #[argh(option, default = "0")]
    pub seed: u64,

    /// cpu, gpu or auto: a GPU if there is one; it must support the model and pass the self-test (default: auto)
    #[argh(option, default = "DeviceName::Auto")]
    pub device: DeviceName,

    /// dtype of the weights: f32, bf16 or auto; auto is bf16 on a GPU and f32 on a CPU (default: auto)
    #[argh(option, default = "DTypeName::Auto")]
    pub dtype: DTypeName,

    /// skip the self-test of a GPU against the CPU, which takes about a second
    #[argh(switch)]
    pub no_check: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let config = RolloutConfig {
        response_tokens_max: args.max_new_tokens,
        temperature: args.temperature,
        top_p: args.top_p,
        ..RolloutConfig::default()
    };
    let config = super::generate::checked(config)?;
    let options = Options { device: args.device, dtype: args.dtype, check: !args.no_check };
    let mut talk = Talk::open("chat", (&args.model, args.adapter.as_deref()), options, config, args.seed)?;
    let begun: Vec<Value> = args.system.iter().map(|text| json!({"role": "system", "content": text})).collect();
    // A directory without a template is rejected before the first message.
    talk.tokenizer.chat().map_err(|e| {
        let model = args.model.display();
        e.hint(format!(
            "put the model's chat_template.jinja into {model}, or let it continue plain text with `rlhf-hpc generate \
             --model {model} --prompt TEXT`"
        ))
    })?;
    let mut template_args = talk.arch().chat_template().unwrap_or_default();
    template_args.extend(args.chat_template_args.clone());
    talk.tokenizer.warn_of_turn_end(&template_args);
    let mut messages = begun.clone();
    let mut images = args.image.clone();
    let is_terminal = std::io::stdin().is_terminal();
    let ask = || {
        if is_terminal {
            eprint_prompt();
        }
    };
    ask();
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(|e| Error::io("read", "standard input", &e))?;
        match line.trim() {
            "" => {}
            "/reset" => messages.clone_from(&begun),
            text if text.starts_with("/image ") => images.push(text["/image ".len()..].trim().to_owned()),
            text => {
                messages.push(json!({"role": "user", "content": content(text, std::mem::take(&mut images))}));
                let (tokens, images) = fitting(&talk, &mut messages, &template_args, begun.len())?;
                let response = talk.answer(tokens, images)?;
                messages.push(json!({"role": "assistant", "content": response.text}));
            }
        }
        ask();
    }
    talk.finish()
}

/// The content of a message: a text, or its images and the text.
fn content(text: &str, images: Vec<String>) -> Value {
    if images.is_empty() {
        return text.into();
    }
    let images = images.into_iter().map(|image| json!({"type": "image", "image": image}));
    images.chain([json!({"type": "text", "text": text})]).collect()
}

/// The tokens of the conversation, and the images among them. If there are too many, the oldest messages after the first `kept` are dropped.
fn fitting(talk: &Talk, messages: &mut Vec<Value>, args: &Row, kept: usize) -> Result<(Vec<u32>, Vec<Image>)> {
    loop {
        let (tokens, images) = encode_chat(&talk.tokenizer, messages, args, Path::new(""))?;
        // A message and its answer go together.
        if tokens.len() < talk.arch().context || messages.len() < kept + 3 {
            return Ok((tokens, images));
        }
        messages.drain(kept..kept + 2);
        note!("chat: dropped the oldest messages, the model's context is {} tokens", talk.arch().context);
    }
}

fn eprint_prompt() {
    use std::io::Write;
    let mut err = std::io::stderr();
    // A prompt that cannot be shown ends no conversation.
    let _ = err.write_all(b"> ").and_then(|()| err.flush());
}
