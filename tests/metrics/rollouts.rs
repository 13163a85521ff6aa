use std::fs;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hdf5::File;
use hdf5::types::VarLenUnicode;
use rlhf_hpc::error::Kind;
use rlhf_hpc::experience::{Episode, Experience, Finish, Greedy, Image, SamplingMask};
use rlhf_hpc::metrics::recorded;
use rlhf_hpc::metrics::rollouts::{self, TOKEN_TEXT_BYTES, group_name, step_bytes_max, step_path, write};
use rlhf_hpc::metrics::step_file::StepFile;

use crate::metrics::sample;
use crate::names;

fn batch() -> Vec<Experience> {
    let mut batch = [(3, 4), (1, 1), (8, 6)].map(|(id, n)| sample(id, n));
    batch[1].response.text += " \0 grüße";
    batch[1].scores.remove("number");
    batch.into()
}

fn read<T: hdf5::H5Type>(group: &hdf5::Group, name: &str) -> Vec<T> {
    group.dataset(name).unwrap().read_raw().unwrap()
}

#[test]
fn a_recorded_step_reads_back_as_samples() {
    let dir = tempfile::tempdir().unwrap();
    assert!(recorded::steps(dir.path()).unwrap().is_empty());
    for step in [2, 10] {
        write(dir.path(), step, &batch(), (0, ""), 0).unwrap();
    }
    assert_eq!(recorded::steps(dir.path()).unwrap(), [2, 10]);
    let step = StepFile::open(&step_path(dir.path(), 10), 10).unwrap();
    let samples = step.samples().unwrap();
    assert_eq!(step.scores().unwrap(), [2.5, 0.5, 7.5]);
    let second = &samples[1];
    assert_eq!((second.prompt_id, second.sample, &*second.finish, second.score), (1, 1, "length", 0.5));
    assert_eq!((&*second.prompt, &*second.response), ("prompt 1", "response 1 ␀ grüße"));
    assert_eq!((second.prompt_tokens, second.response_tokens), (3, 1));
    assert!(second.scores["number"].is_nan());
    for (i, sample) in batch().iter().enumerate() {
        let tokens = step.tokens(i).unwrap();
        assert_eq!(tokens.tokens, sample.response.tokens);
        let arrays = (&tokens.logprobs, &tokens.kl, &tokens.advantages);
        assert_eq!(arrays, (&sample.response.logprobs, &sample.kl, &sample.advantages));
    }
    assert!(step.tokens(3).is_err());
    let missing = StepFile::open(&step_path(dir.path(), 3), 3).unwrap_err();
    assert!(missing.kind == Kind::Io && missing.message.contains("step-3.h5"), "{missing}");
}

#[test]
fn images_of_prompts_and_environments_are_recorded_small() {
    let dir = tempfile::tempdir().unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/images");
    let image = |name: &str, hash| {
        let file = fs::read(golden.join(name)).unwrap();
        Image { tokens: 1, hash, file: file.into(), ..Image::default() }
    };
    let mut all = batch();
    all[0].prompt.images = vec![image("large.png", 1), image("420.jpg", 2)];
    all[2].prompt.images = vec![image("large.png", 1)];
    all[1].response.episode = Some(Episode { images: vec![image("420.jpg", 2)], ..Episode::default() });
    write(dir.path(), 1, &all, (0, ""), 0).unwrap();
    let samples = StepFile::open(&step_path(dir.path(), 1), 1).unwrap().samples().unwrap();
    let counts: Vec<usize> = samples.iter().map(|sample| sample.images.len()).collect();
    assert_eq!(counts, [2, 0, 1]);
    assert_eq!(samples[0].images[0], samples[2].images[0]);
    let given: Vec<&[String]> = samples.iter().map(|sample| &sample.environment_images[..]).collect();
    assert_eq!(given, [&[][..], &samples[0].images[1..], &[]]);
    let error = StepFile::open(&step_path(dir.path(), 1), 1).unwrap().experience().unwrap_err();
    assert!(error.message.contains("the environment gave images"), "{error}");
    let small = samples[0].images[0].strip_prefix("data:image/jpeg;base64,").unwrap();
    let small = libjpeg_turbo_rs::decompress(&STANDARD.decode(small).unwrap()).unwrap();
    assert_eq!((small.width, small.height), (100, 160), "126 x 201 pixels, smaller");
}

