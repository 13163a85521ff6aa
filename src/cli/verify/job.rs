//! `verify JOB.toml`: this machine with these ranks, before a job runs on them.

use super::machine::{self, Time};
use super::page::{Check, Page, describe};
use super::step::Setting;
use super::{files, measure, operations, replicas, resume};
use crate::cli::{init, run};
use crate::comm::{World, abort, records};
use crate::config::job::Recompute;
use crate::config::{self, Config};
use crate::data::shard::Shard;
use crate::device::Device;
use crate::error::{Error, Result, format_bytes};
use crate::launch::gpu;
use crate::launch::ranks::Ranks;
use crate::metrics::counted;
use crate::model::{Arch, tiny};
use crate::plan;
use crate::sys::{files as system, memory};
use crate::tensor::DType;
use crate::text::{Tokenizer, train_bpe};
use crate::train::{self, models};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Bytes that each rank writes to measure the storage.
const WRITTEN: usize = 64 << 20;
/// The largest shard whose bytes are compared with their hashes.
const HASHED_MAX: u64 = 4 << 30;
/// The vocabulary of the tiny model.
const VOCABULARY: usize = 280;

/// The checks so far, and the times that were taken between them.
struct Course<'a> {
    world: &'a World,
    page: Page,
    times: Vec<Time>,
    started: Instant,
}

impl Course<'_> {
    /// Adds a check that this rank made for all. All ranks call this.
    fn add(&mut self, check: Check) {
        self.world.group().barrier();
        self.times.push(Time::now());
        self.page.add(check);
    }

    /// Makes a check on the first rank.
    fn on_first(&mut self, make: impl FnOnce() -> Check) {
        let check = if self.world.rank == 0 { make() } else { Check::skipped("", "") };
        self.add(check);
    }
}

/// Runs `verify JOB`. All ranks call this.
///
/// # Errors
/// `Usage` for a wrong job; `Fault` if a check failed.
pub fn verify(job: &Path, overrides: &[String], is_json: bool, world: &World) -> Result<()> {
    let group = world.group();
    let loaded = config::load(job, overrides).and_then(|config| config.check().map(|()| config));
    let mut config = group.agree(loaded)?;
    train::saved::locate(&mut config, &group);
    config.job.check = true;
    let limit = config.collective_timeout_s();
    abort::install(world, None, (limit > 0.0).then(|| Duration::from_secs_f64(limit)));
    run::set_threads(&config, world);
    let page = Page::new(is_json, world.rank != 0);
    page.text(&format!("verify {}: {}\n", job.display(), describe_ranks(world)));
    let mut course = Course { world, page, times: vec![Time::now()], started: Instant::now() };
    course.on_first(|| of_models(&config));
    course.on_first(|| of_data(&config));
    course.add(operations_of_ranks(world)?);
    if let Some(opened) = open(&mut config, &mut course)? {
        let scratch = scratch(&config.job.dir);
        let layout = opened.ranks.layout();
        let tensor = layout.mesh.tensor.max(layout.rollout_tensor);
        let written = of_storage(&config, &scratch, tensor, &mut course)?;
        on_ranks(&config, &opened, written.then_some(&*scratch), &mut course)?;
        if written {
            course.on_first(|| resume::check(&scratch));
        }
        if world.rank == 0 {
            let _ = remove(&scratch);
        }
    }
    course.times.push(Time::now());
    let times = records::gather(&group, &[course.times.clone()])?;
    let seconds = course.started.elapsed().as_secs_f64();
    course.page.add(machine::clocks(&times, &world.hosts));
    let mut object = Map::new();
    object.insert("seconds".into(), json!(seconds));
    object.insert("ranks".into(), Value::from(world.size));
    course.page.text(&format!("\n{seconds:.1} s"));
    course.page.finish(object)
}

fn describe_ranks(world: &World) -> String {
    let mut hosts = world.hosts.clone();
    hosts.sort();
    hosts.dedup();
    format!("{} on {}", counted(world.size, "rank"), counted(hosts.len(), "host"))
}

/// The directory of files that the checks write, next to that of the job.
fn scratch(dir: &Path) -> PathBuf {
    let name = dir.file_name().map_or("job".into(), |name| name.to_string_lossy().into_owned());
    system::parent(dir).join(format!(".{name}.verify"))
}

fn remove(dir: &Path) -> Result<()> {
    if dir.is_symlink() {
        return Err(Error::usage(format!("{} must be a directory of this check (got a symbolic link)", dir.display())));
    }
    if dir.exists() { std::fs::remove_dir_all(dir).map_err(|e| Error::io("remove", dir, &e)) } else { Ok(()) }
}

