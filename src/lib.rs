//! RLHF post-training of language models on an HPC cluster, in one process per rank.
//!
//! The modules, from the top down; imports go down only, and modules of level 5 do not import each other.
//!
//! | level | modules |
//! |---|---|
//! | 10 | `cli` |
//! | 9 | `plan` |
//! | 8 | `train` |
//! | 7 | `launch` |
//! | 6 | `learn` |
//! | 5 | `data` `rollout` `reward` `advantage` `loss` `optim` `checkpoint` `metrics` |
//! | 4 | `model` `text` |
//! | 3 | `ops` `comm` |
//! | 2 | `tensor` |
//! | 1 | `device` `sys` |
//! | 0 | `config` `mesh` `experience` `dtype` `error` `rng` |

pub mod advantage;
pub mod checkpoint;
pub mod cli;
pub mod comm;
pub mod config;
pub mod data;
pub mod device;
pub mod dtype;
pub mod error;
pub mod experience;
pub mod launch;
pub mod learn;
pub mod loss;
pub mod mesh;
pub mod metrics;
pub mod model;
pub mod ops;
pub mod optim;
pub mod plan;
pub mod reward;
pub mod rng;
pub mod rollout;
pub mod sys;
pub mod tensor;
pub mod text;
pub mod train;