#[test]
fn a_recorded_step_reads_back_as_the_experience_that_was_learned_from() {
    let dir = tempfile::tempdir().unwrap();
    let mut all = [(3, 4), (5, 1), (5, 6)].map(|(id, n)| sample(id, n));
    all[1].response.sample = 0;
    all[1].scores.remove("number");
    for (i, sample) in all.iter_mut().enumerate() {
        let tokens = sample.response.tokens.len();
        sample.greedy = Some(Greedy { score: 0.25 + i as f32, tokens: 7 + i, finish: Finish::Length });
        sample.response.sampling_masks = (0..tokens)
            .map(|t| if t == 1 { SamplingMask::default() } else { SamplingMask::new([t as u32, 300]) })
            .collect();
        sample.response.weights = vec![(9, tokens)];
        sample.mask = if i == 0 { vec![1, 0, 0, 1] } else { vec![1; tokens] };
        (sample.ref_logprobs, sample.last_value) = (Vec::new(), 0.0);
        sample.response.experts.clear();
        sample.response.episode = None;
    }
    write(dir.path(), 10, &all, (0, "hash"), 0).unwrap();
    // Samples count their groups, and tokens of an environment are known from the mask.
    for (sample, prompt) in all.iter_mut().zip([0, 1, 1]) {
        sample.response.prompt = prompt;
        sample.scores = sample.scores.iter().map(|(name, score)| (name.replace('/', "_"), *score)).collect();
    }
    all[0].response.episode = Some(Episode { given: std::iter::once(1..3).collect(), ..Episode::default() });
    let file = || StepFile::open(&step_path(dir.path(), 10), 10).unwrap();
    assert_eq!(file().experience().unwrap(), all);
    assert_eq!(file().config_hash().unwrap(), "hash");
    // A file of an older release has neither greedy responses nor masks.
    for sample in &mut all {
        (sample.greedy, sample.response.sampling_masks) = (None, Vec::new());
    }
    write(dir.path(), 10, &all, (0, "hash"), 0).unwrap();
    assert!(!file().has("greedy_score") && !file().has("sampling_masks"), "what a job does not have is not written");
    assert_eq!(file().experience().unwrap(), all);
}

#[test]
fn any_changed_byte_of_a_recorded_step_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), 1, &batch(), (0, ""), 0).unwrap();
    let path = step_path(dir.path(), 1);
    let bytes = fs::read(&path).unwrap();
    let end = bytes.windows(8).rposition(|window| window == b"rlhf-hpc").unwrap();
    for at in (0..end).step_by(61) {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1 << (at % 8);
        fs::write(&path, damaged).unwrap();
        let error = StepFile::open(&path, 1).unwrap_err();
        assert!(error.kind == Kind::Data && error.message.contains("step-1.h5: its checksum"), "byte {at}: {error}");
    }
    // A file of an older release has no checksum.
    fs::write(&path, &bytes[..end]).unwrap();
    assert_eq!(StepFile::open(&path, 1).unwrap().samples().unwrap().len(), 3);
}

type Get = fn(&Experience) -> &Vec<f32>;

