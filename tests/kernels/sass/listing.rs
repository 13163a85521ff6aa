//! The machine code of a cubin, as nvdisasm writes it: a line for an instruction, its 128 bits behind it in two comments.

use std::collections::BTreeMap;

/// An instruction, with what its control bits say to the scheduler. Their places (stall 105..109, barriers 110..116, waits
/// 116..122) are those that Mesa's compiler writes (`nak/sm70_encode.rs`), found first by arXiv:1804.06826 section 2.1.
pub struct Instruction {
    /// Its name with all modifiers, as `HMMA.16816.F32.BF16`.
    pub name: String,
    pub operands: String,
    /// Whether a predicate may leave it out.
    pub is_conditional: bool,
    /// Clocks before the warp's next instruction.
    pub stall: u32,
    /// The barrier that ends when its result is there, and the one that ends when its operands have been read.
    pub sets: [Option<usize>; 2],
    /// The barriers that must have ended before it starts, one bit each.
    pub waits: u32,
    /// Where it may go, in instructions from the start of the kernel.
    pub target: Option<usize>,
}

impl Instruction {
    /// Its name without modifiers.
    pub fn kind(&self) -> &str {
        self.name.split('.').next().unwrap_or_default()
    }

    /// Whether what stands behind it is reached from elsewhere alone.
    pub fn ends(&self) -> bool {
        // A jump that asks a second predicate, or whether lanes have parted, names it before the place.
        let goes = self.kind() == "BRA" && !self.operands.contains(',');
        !self.is_conditional && (goes || matches!(self.kind(), "EXIT" | "RET"))
    }
}

/// The kernels of a listing and their instructions.
pub fn kernels(listing: &str) -> Vec<(String, Vec<Instruction>)> {
    let mut kernels: Vec<(String, Vec<Instruction>)> = Vec::new();
    let mut labels: Vec<BTreeMap<String, usize>> = Vec::new();
    for line in listing.lines() {
        let line = line.trim();
        if let Some(name) = line.strip_prefix(".text.").and_then(|name| name.strip_suffix(':')) {
            kernels.push((name.to_owned(), Vec::new()));
            labels.push(BTreeMap::new());
        } else if let (Some((_, code)), Some(labels)) = (kernels.last_mut(), labels.last_mut()) {
            if let Some(label) = line.strip_suffix(':') {
                labels.insert(label.to_owned(), code.len());
            } else if let Some(instruction) = instruction(line) {
                code.push(instruction);
            } else if let (Some(upper), Some(last)) = (upper_half(line), code.last_mut()) {
                decode(last, upper);
            }
        }
    }
    for ((_, code), labels) in kernels.iter_mut().zip(&labels) {
        for instruction in code {
            instruction.target = target(instruction).and_then(|label| labels.get(label).copied());
        }
    }
    kernels
}

/// The label to which an instruction may go. BSSY names the place where a warp's lanes meet again, which they reach by themselves.
fn target(instruction: &Instruction) -> Option<&str> {
    let goes = matches!(instruction.kind(), "BRA" | "JMP" | "CALL");
    let label = instruction.operands.split("`(").nth(1).and_then(|rest| rest.split(')').next());
    label.filter(|_| goes)
}

/// `/*0db0*/ @!P0 BRA `(.L_x_179) ; /* 0x... */`
fn instruction(line: &str) -> Option<Instruction> {
    let (_, rest) = line.strip_prefix("/*")?.split_once("*/")?;
    let text = rest.split_once(';')?.0.trim();
    let is_conditional = text.starts_with('@');
    let text = if is_conditional { text.split_once(' ')?.1.trim() } else { text };
    let (name, operands) = text.split_once(' ').unwrap_or((text, ""));
    let (name, operands) = (name.to_owned(), operands.trim().to_owned());
    Some(Instruction { name, operands, is_conditional, stall: 0, sets: [None; 2], waits: 0, target: None })
}

/// The second comment: the upper 64 bits.
fn upper_half(line: &str) -> Option<u64> {
    let digits = line.strip_prefix("/* 0x")?.strip_suffix("*/")?.trim();
    u64::from_str_radix(digits, 16).ok()
}

fn decode(instruction: &mut Instruction, upper: u64) {
    let field = |from: u32, bits: u32| (upper >> (from - 64) & ((1 << bits) - 1)) as u32;
    let barrier = |from| Some(field(from, 3) as usize).filter(|barrier| *barrier < 6);
    instruction.stall = field(105, 4);
    instruction.sets = [barrier(110), barrier(113)];
    instruction.waits = field(116, 6);
}
