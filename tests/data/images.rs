//! Images become the pixels and patches that `transformers` makes of them (`tests/golden/images.py`).

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rlhf_hpc::images::Processor;
use serde_json::{Value, json};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/images")
}

fn golden() -> Value {
    serde_json::from_str(&fs::read_to_string(folder().with_extension("json")).unwrap()).unwrap()
}

fn bytes(text: &Value) -> Vec<u8> {
    STANDARD.decode(text.as_str().unwrap()).unwrap()
}

/// A processor with these settings in preprocessor_config.json.
fn processor(settings: &Value) -> rlhf_hpc::error::Result<Processor> {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("preprocessor_config.json"), settings.to_string()).unwrap();
    Ok(Processor::find(dir.path())?.unwrap())
}

/// The resized bytes (patch, channel, y, x) in the first frame of patches.
fn resized(processor: &Processor, settings: &Value, values: &[f32]) -> Vec<u8> {
    let numbers = |key: &str, default: [f64; 3]| -> Vec<f64> {
        settings[key].as_array().map_or(default.to_vec(), |all| all.iter().map(|x| x.as_f64().unwrap()).collect())
    };
    let mean = numbers("image_mean", [0.48145466, 0.4578275, 0.40821073]);
    let std = numbers("image_std", [0.26862954, 0.26130258, 0.27577711]);
    let square = processor.patch * processor.patch;
    let mut all = Vec::new();
    for patch in values.chunks_exact(3 * processor.frames * square) {
        for (c, channel) in patch.chunks_exact(processor.frames * square).enumerate() {
            for frame in channel.chunks_exact(square) {
                assert_eq!(frame, &channel[..square], "a still image fills all frames");
            }
            all.extend(channel[..square].iter().map(|x| ((f64::from(*x) * std[c] + mean[c]) * 255.0).round() as u8));
        }
    }
    all
}

#[test]
fn pixels_are_those_of_transformers_with_pillow_bit_by_bit_and_those_of_torchvision_within_2() {
    let golden = golden();
    for case in golden["files"].as_array().unwrap() {
        let (name, settings) =
            (case["name"].as_str().unwrap(), &golden["settings"][case["settings"].as_str().unwrap()]);
        let processor = processor(settings).unwrap();
        let patches = processor.patches(&fs::read(folder().join(name)).unwrap()).unwrap();
        assert_eq!(json!(patches.grid), case["grid"], "{name}");
        let measured = processor.measure(&fs::read(folder().join(name)).unwrap()).unwrap();
        assert_eq!((measured.grid, measured.hash, measured.values.len()), (patches.grid, patches.hash, 0));
        assert_eq!(processor.image_tokens(patches.grid), patches.grid[1] * patches.grid[2] / 4);
        let mut expected = Vec::new();
        let compressed = bytes(&case["pixels"]);
        flate2::read::ZlibDecoder::new(&compressed[..]).read_to_end(&mut expected).unwrap();
        let ours = resized(&processor, settings, &patches.values);
        assert_eq!(ours, expected, "{name}");
        assert!(case["far"].as_u64().unwrap() <= 2, "{name}");
    }
    let name = golden["patches"]["name"].as_str().unwrap();
    let patches = processor(&golden["settings"]["small"]).unwrap().patches(&fs::read(folder().join(name)).unwrap());
    let expected = bytes(&golden["patches"]["values"]);
    let expected = expected.chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap()));
    for (i, (ours, theirs)) in patches.unwrap().values.iter().zip(expected).enumerate() {
        assert!((ours - theirs).abs() < 1e-6, "value {i}: {ours} {theirs}");
    }
}

#[test]
fn images_are_resized_to_the_sizes_that_transformers_chooses() {
    for case in golden()["sizes"].as_array().unwrap() {
        let [height, width, unit, least, most, new_height, new_width] =
            <[usize; 7]>::try_from(serde_json::from_value::<Vec<usize>>(case.clone()).unwrap()).unwrap();
        let size = json!({"shortest_edge": least, "longest_edge": most});
        let processor = processor(&json!({"patch_size": unit / 2, "size": size})).unwrap();
        assert_eq!(processor.size(height, width).unwrap(), (new_height, new_width), "{case}");
    }
    let error = Processor::default().size(3, 601).unwrap_err().message;
    assert!(error.contains("at most 200 times the other (got 3 x 601 pixels)"), "{error}");
}