#[test]
fn every_array_reads_back_through_the_links() {
    let dir = tempfile::tempdir().unwrap();
    let batch = batch();
    write(dir.path(), 1, &batch[..1], (42, "other"), 0).unwrap();
    write(dir.path(), 12, &batch, (42, "sha256:abc"), 0).unwrap();
    let file = File::open(dir.path().join("rollouts.h5")).unwrap();
    assert_eq!(file.member_names().unwrap(), ["step_000001", "step_000012"]);
    let group = file.group("step_000012").unwrap();
    assert_eq!(group.attr("step").unwrap().read_scalar::<u64>().unwrap(), 12);
    assert_eq!(group.attr("seed").unwrap().read_scalar::<u64>().unwrap(), 42);
    let config_hash: VarLenUnicode = group.attr("config_hash").unwrap().read_scalar().unwrap();
    assert_eq!(config_hash.as_str(), "sha256:abc");

    let tokens = read::<i32>(&group, "tokens");
    let (token_offsets, response_offsets) =
        (read::<i64>(&group, "token_offsets"), read::<i64>(&group, "response_offsets"));
    let prompt_tokens = read::<i32>(&group, "prompt_tokens");
    assert_eq!((token_offsets.len(), response_offsets.len(), prompt_tokens.len()), (4, 4, 3));
    let arrays: [(&str, Get); 8] = [
        ("logprobs", |e| &e.response.logprobs),
        ("sample_logprobs", |e| &e.response.sample_logprobs),
        ("ref_logprobs", |e| &e.ref_logprobs),
        ("values", |e| &e.values),
        ("kl", |e| &e.kl),
        ("rewards", |e| &e.rewards),
        ("advantages", |e| &e.advantages),
        ("returns", |e| &e.returns),
    ];
    let mask = read::<u8>(&group, "mask");
    for (i, sample) in batch.iter().enumerate() {
        let row: Vec<u32> =
            tokens[token_offsets[i] as usize..token_offsets[i + 1] as usize].iter().map(|&t| t as u32).collect();
        assert_eq!(row, sample.tokens());
        assert_eq!(prompt_tokens[i] as usize, sample.prompt.tokens.len());
        let range = response_offsets[i] as usize..response_offsets[i + 1] as usize;
        for (name, get) in arrays {
            assert_eq!(read::<f32>(&group, name)[range.clone()], get(sample)[..], "{name} of sample {i}");
        }
        assert_eq!(mask[range], sample.mask);
    }
    let score: Vec<f32> = batch.iter().map(|e| e.score).collect();
    assert_eq!(read::<f32>(&group, "score"), score);
    assert_eq!(read::<i64>(&group, "prompt_id"), [3, 1, 8]);
    assert_eq!(read::<i32>(&group, "sample"), [1, 1, 0]);
    assert_eq!(read::<u8>(&group, "finish"), [1, 1, 0]);
    let [int, long, byte, float] = [
        hdf5::Datatype::from_type::<i32>(),
        hdf5::Datatype::from_type::<i64>(),
        hdf5::Datatype::from_type::<u8>(),
        hdf5::Datatype::from_type::<f32>(),
    ]
    .map(Result::unwrap);
    for (names, kind) in [
        (&["tokens", "prompt_tokens", "sample"][..], int),
        (&["token_offsets", "response_offsets", "prompt_id"], long),
        (&["mask", "finish"], byte),
        (&["score", "advantages"], float),
    ] {
        assert!(names.iter().all(|name| group.dataset(name).unwrap().dtype().unwrap() == kind), "{names:?}");
    }
}

