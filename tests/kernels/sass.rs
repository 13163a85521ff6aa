//! What ptxas makes of the loops in which kernels spend their time: instructions for a product of the tensor cores, which unit
//! bounds them, whether copies are under way while there is work. Read off the machine code, never measured.
//!
//! Needs nvdisasm: that of RLHF_NVDISASM, else the one beside nvcc or on PATH. `bench/kernels-sass.sh` writes the tables.

mod clocks;
mod listing;
mod loops;

use clocks::Unit;
use listing::Instruction;
use loops::Loop;
use rlhf_hpc::device::cuda::carried::CUBINS;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Sources whose kernels multiply.
const SOURCES: [&str; 8] = [
    "attention.cu",
    "attention_backward.cu",
    "linear_logprob_fused.cu",
    "matmul.cu",
    "matmul_backward.cu",
    "paged_attention.cu",
    "paged_prefill.cu",
    "paged_split.cu",
];

/// A kernel whose time is that of its products, and what a scheduler has of it at once: blocks of threads on a multiprocessor,
/// and warps of each on a scheduler.
struct Bound {
    kernel: &'static str,
    blocks: usize,
    warps: usize,
    /// The most instructions for a product, and the fewest products between a copy and the wait for it.
    slots: f64,
    behind: usize,
}

const fn bound(kernel: &'static str, [blocks, warps]: [usize; 2], slots: f64, behind: usize) -> Bound {
    Bound { kernel, blocks, warps, slots, behind }
}

/// The ceilings lie a little above what nvcc 13.0 makes, for other compilers' sake.
const BOUNDS: [Bound; 12] = [
    bound("attention_forward_64", [2, 1], 5.8, 64),
    bound("attention_forward_128", [2, 1], 4.0, 128),
    bound("attention_backward_64", [1, 2], 6.0, 150),
    bound("attention_backward_128", [1, 2], 3.8, 300),
    bound("paged_prefill_64", [2, 1], 5.7, 64),
    bound("paged_prefill_128", [2, 1], 3.9, 128),
    bound("linear_logprob_fused", [1, 2], 2.7, 120),
    bound("matmul_forward_64", [2, 1], 4.0, 90),
    bound("matmul_forward_128", [2, 1], 2.6, 120),
    bound("matmul_backward_input_64", [2, 1], 4.2, 90),
    bound("matmul_backward_input_128", [2, 1], 2.7, 120),
    bound("matmul_backward_weight_128", [2, 1], 2.7, 120),
];

