//! Plans of jobs whose rows have images: the tower, what its update keeps, and the rows that are kept for each image.

use super::models::job;
use rlhf_hpc::config::Config;
use rlhf_hpc::config::mesh::RoleName;
use rlhf_hpc::config::method::JobKind;
use rlhf_hpc::config::model::DTypeName;
use rlhf_hpc::data::{RowImages, RowTokens};
use rlhf_hpc::launch::layout::{Layout, Swap};
use rlhf_hpc::mesh::Mesh;
use rlhf_hpc::model::{Arch, Head};
use rlhf_hpc::plan::{self, Device, Job, Memory, Phase, Rows};
use rlhf_hpc::train::{self, Archs};
use std::path::Path;

fn count(config: &Config, arch: &Arch, rows: &Rows, data: usize) -> Memory {
    let archs = Archs(vec![(RoleName::Actor, Head::LanguageModel, arch.clone())]);
    let job = Job::new(config, &archs, Some(rows.clone()));
    let mesh = Mesh::data_only(data);
    let layout = Layout { mesh, zero: 0, chunks: 1, rollout_tensor: 1, swap: Swap::default() };
    let memory = plan::count(&job, &layout, &Device::cpu(1 << 40, data), &[RoleName::Actor]).0;
    assert!(memory.failed.is_none(), "{:?}", memory.failed);
    memory
}

#[test]
fn a_plan_counts_the_tower_and_the_rows_of_all_images() {
    let arch = Arch::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/vision-qwen3_vl")).unwrap();
    let mut config = job(&[]);
    config.job.kind = JobKind::Sft;
    config.model.dtype = DTypeName::F32;
    config.sft.minibatch_samples = 8;
    // Two images of 12 tokens.
    let images = RowImages { count: 2, tokens: 24, patches: 96 };
    let with = |images| {
        let tokens = vec![RowTokens { prompt: 40, response: 20, images }; 8];
        Rows::from_tokens(&config, &train::shape(&config), arch.context, &tokens, &[])
    };
    let (text, rows) = (with(RowImages::default()), Rows { images: 1000, ..with(images) });
    let [none, frozen, half] =
        [(&text, 1), (&rows, 1), (&rows, 2)].map(|(rows, data)| count(&config, &arch, rows, data));
    let trained = count(&config, &arch.clone().with_tower().unwrap(), &rows, 1);
    let parameters = arch.tower_parameters().unwrap();
    let of = |memory: &Memory, owner: &str| memory.bytes_of(Phase::Train, owner);
    let tower = "weights of the vision tower";
    assert_eq!([of(&none, tower), of(&none, "rows of images")], [0; 2]);
    // Each of its tensors, which are small here, has whole pages.
    assert!((4 * parameters..7 * parameters).contains(&of(&frozen, tower)), "{} of {parameters}", of(&frozen, tower));
    // The rows for the tokens and those after two layers, each of width 24. Those of the 16 images of the step have whole
    // pages.
    let (each, page) = (12 * 24 * 4, 4096);
    let all = |images: usize, of_step: usize| 3 * (images * each + of_step * (page - each));
    assert_eq!([of(&frozen, "rows of images"), of(&half, "rows of images")], [all(1000, 16), all(500, 8)]);
    let more = |owner: &str| of(&trained, owner) - of(&frozen, owner);
    assert!((4 * parameters..7 * parameters).contains(&more("gradients")), "{}", more("gradients"));
    assert!((8 * parameters..14 * parameters).contains(&more("optimizer state")));
    assert!(more("activations") > 8 * 96 * 20 * 4, "blocks keep their inputs");
    assert_eq!([of(&trained, tower), of(&trained, "rows of images")], [0; 2]);
}