/// The files of all models of the job, and their tokenizers.
fn of_models(config: &Config) -> Check {
    let name = "models";
    let (mut said, mut wrong, mut seen) = (Vec::new(), Vec::new(), Vec::new());
    let archs = match models::planned(config, train::models(config)) {
        Ok(archs) => archs,
        Err(error) => return Check::failed(name, describe(&error)),
    };
    for model in archs {
        let (role, dir) = (model.spec.role.name(), model.spec.dir.clone());
        if seen.contains(&dir) || train::saved::is_checkpoint(&dir) {
            continue;
        }
        for check in files::check(&dir) {
            let text = format!("{role}: {}", check.text);
            if check.has_failed() {
                wrong.push(text);
            } else if check.name == "files" {
                said.push(text);
            }
        }
        seen.push(dir);
    }
    Check::of_faults(name, &wrong, || said.join("\n"))
}

/// The shards of the job's rows: complete, and made with the model's tokenizer.
fn of_data(config: &Config) -> Check {
    let name = "data";
    let (mut said, mut wrong) = (Vec::new(), Vec::new());
    let arch = Arch::load(&config.model.actor);
    let tokenizer = Tokenizer::find(&config.model.actor).ok().flatten();
    for prompts in config.data.all_prompts() {
        let path = Path::new(prompts);
        let index = PathBuf::from(format!("{}.idx", prompts.trim_end_matches(".idx").trim_end_matches(".bin")));
        if !index.is_file() {
            if path.exists() {
                said.push(format!("{prompts}: rows, which a job shards when it starts"));
            } else {
                wrong.push(format!("{prompts} does not exist"));
            }
            continue;
        }
        let opened = match &arch {
            Ok(arch) => Shard::open(path, arch.vocabulary).and_then(verified),
            Err(error) => Err(Error::data(error.message.clone())),
        };
        match opened {
            Err(error) => wrong.push(format!("damaged shard: {}", describe(&error))),
            Ok(shard) => match tokenizer.as_ref().map(|tokenizer| shard.check_tokenizer(tokenizer.sha256())) {
                Some(Err(error)) => wrong.push(format!("foreign tokenizer: {}", describe(&error))),
                _ => said.push(format!("{prompts}: {}", counted(shard.documents(), "document"))),
            },
        }
    }
    Check::of_faults(name, &wrong, || said.join("\n"))
}

/// Compares every byte of a shard with its hash, unless that would take minutes: `open` has compared the sizes.
fn verified(shard: Shard) -> Result<Shard> {
    let bytes = shard.sidecar().files.values().map(|file| file.bytes).sum::<u64>();
    if bytes <= HASHED_MAX { shard.verify().map(|()| shard) } else { Ok(shard) }
}

/// The operations of every rank's processor.
fn operations_of_ranks(world: &World) -> Result<Check> {
    let check = operations::check();
    let wrong = replicas::by_rank(world, check.has_failed().then(|| check.text.clone()))?;
    let same = if world.size > 1 { ", on every rank" } else { "" };
    Ok(Check::of_faults("operations", &wrong, || format!("{}{same}", check.text)))
}

/// Free space, the tiny model that later checks read, and the speed of writing. Returns whether the files are there.
fn of_storage(config: &Config, scratch: &Path, tensor: usize, course: &mut Course) -> Result<bool> {
    let world = course.world;
    let planned = models::planned(config, train::models(config)).unwrap_or_default();
    let saved = models::saved_bytes(&planned) as u64;
    let kept = config.checkpoint.keep_last.max(1) as u64 + 1;
    let exported = planned.first().map_or(0, |model| model.table().len() * config.model.dtype().bytes()) as u64;
    course.on_first(|| match system::free_bytes(&machine::existing(&config.job.dir)) {
        Ok(free) => machine::disk(&config.job.dir, kept * saved + exported, free),
        Err(error) => Check::of("disk", Err(error)),
    });
    let made = if world.rank == 0 { prepare(config, scratch, tensor) } else { Ok(()) };
    let made = world.group().agree(made.map_err(machine::named));
    if let Err(error) = made {
        course.add(Check::of("storage", Err(error)));
        return Ok(false);
    }
    let config_json = scratch.join("model/config.json");
    let unseen = (!config_json.is_file()).then(|| {
        format!("{} is not visible: job.dir must be on a file system that all hosts share", scratch.display())
    });
    let unseen = replicas::by_rank(world, unseen)?;
    if !unseen.is_empty() {
        course.add(Check::failed("storage", unseen.join("\n")));
        return Ok(false);
    }
    let speed = machine::write_speed(scratch, world.rank, WRITTEN);
    let (bytes_s, wrong) = match &speed {
        Ok(speed) => (*speed, None),
        Err(error) => (0.0, Some(describe(error))),
    };
    let mut sum = [bytes_s];
    world.group().all_reduce_sum_f64(&mut sum);
    let wrong = replicas::by_rank(world, wrong)?;
    course.add(if wrong.is_empty() {
        machine::storage(sum[0], saved)
    } else {
        Check::failed("storage", wrong.join("\n"))
    });
    Ok(true)
}