fn nvdisasm() -> Option<PathBuf> {
    let named = |name| std::env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
    let beside = named("RLHF_NVCC").map(|nvcc| nvcc.with_file_name("nvdisasm"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let dirs = std::env::split_paths(&path).chain([PathBuf::from("/usr/local/cuda/bin")]);
    let installed = dirs.map(|dir| dir.join("nvdisasm"));
    let found = named("RLHF_NVDISASM").or(beside.into_iter().chain(installed).find(|path| path.is_file()));
    if found.is_none() {
        eprintln!("skipped: no nvdisasm");
    }
    found
}

/// The kernels of a cubin and their code.
fn disassembled(nvdisasm: &Path, cubin: &[u8]) -> Vec<(String, Vec<Instruction>)> {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("cubin");
    std::fs::write(&file, cubin).expect("a file");
    let out = Command::new(nvdisasm).args(["-c", "-hex"]).arg(&file).output().expect("nvdisasm starts");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    listing::kernels(&String::from_utf8_lossy(&out.stdout))
}

fn count(way: &[&Instruction], kinds: &[&str]) -> usize {
    way.iter().filter(|one| kinds.contains(&one.kind())).count()
}

/// The innermost loops with products.
fn hot(code: &[Instruction]) -> Vec<Vec<&Instruction>> {
    let multiplies = |one: &Loop| one.way.iter().any(|at| code[*at].kind() == "HMMA");
    let all: Vec<Loop> = loops::loops(code).into_iter().filter(multiplies).collect();
    let is_outer = |one: &Loop| {
        let inside: BTreeSet<usize> = one.way.iter().copied().collect();
        all.iter().any(|other| other.head != one.head && other.way.iter().all(|at| inside.contains(at)))
    };
    all.iter().filter(|one| !is_outer(one)).map(|one| one.way.iter().map(|at| &code[*at]).collect()).collect()
}

fn counts_row(kernel: &str, arch: &str, way: &[&Instruction]) -> String {
    let products = count(way, &["HMMA"]);
    let moves =
        way.iter().filter(|one| matches!(one.kind(), "MOV" | "CS2R") || one.name.starts_with("IMAD.MOV")).count();
    let integers =
        ["IMAD", "IADD3", "LEA", "LOP3", "SHF", "ISETP", "VIADD", "IMNMX", "VIMNMX", "SEL", "PRMT", "VIADDMNMX"];
    let groups: [&[&str]; 11] = [
        &["LDSM"],
        &["LDS", "STS"],
        &["LDGSTS"],
        &["LDG", "STG", "RED", "REDG"],
        &["MUFU"],
        &["FFMA", "FMUL", "FADD"],
        &["FMNMX", "FSETP", "FSEL"],
        &["F2FP"],
        &["SHFL"],
        &["BAR", "DEPBAR"],
        &["LDL", "STL"],
    ];
    let mut row =
        format!("| {kernel} | {arch} | {} | {products} | {:.2} |", way.len(), way.len() as f64 / products as f64);
    for group in groups {
        let _ = write!(row, " {} |", count(way, group));
    }
    let branches = count(way, &["BRA", "BSSY", "BSYNC", "WARPSYNC"]);
    let whole = count(way, &integers).saturating_sub(way.iter().filter(|one| one.name.starts_with("IMAD.MOV")).count());
    let _ = write!(row, " {whole} | {moves} | {branches} |");
    row
}

fn clocks_row(kernel: &str, arch: &str, way: &[&Instruction]) -> String {
    let units = clocks::units(way, arch);
    let of = |unit| units.get(&unit).copied().unwrap_or(0.0);
    let (slowest, most) = units.iter().max_by(|a, b| a.1.partial_cmp(b.1).expect("numbers")).expect("some unit");
    let mut row = format!("| {kernel} | {arch} |");
    for unit in [Unit::Tensor, Unit::Shared, Unit::Special, Unit::Fma, Unit::Alu, Unit::Issue] {
        let _ = write!(row, " {:.0} |", of(unit));
    }
    let stalls: u32 = way.iter().map(|one| one.stall.max(1)).sum();
    let behind = clocks::products_behind_copies(way).map_or(String::new(), |n| n.to_string());
    let share = |share: f64| format!("{:.0} %", 100.0 * share);
    let name = if *slowest == Unit::Tensor { String::new() } else { format!(" ({slowest:?})") };
    let _ = write!(row, " {stalls} | {behind} | {}{name} |", share(of(Unit::Tensor) / most));
    let together = BOUNDS.iter().find(|bound| bound.kernel == kernel);
    let together = together.map(|bound| share(clocks::share(way, arch, bound.blocks, bound.warps))).unwrap_or_default();
    let _ = write!(row, " {} | {together} |", share(clocks::share(way, arch, 1, 1)));
    row
}

/// Of each kernel and architecture, its name, its code and what the architecture is called.
fn all_kernels(nvdisasm: &Path) -> Vec<(String, &'static str, Vec<Instruction>)> {
    let multiply = CUBINS.iter().filter(|cubin| SOURCES.contains(&cubin.source));
    multiply
        .flat_map(|cubin| disassembled(nvdisasm, cubin.bytes).into_iter().map(|(name, code)| (name, cubin.arch, code)))
        .collect()
}

#[test]
fn hot_loops_keep_to_their_instructions_without_local_memory() {
    if CUBINS.is_empty() || crate::on_a_real_gpu() {
        eprintln!("skipped: no cubins");
        return;
    }
    let Some(nvdisasm) = nvdisasm() else { return };
    let mut kernels = all_kernels(&nvdisasm);
    kernels.sort_by(|a, b| (&a.0, a.1).cmp(&(&b.0, b.1)));
    let (mut counts, mut reckoned, mut seen) = (String::new(), String::new(), 0);
    for (kernel, arch, code) in &kernels {
        let local = code.iter().filter(|one| matches!(one.kind(), "LDL" | "STL")).count();
        assert_eq!(local, 0, "{kernel} for {arch} uses local memory");
        let bound = BOUNDS.iter().find(|bound| bound.kernel == kernel);
        for way in hot(code) {
            let products = count(&way, &["HMMA"]);
            let _ = writeln!(counts, "{}", counts_row(kernel, arch, &way));
            let _ = writeln!(reckoned, "{}", clocks_row(kernel, arch, &way));
            let Some(bound) = bound else { continue };
            seen += 1;
            let slots = way.len() as f64 / products as f64;
            assert!(
                slots <= bound.slots,
                "{kernel} for {arch}: {slots:.2} instructions a product, needed {}",
                bound.slots
            );
            let behind = clocks::products_behind_copies(&way).expect("copies");
            assert!(behind >= bound.behind, "{kernel} for {arch}: a copy is waited for {behind} products behind it");
            // Numbers of pages: on their way while scores are computed.
            let loads = clocks::instructions_behind_loads(&way).unwrap_or(usize::MAX);
            assert!(loads >= 50, "{kernel} for {arch}: a load is waited for {loads} instructions behind it");
        }
    }
    assert!(seen >= BOUNDS.len() * 2, "{seen} hot loops of {} kernels for two architectures", BOUNDS.len());
    if let Some(file) = std::env::var_os("SASS_TABLES") {
        std::fs::write(file, format!("{counts}\n{reckoned}")).expect("the tables can be written");
    }
}

/// A listing of instructions, with stall counts of 1 and no barriers.
fn listed(lines: &[&str]) -> Vec<Instruction> {
    let mut text = String::from("\t.section\t.text.k\n.text.k:\n");
    for (i, line) in lines.iter().enumerate() {
        if line.ends_with(':') {
            let _ = writeln!(text, "{line}");
        } else {
            let _ = writeln!(text, "        /*{:04x}*/  {line} ;  /* 0x0000000000007918 */", 16 * i);
            let _ = writeln!(text, "  /* 0x{:016x} */", 1_u64 << 41 | 0x3f << 46);
        }
    }
    let mut kernels = listing::kernels(&text);
    assert_eq!((kernels.len(), kernels[0].0.as_str()), (1, "k"));
    kernels.remove(0).1
}

#[test]
fn the_way_through_a_loop_is_the_one_with_the_products() {
    let code = listed(&[
        "MOV R1, R2",
        ".L_x_0:",
        "@P0 BRA `(.L_x_1)",
        "HMMA.16816.F32.BF16 R4, R8, R12, R4",
        "@!P1 BRA `(.L_x_2)",
        "FSEL R4, R4, RZ, P2",
        ".L_x_2:",
        "HMMA.16816.F32.BF16 R4, R8, R12, R4",
        ".L_x_1:",
        "@P3 BRA `(.L_x_0)",
        "EXIT",
    ]);
    let hot = hot(&code);
    let names: Vec<&str> = hot[0].iter().map(|one| one.kind()).collect();
    assert_eq!((hot.len(), names.as_slice()), (1, ["BRA", "HMMA", "BRA", "HMMA", "BRA"].as_slice()));
}

#[test]
fn control_bits_are_read() {
    let bits = |upper: u64| {
        let text = format!(".text.k:\n /*0000*/ @!P0 LDSM.16.M88.4 R32, [R245] ; /* 0x1 */\n /* 0x{upper:016x} */\n");
        listing::kernels(&text).remove(0).1.remove(0)
    };
    // Stall 5, write barrier 2, no read barrier, waits for barriers 0 and 3.
    let one = bits(5 << 41 | 2 << 46 | 7 << 49 | 0b1001 << 52);
    assert_eq!((one.stall, one.sets, one.waits), (5, [Some(2), None], 0b1001));
    assert!(one.is_conditional && one.kind() == "LDSM" && one.operands == "R32, [R245]");
}

#[test]
fn the_model_is_bound_by_the_slowest_unit_and_by_waits() {
    let products = |n: usize| vec!["HMMA.16816.F32.BF16 R4, R8, R12, R4"; n];
    let ways = |lines: &[&str]| listed(lines);
    let share =
        |code: &[Instruction], blocks, warps| clocks::share(&code.iter().collect::<Vec<_>>(), "sm_80", blocks, warps);
    let near = |got: f64, wanted: f64| assert!((got - wanted).abs() < 0.02, "{got}, wanted {wanted}");
    near(share(&ways(&products(32)), 1, 1), 1.0);
    // Eight clocks of products beside sixteen of shared memory.
    let lines = [products(16), vec!["LDSM.16.M88.4 R8, [R1]"; 16]].concat();
    near(share(&ways(&lines), 2, 1), 0.5);
    // A copy that is waited for at once takes its latency, unless another block works meanwhile.
    let lines = [vec!["LDGSTS.E.BYPASS.128 [R1], [R2.64]", "LDGDEPBAR", "DEPBAR.LE SB0, 0x0"], products(88)].concat();
    near(share(&ways(&lines), 1, 1), 0.5);
    let both = share(&ways(&lines), 2, 1);
    assert!(both > 0.7, "{both}");
}
