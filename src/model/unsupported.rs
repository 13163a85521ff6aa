//! Families that are known and not supported, with what is missing for them.

use crate::error::Error;

/// (families, the part of them that is missing here). A family is a `model_type`, or the class of `architectures` up
/// to `For`, without `_`, `-` and a last `text`, in lower case.
const UNSUPPORTED: [(&[&str], &str); 14] = [
    (
        &[
            "bart",
            "blenderbot",
            "encoderdecoder",
            "led",
            "longt5",
            "m2m100",
            "marian",
            "mbart",
            "mt5",
            "pegasus",
            "t5",
            "t5gemma",
            "t5gemma2",
            "umt5",
            "whisper",
        ],
        "it has an encoder and a decoder",
    ),
    (
        &["albert", "bert", "deberta", "debertav2", "distilbert", "electra", "modernbert", "roberta", "xlmroberta"],
        "it is an encoder, whose tokens see later ones",
    ),
    (&["llama4"], "its layers attend within chunks and have mixtures of experts"),
    (&["qwen4exp"], "it has hyper-connections, embeddings of n-grams and sparse attention"),
    (&["deepseekv32", "deepseekv4", "glmmoedsa"], "it has sparse attention and mixtures of experts"),
    (&["deepseekv2"], "its routers differ from those of DeepSeek-V3"),
    (&["kimik2", "kimik25"], "its tokenizer is Python code"),
    (
        &[
            "bamba",
            "falconh1",
            "falconmamba",
            "granitemoehybrid",
            "jamba",
            "mamba",
            "mamba2",
            "nemotronh",
            "zamba",
            "zamba2",
        ],
        "it has Mamba layers",
    ),
    (
        &["gemma3n", "gemma4"],
        "its layers share keys and values, and its small sizes (E2B, E4B) read further embeddings in each layer",
    ),
    (&["kimilinear"], "it has layers of linear attention (Kimi Delta Attention)"),
    (
        &["ernie45moe", "granitemoe", "minimax", "minimaxm2", "olmoe", "phimoe", "qwen2moe"],
        "it has mixtures of experts",
    ),
    (&["lfm2", "lfm2moe"], "it has layers of short convolutions"),
    (&["cohere", "cohere2"], "attention and MLP of its layers work in parallel, after a LayerNorm"),
    (
        &[
            "bloom",
            "falcon",
            "gpt2",
            "gptbigcode",
            "gptj",
            "gptneo",
            "gptneox",
            "mpt",
            "olmo",
            "opt",
            "phi",
            "stablelm",
            "starcoder2",
        ],
        "it has a LayerNorm instead of an RMSNorm",
    ),
];

/// What is missing for a family that is known and not supported.
pub(super) fn reason(value: &str) -> Option<&'static str> {
    let name = value.split("For").next().and_then(|name| name.split("LMHead").next()).unwrap_or_default();
    let name = name.to_lowercase().replace(['_', '-'], "");
    let name = name.strip_suffix("text").unwrap_or(&name);
    UNSUPPORTED.iter().find(|(families, _)| families.contains(&name)).map(|(_, reason)| *reason)
}

/// The error for a `key` (`model_type` or `architecture`) with an unknown value, with the reason if it is known.
pub(super) fn refused(key: &str, value: &str, with: &str) -> Error {
    let reason = reason(value).map_or(String::new(), |reason| format!(": {reason}"));
    Error::data(format!("{key} \"{value}\"{with} is not supported{reason}"))
}
