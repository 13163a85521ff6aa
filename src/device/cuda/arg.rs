//! What a kernel is given.

use std::fmt;

/// An argument of a kernel, as its parameter list has it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arg {
    Address(u64),
    I32(i32),
    U32(u32),
    U64(u64),
    F32(f32),
}

impl Arg {
    /// Its bits, in the lower bytes.
    pub(super) fn word(self) -> u64 {
        match self {
            Self::Address(x) | Self::U64(x) => x,
            Self::I32(x) => u64::from(x as u32),
            Self::U32(x) => u64::from(x),
            Self::F32(x) => u64::from(x.to_bits()),
        }
    }
}

impl fmt::Display for Arg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(x) => write!(f, "{x:#x}"),
            Self::I32(x) => write!(f, "{x}"),
            Self::U32(x) => write!(f, "{x}"),
            Self::U64(x) => write!(f, "{x}"),
            Self::F32(x) => write!(f, "{x}"),
        }
    }
}

macro_rules! from_number {
    ($($number:ty => $variant:ident),*) => {
        $(impl From<$number> for Arg {
            fn from(x: $number) -> Self {
                Self::$variant(x)
            }
        })*
    };
}

from_number!(i32 => I32, u32 => U32, u64 => U64, f32 => F32);

impl From<usize> for Arg {
    /// Lengths go to kernels as u64; dims that kernels take as int are `i32`.
    fn from(x: usize) -> Self {
        Self::U64(x as u64)
    }
}
