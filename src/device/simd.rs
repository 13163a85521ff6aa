//! The vector instructions that this process uses: detected once, never assumed.
//!
//! Kernels give the same bits on every level (f32): all compute the same chains of fused multiply-adds, only several at
//! a time. `RLHF_SIMD=scalar|avx2|avx512` lowers the level of the whole process.

use std::cell::Cell;
use std::sync::OnceLock;

/// A family of vector instructions, weakest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    Scalar,
    /// AVX2 with FMA.
    Avx2,
    /// AVX-512 F, BW, DQ, VL (and AVX2, FMA).
    Avx512,
}

/// A proof that the processor has an `Isa` (and whether it has AVX512-BF16): only detection makes one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level {
    isa: Isa,
    bf16: bool,
}

impl Level {
    pub fn isa(self) -> Isa {
        self.isa
    }

    /// Whether `vdpbf16ps` may be used.
    pub fn bf16_dot(self) -> bool {
        self.bf16
    }

    /// The processor's level, regardless of `RLHF_SIMD`.
    pub fn detected() -> Self {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            let isa = if avx512 { Isa::Avx512 } else { Isa::Avx2 };
            return Self { isa, bf16: avx512 && is_x86_feature_detected!("avx512bf16") };
        }
        Self { isa: Isa::Scalar, bf16: false }
    }

    /// Every level this processor can run, strongest first; AVX-512 with and without AVX512-BF16.
    pub fn available() -> Vec<Self> {
        let top = Self::detected();
        let mut levels = vec![top];
        for isa in [Isa::Avx512, Isa::Avx2, Isa::Scalar] {
            let level = Self { isa, bf16: false };
            if isa <= top.isa && level != top {
                levels.push(level);
            }
        }
        levels
    }
}

thread_local! {
    static FORCED: Cell<Option<Level>> = const { Cell::new(None) };
}

/// The level for a kernel that starts now. Read it once on the thread that starts the kernel, and pass it to the
/// workers, because `with_level` applies only to its own thread.
pub fn level() -> Level {
    static LEVEL: OnceLock<Level> = OnceLock::new();
    FORCED.get().unwrap_or_else(|| {
        *LEVEL.get_or_init(|| {
            let wanted = match std::env::var("RLHF_SIMD").as_deref() {
                Ok("scalar") => Isa::Scalar,
                Ok("avx2") => Isa::Avx2,
                _ => Isa::Avx512,
            };
            let top = Level::detected();
            if wanted >= top.isa { top } else { Level { isa: wanted, bf16: false } }
        })
    })
}

/// Runs `f` with `level()` forced on this thread (tests compare the levels).
pub fn with_level<R>(level: Level, f: impl FnOnce() -> R) -> R {
    struct Restore(Option<Level>);
    impl Drop for Restore {
        fn drop(&mut self) {
            FORCED.set(self.0);
        }
    }
    let _restore = Restore(FORCED.replace(Some(level)));
    f()
}

/// Defines `fn name(level: Level, ...)` whose body is compiled once per level, so that the compiler vectorizes it with
/// that level's instructions. The bits cannot differ: the compiler neither reorders nor fuses float operations. Fused
/// ones are written `mul_add`.
macro_rules! leveled {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident : $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name(level: $crate::device::simd::Level, $($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                fn avx512($($arg: $ty),*) $(-> $ret)? {
                    body($($arg),*)
                }
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($arg: $ty),*) $(-> $ret)? {
                    body($($arg),*)
                }
                match level.isa() {
                    // SAFETY: a Level exists only where the processor has its instructions.
                    $crate::device::simd::Isa::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    $crate::device::simd::Isa::Avx2 => return unsafe { avx2($($arg),*) },
                    $crate::device::simd::Isa::Scalar => {}
                }
            }
            let _ = level;
            body($($arg),*)
        }
    };
}
pub(crate) use leveled;
