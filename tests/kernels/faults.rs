//! Faults that are planted in the kernels, one in each source, which a test must notice: so the tests are known to
//! look.
//!
//! A test runs once more in a child process, on kernels with the fault. The emulated kernels contain all faults, each
//! next to the right code; the environment selects one.

use crate::emulation::{self, FAULT, LIBRARY};
use std::process::Command;

/// Wrong code in a source: file, a unique context with `@` in place of the expression or statement, the right code, and
/// the wrong code.
pub type Fault = (&'static str, &'static str, &'static str, &'static str);

/// Words that the name of one test of this target alone has, what it must notice, and words in which it does: of its
/// assertion, or of the emulated GPU.
type Case = (&'static str, Fault, &'static str);

const CASES: [Case; 25] = [
    ("adamw::an_update", ("adamw.cu", "while (@ &&", "at + i >= end", "at + i > end"), "p of 3001 from 0"),
    (
        "attention::the_order_of_threads_and_blocks",
        ("attention_backward.cuh", "while (lane_id() == 0 && @) pause();", "!may_add()", "false"),
        "in this launch (block",
    ),
    ("copy::runs_of_any_length", ("copy.cu", "@", "b[i] += a[i]", "b[i] = a[i]"), " from "),
    ("rollout::more_requests", ("decode.cu", "Sequence{@, 1", "(i32)slot.past", "(i32)slot.past / 2"), "request "),
    (
        "ops::rows_of_tokens",
        ("rows.cuh", "end = @;", "starts[blockIdx.x + 1]", "starts[blockIdx.x + 1] + 1"),
        "rows.cuh:",
    ),
    (
        "linear_logprob::gradients_are_those",
        ("linear_logprob.cu", "@", "first + i == place", "first + i == place + 1"),
        "row 0 column 0 of 1: ",
    ),
    (
        "linear_logprob_fused::",
        ("linear_logprob_fused.cu", "put(sums, logits, strip);\n            @", "SYNC_BLOCK();", ""),
        "with no barrier between",
    ),
    (
        "linear_logprob::statistics_are_those",
        ("softmax.cuh", "load(row + at + i) : @", "-infinity()", "0.0f"),
        "1 columns at 0.3, row 1: ",
    ),
    (
        "matmul::forward_equals",
        ("tile.cuh", "place(row + @, 2 * step ^ lane / 8 % 2)", "lane / 16 * 8 + lane % 8", "lane % 16"),
        ", needed ",
    ),
    ("matmul::a_sum_onto_another", ("matmul.cuh", "@", "load_four(y.addend + at)", "load_four(to)"), "gap 0 shift 0"),
    (
        "matmul::glu_of_two",
        ("matmul_glu.cuh", "line += @;", "run / 2 * RUN + down % RUN", "down"),
        "(1, 96, 64) Rows32",
    ),
    (
        "norm::sums_of_squares",
        ("norm.cu", "sum += @;", "(double)x[at] * x[at]", "(double)(x[at] * x[at])"),
        " values, blocks of ",
    ),
    (
        "paged_attention::prefill_and_decode",
        ("paged_attention.cu", "if (@) low", "b == warp", "b == 0"),
        ": other bits than training's",
    ),
    (
        "paged_attention::prefill_and_decode",
        ("paged_prefill.cu", "@", "first + KEYS > seen.top", "first + KEYS > seen.top + 1"),
        ": other bits than training's",
    ),
    (
        "paged_attention::a_token",
        ("flash.cuh", "@", "sum[i % 2] += s[n][i];", "sum[0] += s[n][i];"),
        ": other bits than training's",
    ),
    (
        "paged_attention::a_token",
        ("paged.cuh", "@", "first_key(work, work.row) / KEYS * KEYS", "first_key(work, work.row) / PAGE * PAGE"),
        ": other bits than training's",
    ),
    (
        "paged_attention::split_decoding",
        ("paged_split.cu", "values + @ % 3", "(stage + 2)", "(stage + 1)"),
        "with no barrier between",
    ),
    (
        "paged_attention::rows_are_appended",
        ("kv_cache.cu", "own) * PAGE + @", "slot % PAGE", "slot / PAGE % PAGE"),
        "with no barrier between (block",
    ),
    ("rank_sum::parts", ("rank_sum.cu", "@), count, false", "first + j", "ranks - first - j"), "300 of 5"),
    ("ring::blocks", ("attention.cu", "@", "by[m][h] *= expf(all - both);", ""), ": o: row"),
    ("ops::groups", ("rmsnorm.cu", "@; other /= 2", "other > 0", "other > 1"), "norm of 1 groups of "),
    ("ops::every_head_is_turned", ("rope.cuh", "@", "-y * turn", "y * turn"), ", needs "),
    ("sample::equal_probabilities", ("select.cuh", "@", "token <= row.last", "token < row.last"), "row 0 of 1 values"),
    ("ops::gates", ("glu.cuh", "@", "(1.0f - s)", "(1.0f + s)"), ": dgate["),
    ("ops::values", ("column_sums.cu", "@", "SYNC_BLOCK();", ""), "with no barrier between"),
];

/// Kernels with one fault, and the message at the start of a run.
pub const OF_STARTS: [(Fault, &str); 3] = [
    (("attention.cu", "most(0, @)", "end_key(tile, r) - first", "end_key(tile, r) + 1 - first"), "the hidden state"),
    (
        ("attention_backward.cuh", "(u32)(@)", "ahead - later + n * 8 + i", "ahead - later + n * 8 + i + 1"),
        "the gradient of model.layers.1.",
    ),
    (("decode.cu", "@", "slot.past++;", ""), "after a prompt of 70"),
];

/// All of them: the first has number 1.
pub fn all() -> impl Iterator<Item = &'static Fault> {
    CASES.iter().map(|(_, fault, _)| fault).chain(OF_STARTS.iter().map(|(fault, _)| fault))
}

/// The number of the fault of a start.
pub fn of_start(i: usize) -> usize {
    CASES.len() + 1 + i
}

#[test]
fn a_fault_in_any_source_of_kernels_is_noticed() {
    if crate::on_a_real_gpu() {
        return;
    }
    let missed: Vec<String> = CASES.iter().zip(1..).filter_map(noticed).collect();
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

/// Why a test does not notice the fault of this number; none where it does.
fn noticed(((test, (file, _, right, wrong), words), number): (&Case, usize)) -> Option<String> {
    let mut child = Command::new(std::env::current_exe().expect("the path of this target"));
    child.args([test, "--nocapture", "--test-threads=1"]).env(LIBRARY, emulation::gpu());
    // Where it failed is nobody's question, and takes longer to find out than many a test.
    let done = child.env(FAULT, number.to_string()).env("RUST_BACKTRACE", "0").output();
    let done = done.expect("this target starts once more");
    let [said, complained] = [&done.stdout, &done.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    let how = format!("{test} with `{wrong}` for `{right}` in {file}");
    if !said.contains("running 1 test") {
        return Some(format!("there is another number of tests {test} than one: {said}"));
    }
    if done.status.success() {
        return Some(format!("{how} passes"));
    }
    (!complained.contains(words)).then(|| format!("{how} fails, not by `{words}`:\n{complained}"))
}
