//! Images on several ranks: a step of a model whose tower trains is that of one rank on every axis and at every stage,
//! also if some ranks have no images.

use crate::Test;
use crate::layouts::{Setting, config, samples, whole};
use crate::tensor_models::assert_near;
use rlhf_hpc::comm::{Axes, World};
use rlhf_hpc::config::method::ppo::PolicyLossKind;
use rlhf_hpc::experience::{Experience, Image, Patches};
use rlhf_hpc::mesh::Mesh;
use rlhf_hpc::model::{Arch, Head, Pixels, VisionSpec};
use rlhf_hpc::optim::host_state::Vector;
use rlhf_hpc::rng::{Purpose, Rng};
use rlhf_hpc::tensor::DType;
use std::path::Path;

pub const TESTS: &[Test] =
    &[Test { name: "a tower that trains has the step of one rank on any axis", ranks: &[2, 3], check: trains }];

/// Tokens of (prompt, response).
const LENGTHS: [(usize, usize); 5] = [(12, 5), (4, 30), (22, 7), (3, 9), (16, 40)];

/// Rows with no, one and two images.
fn rows(spec: &VisionSpec) -> Vec<Experience> {
    let mut all = samples(&LENGTHS);
    let image = |at: usize, hash: u64, grid: [usize; 3]| {
        let tokens = spec.tokens_of(grid);
        Image { at, tokens, grid, hash, ..Image::default() }
    };
    let images = [
        vec![image(2, 1, [1, 4, 6])],
        Vec::new(),
        vec![image(0, 2, [1, 2, 8]), image(9, 1, [1, 4, 6])],
        Vec::new(),
        vec![image(5, 3, [1, 6, 6])],
    ];
    for (sample, images) in all.iter_mut().zip(images) {
        for image in &images {
            sample.prompt.tokens[image.range()].fill(spec.image_token);
        }
        sample.prompt.images = images;
    }
    all
}

/// Random patches, which the hash decides.
fn patches(spec: &VisionSpec, image: &Image) -> Patches {
    let (rng, count) = (Rng::new(image.hash, Purpose::Synthetic), image.grid.iter().product::<usize>());
    let values = (0..count * spec.patch_values()).map(|i| rng.uniform([i as u32, 5, 0, 0]) - 0.5).collect();
    Patches { grid: image.grid, values, hash: image.hash }
}

fn trains(world: &World) {
    for name in ["vision-qwen2_5_vl", "vision-qwen3_vl"] {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models").join(name);
        let arch = Arch::load(&dir).and_then(Arch::with_tower).expect("a model with a tower");
        let spec = arch.need_sight().expect("a tower").spec.clone();
        let setting =
            Setting { arch, head: Head::LanguageModel, dtype: DType::F32, config: config(PolicyLossKind::Clip) };
        let samples = rows(&spec);
        let step = |axes: &Axes, stage: usize| {
            let mut learner = setting.learner(5, axes, stage).expect("a learner");
            let spec = spec.clone();
            learner.role.transformer.read_images_with(Pixels::new(move |image| Ok(patches(&spec, image))));
            setting.gradient(&mut learner, axes, &samples);
            learner.step(axes).expect("a finite gradient");
            whole(&learner, Vector::First, axes)
        };
        let want = step(&Axes::one(), 0);
        let ranks = world.size;
        let data = Mesh::data_only(ranks);
        let mut layouts = vec![(data, 0), (data, 1), (data, 2), (data, 3)];
        if ranks == 2 {
            let sequence = Mesh { sequence: ranks, ..Mesh::data_only(1) };
            layouts.extend([(sequence, 0), (sequence, 3)]);
        } else {
            layouts.push((Mesh { tensor: ranks, ..Mesh::data_only(1) }, 0));
        }
        for (mesh, stage) in layouts {
            let got = step(&Axes::split_mesh(&world.group(), &mesh), stage);
            for ((parameter, got), (_, want)) in got.iter().zip(&want) {
                assert!(want.iter().any(|x| *x != 0.0), "{parameter} has a gradient");
                assert_near(&format!("{name} {mesh:?}, stage {stage}: {parameter}"), got, want, 1e-5);
            }
        }
    }
}
