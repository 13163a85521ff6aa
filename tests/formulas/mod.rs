//! Losses and advantages: against OpenRLHF's numbers, against finite differences, and their properties.

mod advantages;
mod against_openrlhf;
mod golden;
mod losses;