#[test]
fn texts_and_scores_of_each_reward_read_back_and_every_array_has_a_description() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), 1, &batch(), (0, ""), 0).unwrap();
    let group = File::open(step_path(dir.path(), 1)).unwrap().group("step_000001").unwrap();
    let texts = |name: &str| {
        let texts = group.dataset(name).unwrap().read_raw::<VarLenUnicode>().unwrap();
        texts.iter().map(|text| text.as_str().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(texts("prompt"), ["prompt 3", "prompt 1", "prompt 8"]);
    assert_eq!(texts("response"), ["response 3", "response 1 ␀ grüße", "response 8"]);
    assert_eq!((texts("label")[0].as_str(), texts("source")[1].as_str()), ("4", "data/questions"));
    let scores = group.group("scores").unwrap();
    assert_eq!(scores.member_names().unwrap(), ["number", "style_ü"]);
    assert!(
        read::<f32>(&scores, "number")[0] == 1.0 && read::<f32>(&scores, "number")[1].is_nan(),
        "a reward that abstains"
    );
    assert_eq!(read::<f32>(&scores, "style_ü"), [0.75, 0.25, 2.0]);
    for set in group.datasets().unwrap().into_iter().chain(scores.datasets().unwrap()) {
        for name in ["unit", "meaning"] {
            let said: VarLenUnicode = set.attr(name).unwrap().read_scalar().unwrap();
            assert!(!said.is_empty(), "{} of {}", name, set.name());
        }
    }
}

#[test]
fn absent_arrays_are_nan_and_wrong_lengths_are_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let mut batch = batch();
    for sample in &mut batch {
        sample.values.clear();
    }
    write(dir.path(), 1, &batch, (0, ""), 0).unwrap();
    let group = File::open(step_path(dir.path(), 1)).unwrap().group("step_000001").unwrap();
    let values = read::<f32>(&group, "values");
    assert!(values.len() == 11 && values.iter().all(|v| v.is_nan()));
    batch[1].kl.push(0.0);
    let error = write(dir.path(), 2, &batch, (0, ""), 0).unwrap_err();
    assert!(error.message.contains("sample 1 has 1 response tokens, but 2 entries in `kl`"), "{error}");
    batch[1].kl.pop();
    batch[2].response.logprobs.clear();
    assert!(write(dir.path(), 2, &batch, (0, ""), 0).unwrap_err().message.contains("`logprobs`"));
}

#[test]
fn a_kill_at_any_point_leaves_readable_records() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), 1, &batch(), (0, ""), 0).unwrap();
    write(dir.path(), 2, &batch(), (0, ""), 0).unwrap();
    // Killed while step 3 was written aside, and while the links were.
    fs::write(dir.path().join("rollouts/.step-3.h5.partial"), b"half").unwrap();
    fs::write(dir.path().join(".rollouts.h5.partial"), b"half").unwrap();
    let count = || File::open(dir.path().join("rollouts.h5")).unwrap().member_names().unwrap().len();
    assert_eq!(count(), 2);
    // Killed between the rename of a step and that of the links: the next start finds the step.
    fs::copy(step_path(dir.path(), 2), step_path(dir.path(), 7)).unwrap();
    rollouts::recover(dir.path()).unwrap();
    assert_eq!(recorded::steps(dir.path()).unwrap(), [1, 2, 7]);
    assert_eq!(count(), 3);
    assert_eq!(names(&dir.path().join("rollouts")), ["step-1.h5", "step-2.h5", "step-7.h5"]);
    // Even where the links themselves were lost.
    fs::remove_file(dir.path().join("rollouts.h5")).unwrap();
    rollouts::recover(dir.path()).unwrap();
    assert_eq!(count(), 3);
}

#[test]
fn a_disk_that_becomes_full_at_any_byte_is_an_io_error_and_leaves_older_files_intact() {
    let name = "a_disk_that_becomes_full_at_any_byte_is_an_io_error_and_leaves_older_files_intact";
    crate::alone(&format!("metrics::rollouts::{name}"), records_are_refused_under_every_limit);
}

fn records_are_refused_under_every_limit() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), 1, &batch(), (0, ""), 0).unwrap();
    let mut tried = 0;
    for (name, is_step) in [("rollouts/step-1.h5", true), ("rollouts.h5", false)] {
        let size = fs::metadata(dir.path().join(name)).unwrap().len();
        for bytes in (0..size).step_by(size as usize / 16) {
            crate::limit_files(bytes);
            let tried_here =
                if is_step { write(dir.path(), 2, &batch(), (0, ""), 0) } else { rollouts::recover(dir.path()) };
            crate::limit_files(u64::MAX);
            let error = tried_here.unwrap_err();
            let named = if is_step { "rollouts/step-2.h5" } else { "rollouts.h5" };
            assert!(error.kind == Kind::Io && error.message.contains(named), "{bytes} bytes: {error}");
            assert!(error.message.contains("File too large") && error.hint.is_some(), "{bytes} bytes: {error}");
            assert_eq!(names(dir.path()), ["rollouts", "rollouts.h5"], "{bytes} bytes");
            assert_eq!(names(&dir.path().join("rollouts")), ["step-1.h5"], "{bytes} bytes");
            let group = File::open(dir.path().join("rollouts.h5")).unwrap().group("step_000001").unwrap();
            assert_eq!(read::<f32>(&group, "score"), [2.5, 0.5, 7.5], "{bytes} bytes");
            tried += 1;
        }
    }
    assert!(tried >= 32, "{tried}");
    write(dir.path(), 2, &batch(), (0, ""), 0).unwrap();
}

