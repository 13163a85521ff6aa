//! Kernels in the text of a source. The build script reads this file, too.

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
