//! Facts about the cli.
