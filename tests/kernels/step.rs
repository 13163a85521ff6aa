//! Training on the GPU compared with the f32 run on the CPU: the same rows, the same optimizer, the same code.

use crate::device;
use crate::model::{llama, rows as rows_of};
use rlhf_hpc::comm::Axes;
use rlhf_hpc::config::job::GradientConfig;
use rlhf_hpc::config::optim::OptimConfig;
use rlhf_hpc::device::Device;
use rlhf_hpc::learn::Learner;
use rlhf_hpc::learn::Role;
use rlhf_hpc::model::load::ModelFiles;
use rlhf_hpc::model::{Head, export, init};
use rlhf_hpc::optim::host_state::Vector;
use rlhf_hpc::tensor::DType;

/// The f32 weights, parameter by parameter and row by row, independent of the device's layout.
fn master(learner: &Learner) -> Vec<f32> {
    let flat: Vec<f32> =
        learner.stretches(Vector::Master).into_iter().flat_map(|(_, values)| values.to_host()).collect();
    learner.role.weights.table.specs().iter().flat_map(|spec| rows_of(spec, &flat)).collect()
}

#[test]
fn master_weights_on_gpu_and_host_start_at_the_values_of_the_files() {
    let (_gpu, _one) = device();
    let (axes, arch) = (Axes::one(), llama());
    let dir = tempfile::tempdir().expect("a directory");
    let model = dir.path().join("model");
    let made = init::init(&arch, Head::LanguageModel, DType::F32, 3);
    export::export(&model, &arch, &made, DType::F32, None).expect("exports");
    for head in [Head::LanguageModel, Head::Value] {
        let files = ModelFiles { dir: &model, adapter: None, arch: &arch, head };
        let load = |device, dtype| Role::load(device, "critic", &files, None, dtype, 5, &axes, 0).expect("loads");
        let (optim, gradient) = (OptimConfig::with_lr(0.0), GradientConfig::default());
        let cpu = Learner::new(Device::Cpu, load(Device::Cpu, DType::F32), &optim, &gradient, 1, &axes, 0);
        let cpu = cpu.expect("a learner");
        let want = master(&cpu);
        assert!(want.iter().any(|x| x.to_bits() & 0xffff != 0), "of more digits than bf16 has");
        for state_on in [Device::Cuda, Device::Cpu] {
            let role = load(Device::Cuda, DType::Bf16);
            let learner = Learner::new(state_on, role, &optim, &gradient, 1, &axes, 0).expect("a learner");
            let learner = learner.with_masters().expect("its masters");
            assert!(master(&learner) == want, "{head:?}, {state_on:?}");
        }
    }
}
