//! Losses and advantages: against OpenRLHF's numbers, against finite differences, and as facts.

mod advantages;
mod against_openrlhf;
mod golden;
mod losses;
