//! The kernels in the text of a source, and what they take of a multiprocessor, as `ptxas -v` reports it. The build script reads
//! this file, too.

/// Of one kernel, for one architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resources<'a> {
    pub kernel: &'a str,
    /// Of a thread.
    pub registers: u32,
    /// Of a block, beside what the launch asks for.
    pub shared_bytes: u32,
    /// Of a thread, in memory: arrays and spilled registers.
    pub stack_bytes: u32,
    /// Stores and loads of spilled registers, in the text of the kernel.
    pub spill_bytes: u32,
}

/// The kernels of a report, in its order.
pub fn parse(report: &str) -> Vec<Resources<'_>> {
    let mut found: Vec<Resources> = Vec::new();
    for line in report.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let kernel = rest.split('\'').next().unwrap_or_default();
            found.push(Resources { kernel, registers: 0, shared_bytes: 0, stack_bytes: 0, spill_bytes: 0 });
        }
        let Some(last) = found.last_mut() else { continue };
        if line.contains("bytes stack frame") {
            last.stack_bytes = before(line, "bytes stack frame");
            last.spill_bytes = before(line, "bytes spill stores") + before(line, "bytes spill loads");
        }
        if line.contains(": Used ") {
            last.registers = before(line, "registers");
            last.shared_bytes = before(line, "bytes smem");
        }
    }
    found
}

/// The number that stands before `words`; 0 where they do not occur.
fn before(line: &str, words: &str) -> u32 {
    let place = line.find(words).map(|at| &line[..at]);
    place.and_then(|text| text.split_whitespace().next_back()?.parse().ok()).unwrap_or(0)
}

/// The name on a line that begins a kernel: `KERNEL name(` or `KERNEL __launch_bounds__(256) name(`.
fn name(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("KERNEL ")?;
    let rest = match rest.strip_prefix("__launch_bounds__") {
        Some(bounds) => bounds.split_once(')')?.1,
        None => rest,
    };
    let name = rest.split('(').next()?.trim();
    (!name.is_empty()).then_some(name)
}

/// The names of a source's kernels, in its order.
pub fn kernels(text: &str) -> Vec<&str> {
    text.lines().filter_map(name).collect()
}