#[test]
fn the_last_records_are_kept_and_no_link_points_to_a_removed_one() {
    let dir = tempfile::tempdir().unwrap();
    let there = |expected: &[u64]| {
        let names: Vec<String> = expected.iter().map(|step| group_name(*step)).collect();
        let file = File::open(dir.path().join("rollouts.h5")).unwrap();
        assert_eq!(file.member_names().unwrap(), names);
        assert!(names.iter().all(|name| file.group(name).is_ok()));
        let files = fs::read_dir(dir.path().join("rollouts")).unwrap();
        assert_eq!(files.count(), expected.len());
    };
    (1..=4).for_each(|step| write(dir.path(), step, &batch(), (0, ""), 0).unwrap());
    there(&[1, 2, 3, 4]);
    // Reading changes nothing: the next record removes the surplus.
    rollouts::recover(dir.path()).unwrap();
    there(&[1, 2, 3, 4]);
    write(dir.path(), 5, &batch(), (0, ""), 2).unwrap();
    there(&[4, 5]);
    write(dir.path(), 5, &batch(), (0, ""), 2).unwrap();
    there(&[4, 5]);
    // Cutting back removes later steps and their links.
    rollouts::cut_back(dir.path(), 4, 0).unwrap();
    there(&[4]);
    // A start removes later steps first, then the surplus.
    (5..=7).for_each(|step| write(dir.path(), step, &batch(), (0, ""), 0).unwrap());
    rollouts::cut_back(dir.path(), 6, 2).unwrap();
    there(&[5, 6]);
    rollouts::cut_back(dir.path(), 4, 2).unwrap();
    there(&[]);
    write(dir.path(), 4, &batch(), (0, ""), 2).unwrap();
    write(dir.path(), 5, &batch()[..1], (9, "again"), 2).unwrap();
    let group = File::open(dir.path().join("rollouts.h5")).unwrap().group(&group_name(5)).unwrap();
    assert_eq!(group.attr("seed").unwrap().read_scalar::<u64>().unwrap(), 9);
    write(dir.path(), 6, &batch(), (0, ""), 2).unwrap();
    there(&[5, 6]);
}

#[test]
fn a_step_file_is_at_most_and_nearly_as_large_as_predicted_from_its_longest_rows() {
    for (samples, prompt, response) in [(0, 0, 0), (1, 1, 1), (3, 700, 5), (40, 64, 512), (300, 20, 90)] {
        let dir = tempfile::tempdir().unwrap();
        let of = |i: u64| {
            let mut sample = sample(i % 7, response);
            sample.prompt.tokens = vec![1; prompt];
            sample.prompt.text = "p".repeat(TOKEN_TEXT_BYTES * prompt);
            sample.response.text = "r".repeat(TOKEN_TEXT_BYTES * response);
            sample.prompt.source = "s".repeat(127);
            sample
        };
        let batch: Vec<Experience> = (0..samples).map(of).collect();
        write(dir.path(), 1, &batch, (42, &"f".repeat(64)), 0).unwrap();
        let bytes = fs::metadata(step_path(dir.path(), 1)).unwrap().len();
        let group = File::open(step_path(dir.path(), 1)).unwrap().group(&group_name(1)).unwrap();
        assert_eq!(read::<f32>(&group, "advantages").len(), samples as usize * response);
        let most = step_bytes_max(samples as usize, prompt, response);
        assert!(bytes <= most && most <= bytes + (40 << 10), "{samples} samples: {bytes} bytes, {most} at most");
    }
}