/// Writes the tiny model of the actor's kind with heads for `tensor` ranks, its tokenizer and rows.
fn prepare(config: &Config, scratch: &Path, tensor: usize) -> Result<()> {
    remove(scratch)?;
    system::create_dir_all(scratch)?;
    resume::write_rows(scratch)?;
    let tokenizer = scratch.join("tokenizer");
    let texts: Vec<String> = resume::rows().into_iter().flatten().collect();
    train_bpe(&texts, VOCABULARY, &tokenizer, &[])?;
    let tokens = Tokenizer::load(&tokenizer)?;
    let actor = Arch::load(&config.model.actor)?;
    let mut json = tiny::scaled_over(&actor, tokens.vocabulary(), tensor);
    // A language model with plain weights, also if the actor has scores or quantized weights.
    json.insert("architectures".into(), json!([actor.family.causal]));
    json.shift_remove("quantization_config");
    let mut arch = Arch::from_config(&json)?.ending_with(tokens.eos_ids());
    arch.wrapper = None;
    init::write(&arch, DType::F32, 7, Some(&tokenizer), &scratch.join("model")).map(drop)
}

/// The devices and the layout of the job.
struct Opened {
    device: Device,
    ranks: Ranks,
    plan: plan::Device,
}

/// Opens the device of each rank, with its self-test, and chooses the layout. None if that fails.
fn open(config: &mut Config, course: &mut Course) -> Result<Option<Opened>> {
    let world = course.world;
    let opened = match gpu::open(config, world, &train::archs) {
        Ok(opened) => opened,
        Err(error) => {
            course.add(Check::of("device", Err(error)));
            return Ok(None);
        }
    };
    let device = if opened.gpu.is_some() { Device::Cuda } else { Device::Cpu };
    let described = match (device, &opened.no_gpu) {
        (Device::Cuda, _) => opened.describe_kernels(),
        (Device::Cpu, Some(why)) => format!("{}; no GPU: {why}", crate::device::describe()),
        (Device::Cpu, None) => crate::device::describe(),
    };
    course.add(Check::ok("device", described));
    let layouts = plan::layouts(config, &train::roles(config), world, opened.gpu.as_ref());
    let (placed, expectations) = match world.group().agree(layouts) {
        Ok(layouts) => layouts,
        Err(error) => {
            course.add(Check::of("layout", Err(error)));
            return Ok(None);
        }
    };
    if config.gradient.recompute == Recompute::Auto {
        config.gradient.recompute = expectations.recompute;
    }
    let plan = match opened.gpu.as_ref() {
        Some(gpu) => plan::Device::gpu_of(&gpu.name, gpu.memory_bytes, gpu.ranks_per_node, world.size),
        None => plan::Device::cpu(memory::available_bytes() / world.local_size.max(1) as u64, world.local_size),
    };
    let least = format_bytes(-world.group().max(-(plan.memory_bytes as f64)) as u64);
    let described = placed.iter().map(|(_, layout)| layout.describe()).collect::<Vec<_>>().join("; ");
    let tight = format!("{described} does not fit {least} for a rank: see rlhf-hpc plan");
    let faults: Vec<String> = expectations.is_tight.then_some(tight).into_iter().collect();
    course.add(Check::of_faults("layout", &faults, || format!("{described}; {least} of memory for a rank")));
    let ranks = Ranks::new(world.clone(), placed, config.mesh.async_updates_max > 0)?;
    Ok(Some(Opened { device, ranks, plan }))
}

/// Collectives, links, and a step on the job's layout.
fn on_ranks(config: &Config, opened: &Opened, scratch: Option<&Path>, course: &mut Course) -> Result<()> {
    let (world, Opened { device, ranks, plan }) = (course.world, opened);
    if *device == Device::Cuda {
        let joined = gpu::join(config, ranks).and_then(|rows| {
            let tested = gpu::try_collectives(config, ranks, &train::shape(config))?;
            Ok(rows.into_iter().chain(tested).collect::<Vec<_>>().join("\n"))
        });
        course.add(Check::of("nccl", joined));
    }
    let least = if *device == Device::Cuda { machine::OF_PLAN_GPU } else { machine::OF_PLAN_CPU };
    let check = machine::collectives(&measure::axes(ranks, *device, plan), least);
    let mine: Vec<String> = check.has_failed().then(|| check.text.clone()).into_iter().collect();
    let wrong = replicas::distinct(&world.group(), &mine)?;
    course.add(if wrong.is_empty() { check } else { Check::failed("collectives", wrong.join("\n")) });
    let links = measure::links(world);
    course.add(machine::links(&links, &world.hosts));
    let Some(scratch) = scratch else { return Ok(()) };
    let dir = scratch.join("model");
    match (Setting { config, ranks, device: *device, dir: &dir }).checks() {
        Ok(checks) => checks.into_iter().for_each(|check| course.add(check)),
        Err(error) => course.add(Check::of("step", Err(error))),
    }
    Ok(())
}
