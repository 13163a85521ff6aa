//! RLHF post-training of language models on an HPC cluster, in one process per rank.
//!
//! The modules, from the top down; imports go down only, and modules of one level do not import each other.
//!
//! | level | modules |
//! |---|---|
//! | 11 | `cli` |
//! | 10 | `plan` |
//! | 9 | `train` |
//! | 8 | `launch` |
//! | 7 | `learn` |
//! | 6 | `data` `rollout` `reward` `advantage` `loss` `optim` `checkpoint` `metrics` |
//! | 5 | `model` `text` |
//! | 4 | `ops` `comm` `images` |
//! | 3 | `tensor` |
//! | 2 | `device` |
//! | 1 | `sys` |
//! | 0 | `config` `mesh` `experience` `pictures` `dtype` `error` `hub` `rng` `url` |

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
pub mod hub;
pub mod images;
pub mod launch;
pub mod learn;
pub mod loss;
pub mod mesh;
pub mod metrics;
pub mod model;
pub mod ops;
pub mod optim;
pub mod pictures;
pub mod plan;
pub mod reward;
pub mod rng;
pub mod rollout;
pub mod sys;
pub mod tensor;
pub mod text;
pub mod train;
pub mod url;