#[test]
fn a_file_that_is_not_a_whole_still_image_of_8_bits_is_rejected() {
    let read = |name: &str| fs::read(folder().join(name)).unwrap();
    let part = |name: &str, keep: f64| {
        let whole = read(name);
        whole[..(whole.len() as f64 * keep) as usize].to_vec()
    };
    let mut huge = read("rgb.png");
    huge[16..24].copy_from_slice(&[0, 1, 0x86, 0xa0, 0, 1, 0x86, 0xa0]);
    for (file, what) in [
        (part("rgb.png", 0.6), "truncated or damaged"),
        (part("rgb.png", 0.005), "truncated or damaged"),
        (part("420.jpg", 0.6), "truncated or damaged"),
        (part("420.jpg", 0.99), "truncated or damaged"),
        (part("progressive.jpg", 0.6), "truncated or damaged"),
        (part("turned-6.jpg", 0.05), "truncated or damaged"),
        (huge, "too large (100000 x 100000 pixels; at most 89478485 pixels)"),
        (vec![0; (64 << 20) + 1], "too large (64.0 MiB; at most 64.0 MiB)"),
        (read("cmyk.jpg"), "CMYK"),
        (read("animated.png"), "an animated PNG"),
        (read("animated.gif"), "a GIF"),
        (read("animated.webp"), "an animated WebP"),
        (read("still.webp"), "a WebP; JPEG and PNG are read"),
        (read("still.bmp"), "a BMP"),
        (read("gray-16.png"), "16-bit gray"),
        (Vec::new(), "is empty"),
        (b"\0\0\0\x18ftypmp42".to_vec(), "a video"),
        (b"hello".to_vec(), "neither JPEG nor PNG"),
    ] {
        let error = Processor::default().patches(&file).unwrap_err();
        assert!(error.message.contains(what), "{what}: {error}");
        assert_eq!(error.exit_code(), 65);
    }
}

#[test]
fn a_setting_that_would_change_pixels_is_an_error_by_its_name() {
    let all = json!({
        "crop_size": null, "data_format": "channels_first", "default_to_square": false, "device": null,
        "disable_grouping": null, "do_center_crop": null, "do_convert_rgb": true, "do_normalize": true, "do_pad": null,
        "do_rescale": true, "do_resize": true, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
        "image_processor_type": "Qwen2VLImageProcessorFast", "input_data_format": null, "max_pixels": null,
        "merge_size": 2, "min_pixels": null, "patch_size": 16, "processor_class": "Qwen3VLProcessor", "resample": 3,
        "rescale_factor": 0.00392156862745098, "return_tensors": null,
        "size": {"longest_edge": 16777216, "shortest_edge": 65536}, "temporal_patch_size": 2,
    });
    let usual = processor(&all).unwrap();
    assert_eq!((usual.patch, usual.size(1000, 1000).unwrap(), usual.size(9, 9).unwrap()), (16, (992, 992), (256, 256)));
    for (key, value, what) in [
        ("do_normalize", json!(false), "do_normalize must be true (got false)"),
        ("resample", json!(2), "resample must be 3 (got 2)"),
        ("do_pad", json!(true), "do_pad must be false (got true)"),
        ("image_mean", json!([0.5]), "image_mean must be three numbers"),
        ("patch_size", json!(0), "patch_size must be a number from 1 to 1024"),
        ("merge_size", json!(1024), "must have at least the 268435456 of a token"),
        ("size", json!({"height": 224, "width": 224}), "shortest_edge and longest_edge"),
        ("image_processor_type", json!("CLIPImageProcessor"), "must be one of Qwen2VLImageProcessor"),
        ("sharpen", json!(1), "sharpen (= 1) is not a setting"),
        ("min_pixels", json!(99999999), "must not exceed"),
    ] {
        let mut changed = all.clone();
        changed[key] = value;
        let error = processor(&changed).unwrap_err().message;
        assert!(error.contains("preprocessor_config.json: ") && error.contains(what), "{what}: {error}");
    }
    // Of two files, the one of transformers 5 counts, and min_pixels counts more than size.
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, value: Value| fs::write(dir.path().join(name), value.to_string()).unwrap();
    assert_eq!(Processor::find(dir.path()).unwrap(), None);
    write("preprocessor_config.json", all.clone());
    let mut other = all;
    other["max_pixels"] = json!(65536);
    write("processor_config.json", json!({"image_processor": other, "processor_class": "Qwen3VLProcessor"}));
    let found = Processor::find(dir.path()).unwrap().unwrap();
    assert_eq!(found.size(1000, 1000).unwrap(), (256, 256));
    let vision = |key: &str, n: usize| json!({key: n}).as_object().unwrap().clone();
    found.check(&vision("spatial_merge_size", 2)).unwrap();
    let error = found.check(&vision("patch_size", 14)).unwrap_err().message;
    assert!(
        error.contains("patch_size of vision_config in config.json is 14, but the image processor has 16"),
        "{error}"
    );
}

#[test]
fn a_damaged_file_is_an_image_or_an_error() {
    let processor = processor(&json!({"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 1024}})).unwrap();
    let mut random = 1_u64;
    let mut next = |below: usize| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize % below
    };
    for name in ["tiny.png", "palette.png", "interlaced.png", "420.jpg", "progressive.jpg", "turned-6.jpg"] {
        let whole = fs::read(folder().join(name)).unwrap();
        for _ in 0..60 {
            let mut file = whole.clone();
            for _ in 0..=next(4) {
                let at = next(file.len());
                file[at] = next(256) as u8;
            }
            file.truncate(file.len() - next(2) * next(file.len()));
            if let Err(error) = processor.patches(&file) {
                assert_eq!(error.exit_code(), 65, "{name}: {error}");
            }
        }
    }
}
