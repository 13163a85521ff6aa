//! What a metric is. `metrics::keys` has the table of all metrics; methods declare their own in `config::method`.

/// The unit of a metric, in which most names end (`_s`, `_bytes`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    One,
    /// A whole number.
    Count,
    /// A share from 0 to 1.
    Ratio,
    /// Natural-log units per token.
    Nats,
    Tokens,
    TokensPerSecond,
    Seconds,
    Bytes,
}

impl Unit {
    /// Whether whole values are written without a decimal point.
    pub fn is_whole(self) -> bool {
        matches!(self, Self::Count | Self::Tokens | Self::Bytes)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    pub name: &'static str,
    pub section: &'static str,
    pub unit: Unit,
    pub meaning: &'static str,
}
