//! Rows with images become the tokens of `transformers` (`tests/golden/image_chats.py`), and shards keep the images.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rlhf_hpc::comm::Group;
use rlhf_hpc::config::data::{DataConfig, LongPrompts, SplitBy, SplitConfig};
use rlhf_hpc::data::look_ahead;
use rlhf_hpc::data::shard::Shard;
use rlhf_hpc::data::{
    Hashes, PairRow, Prepared, Reading, Row, RowKind, RowSource, SftRow, prepare, sequences, shard_rows,
};
use rlhf_hpc::error::{Error, Result};
use rlhf_hpc::experience::{Image, ImageFile, Prompt};
use rlhf_hpc::reward::feedback::{Feedback, Texts};
use rlhf_hpc::text::Tokenizer;
use rlhf_hpc::text::images::encode_chat;
use serde_json::{Value, json};

fn golden_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

fn golden() -> Value {
    serde_json::from_str(&fs::read_to_string(golden_dir().join("image_chats.json")).unwrap()).unwrap()
}

/// A model directory with a tokenizer, a template and an image processor, and files of rows.
pub struct Fixture {
    pub dir: tempfile::TempDir,
    tokenizer: Arc<Tokenizer>,
}

impl Fixture {
    pub fn new(template: &str) -> Self {
        let (golden, dir) = (golden(), tempfile::tempdir().unwrap());
        let of_template = &golden["templates"][template];
        let write = |name: &str, value: &Value| fs::write(dir.path().join(name), value.to_string()).unwrap();
        write("tokenizer.json", &golden["tokenizer"]);
        let eos = json!({"eos_token": "<|im_end|>", "chat_template": of_template["text"]});
        write("tokenizer_config.json", &eos);
        write("config.json", &of_template["ids"]);
        write("preprocessor_config.json", &of_template["settings"]);
        let animated = ["animated.png", "animated.gif", "animated.webp"];
        for name in ["rgb.png", "420.jpg", "tiny.png", "narrow.png", "turned-6.jpg", "cmyk.jpg"].iter().chain(&animated)
        {
            fs::copy(golden_dir().join("images").join(name), dir.path().join(name)).unwrap();
        }
        let tokenizer = Arc::new(Tokenizer::load(dir.path()).unwrap());
        Self { dir, tokenizer }
    }

    fn rows(&self, rows: &[Value]) -> DataConfig {
        let path = self.dir.path().join("rows.jsonl");
        let lines: Vec<String> = rows.iter().map(Value::to_string).collect();
        fs::write(&path, lines.join("\n") + "\n").unwrap();
        DataConfig { prompts: vec![path.display().to_string()], chat_template: true, ..DataConfig::default() }
    }

    fn reading<'a>(&'a self, config: &'a DataConfig, kind: RowKind) -> Reading<'a> {
        Reading { config, kind, tokenizer: &self.tokenizer, vocabulary: self.tokenizer.vocabulary() }
    }

    fn prepared(&self, config: &DataConfig, kind: RowKind) -> Result<Prepared> {
        let (cache, mut hashes) = (self.dir.path().join("cache"), Hashes::default());
        prepare(self.reading(config, kind), &cache, &mut hashes, &Group::one())
    }

    fn source<T: Row>(&self, config: &DataConfig) -> Result<RowSource<T>> {
        let prepared = self.prepared(config, T::KIND)?;
        RowSource::open(config, &self.tokenizer, self.tokenizer.vocabulary(), &prepared, 0)
    }

    /// Checks that the tokens of `images` are image tokens, and those around them are not.
    fn check(&self, tokens: &[u32], images: &[Image], files: &[&str]) {
        let token = self.tokenizer.images().unwrap().token;
        let ours = |at: usize| images.iter().any(|image| image.range().contains(&at));
        assert!(tokens.iter().enumerate().all(|(at, t)| (*t == token) == ours(at)), "{tokens:?} {images:?}");
        for (image, name) in images.iter().zip(files) {
            assert_eq!(image.file.bytes(), fs::read(self.dir.path().join(name)).unwrap(), "{name}");
        }
        assert_eq!(images.len(), files.len());
    }
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

#[test]
fn rows_with_images_in_any_form_have_the_token_ids_of_transformers() {
    let golden = golden();
    for name in golden["templates"].as_object().unwrap().keys() {
        let fixture = Fixture::new(name);
        let config = fixture.rows(&[]);
        for case in golden["cases"].as_array().unwrap().iter().filter(|case| case["template"] == **name) {
            let row = golden["rows"][case["row"].as_u64().unwrap() as usize].as_object().unwrap();
            let placed = sequences(row, fixture.reading(&config, RowKind::Prompt), fixture.dir.path()).unwrap();
            assert_eq!(placed.tokens, [ids(&case["ids"])], "{name} {row:?}");
            let grids: Vec<[usize; 2]> = placed.images.iter().map(|image| [image.grid[1], image.grid[2]]).collect();
            assert_eq!(json!(grids), case["grids"], "{name} {row:?}");
            for image in &placed.images {
                let patches = fixture.tokenizer.images().unwrap().patches(image).unwrap();
                assert_eq!((patches.grid, patches.hash), (image.grid, image.hash));
            }
            let files: Vec<Vec<u8>> = placed.images.iter().map(|image| image.file.bytes().to_vec()).collect();
            let token = fixture.tokenizer.images().unwrap().token;
            let found: Vec<usize> = (0..placed.tokens[0].len()).filter(|i| placed.tokens[0][*i] == token).collect();
            let ours: Vec<usize> = placed.images.iter().flat_map(Image::range).collect();
            assert_eq!((ours, files.len()), (found, grids.len()));
        }
    }
}

#[test]
fn shards_keep_the_images_of_rows_of_every_kind_and_each_file_once() {
    let fixture = Fixture::new("qwen3_5");
    let shown =
        json!({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}, {"type": "image"}]});
    let images = json!(["rgb.png", "tiny.png"]);
    let rows: Vec<Value> = (0..3)
        .map(|i| {
            json!({
                "messages": [shown], "images": images, "response": format!("it is {i}"), "chosen": "yes",
                "rejected": "no", "answer": i, "note": "x",
            })
        })
        .collect();
    let config = DataConfig { label_key: "answer".to_owned(), ..fixture.rows(&rows) };
    let files = ["rgb.png", "tiny.png"];
    let mut prompts = fixture.source::<Prompt>(&config).unwrap();
    assert!(prompts.have_images());
    for prompt in prompts.next(3).unwrap() {
        fixture.check(&prompt.tokens, &prompt.images, &files);
        assert_eq!(prompt.images[0].range().len(), 8, "4 x 8 patches");
        assert_eq!(prompt.text.matches("<|image_pad|>").count(), 2, "{}", prompt.text);
    }
    let fields = prompts.lookup(&config)(0).unwrap();
    let mut names: Vec<&String> = fields.columns.keys().collect();
    names.sort_unstable();
    assert_eq!(names, ["answer", "chosen", "images", "note", "rejected", "response"]);
    let url = prompts.next(1).unwrap()[0].images[1].file.data_url();
    assert!(url.starts_with("data:image/png;base64,iVBOR") && fields.columns["images"][1] == *url);
    assert_eq!(fields.prompt, json!([shown]));
    for row in fixture.source::<SftRow>(&config).unwrap().next(3).unwrap() {
        fixture.check(&row.tokens, &row.images, &files);
        assert!(row.images.iter().all(|image| row.mask[image.range()].iter().all(|learned| *learned == 0)));
    }
    for row in
        fixture.source::<PairRow>(&DataConfig { label_key: String::new(), ..config.clone() }).unwrap().next(3).unwrap()
    {
        fixture.check(&row.chosen, &row.images, &files);
        fixture.check(&row.rejected, &row.images, &files);
    }
    let prefix = fixture.dir.path().join("shard");
    let input = Path::new(&config.prompts[0]);
    shard_rows(fixture.reading(&config, RowKind::Prompt), &[(input, None)], &[], &prefix).unwrap();
    let shard = Shard::open(&prefix, fixture.tokenizer.vocabulary()).unwrap();
    shard.verify().unwrap();
    let size = |name: &str| fs::metadata(fixture.dir.path().join(name)).unwrap().len();
    assert_eq!(size("shard.images.bin"), size("rgb.png") + size("tiny.png"), "each image once");
    assert_eq!(shard.images(2).unwrap(), shard.images(0).unwrap());
    fs::write(fixture.dir.path().join("shard.images.bin"), "short").unwrap();
    let error = Shard::open(&prefix, fixture.tokenizer.vocabulary()).unwrap().images(0).unwrap_err();
    assert!(error.message.contains("has an image that the shard lacks"), "{error}");
    // Rows without images have no files for them.
    let config = fixture.rows(&[json!({"prompt": "hi"})]);
    shard_rows(fixture.reading(&config, RowKind::Prompt), &[(input, None)], &[], &prefix).unwrap();
    assert!(!prefix.with_extension("images.bin").exists());
    assert!(!Shard::open(&prefix, fixture.tokenizer.vocabulary()).unwrap().has_images());
}

#[test]
fn a_plan_finds_the_images_of_a_sample_of_a_large_file() {
    let fixture = Fixture::new("qwen3");
    let row = |i: usize| json!({"prompt": "?".repeat(1 + i % 3), "images": ["rgb.png"], "note": "x".repeat(2000)});
    let config = fixture.rows(&(0..1500).map(row).collect::<Vec<_>>());
    let ahead = look_ahead(fixture.reading(&config, RowKind::Prompt), Path::new("none"), 0, 4).unwrap();
    let tokens: Vec<usize> = ahead.rows.iter().map(|row| row.prompt).collect();
    assert!(ahead.is_sample && tokens.iter().all(|tokens| (18..25).contains(tokens)), "{tokens:?}");
}

#[test]
fn images_inside_parquet_files_are_read_as_datasets_writes_them() {
    let fixture = Fixture::new("qwen3");
    let path = fixture.dir.path().join("rows.parquet");
    fs::copy(golden_dir().join("images/rows.parquet"), &path).unwrap();
    let config = DataConfig { prompts: vec![path.display().to_string()], ..fixture.rows(&[]) };
    let mut rows = fixture.source::<Prompt>(&config).unwrap().next(2).unwrap();
    rows.sort_by_key(|row| row.id);
    fixture.check(&rows[0].tokens, &rows[0].images, &["rgb.png"]);
    fixture.check(&rows[1].tokens, &rows[1].images, &["420.jpg", "tiny.png"]);
}

#[test]
fn rows_that_differ_only_in_images_are_different_rows() {
    let fixture = Fixture::new("qwen3_5");
    let row =
        |name: &str| json!({"prompt": "What?", "images": [name], "split": if name == "rgb.png" { "a" } else { "b" }});
    let image = |shade: u8| {
        let mut file = Vec::new();
        let pixels = vec![shade; 64 * 48 * 3];
        image::RgbImage::from_raw(64, 48, pixels)
            .unwrap()
            .write_to(&mut std::io::Cursor::new(&mut file), image::ImageFormat::Png)
            .unwrap();
        file
    };
    fs::write(fixture.dir.path().join("rgb.png"), image(3)).unwrap();
    fs::write(fixture.dir.path().join("other.png"), image(4)).unwrap();
    let split = SplitConfig { by: SplitBy::Field, field: "split".to_owned(), ..SplitConfig::default() };
    let base = fixture.rows(&[row("rgb.png"), row("other.png")]);
    let config = DataConfig { split, prompt_split: "a".to_owned(), eval_split: "b".to_owned(), ..base };
    let source = fixture.source::<Prompt>(&config).unwrap();
    let eval = source.eval_rows(0).unwrap();
    assert_eq!((source.epoch_rows(), eval.len(), source.ledger().filtered.len()), (1, 1, 0));
    let config = DataConfig { prompts: config.prompts.clone(), chat_template: true, ..DataConfig::default() };
    let rows = fixture.source::<Prompt>(&config).unwrap().next(2).unwrap();
    assert_eq!(rows[0].tokens, rows[1].tokens);
    assert_ne!(rows[0].images[0].hash, rows[1].images[0].hash);
}

#[test]
fn a_row_that_would_be_cut_within_an_image_is_filtered_by_that_rule() {
    let fixture = Fixture::new("qwen3_5");
    let part = |text: &str| json!({"type": "text", "text": text});
    let image = json!({"type": "image"});
    let content = json!([part("a b c d e f g h"), image, part("i j k l m n o p q r"), image, part("s t u v w")]);
    let row = json!({"messages": [{"role": "user", "content": content}], "images": ["rgb.png", "tiny.png"]});
    let config = fixture.rows(&[row, json!({"prompt": "hi"})]);
    let whole = fixture.source::<Prompt>(&config).unwrap().next(2).unwrap();
    let whole = whole.iter().find(|prompt| !prompt.images.is_empty()).unwrap();
    let (length, [first, second]) = (whole.tokens.len(), [0, 1].map(|i| whole.images[i].range()));
    let kept = |limit: usize, long_prompts: LongPrompts| {
        let config = DataConfig { prompt_tokens_max: limit, long_prompts, ..config.clone() };
        let mut source = fixture.source::<Prompt>(&config).unwrap();
        let is_filtered = source.ledger().filtered.get("image_cut") == Some(&1);
        let rows = source.next(source.epoch_rows() as usize).unwrap();
        let row = rows.into_iter().find(|prompt| prompt.id == 0);
        assert_eq!(is_filtered, row.is_none(), "{limit}");
        row
    };
    let files = ["rgb.png", "tiny.png"];
    // From the left: all of the first image with its start token goes, or none of it.
    let left = |start: usize| kept(length - start, LongPrompts::TruncateLeft);
    for (start, images) in [(first.start - 1, Some(0)), (first.end + 1, Some(1)), (second.start - 1, Some(1))] {
        let row = left(start).unwrap();
        let first = images.unwrap();
        fixture.check(&row.tokens, &row.images, &files[first..]);
    }
    for start in [first.start, first.start + 5, first.end, second.start, second.end - 1] {
        assert!(left(start).is_none(), "{start}");
    }
    // From the right.
    let right = |end: usize| kept(end, LongPrompts::TruncateRight);
    let row = right(second.start - 1).unwrap();
    fixture.check(&row.tokens, &row.images, &files[..1]);
    for end in [first.start, first.end, second.start, second.end] {
        assert!(right(end).is_none(), "{end}");
    }
}

#[test]
fn errors_of_images_name_the_row() {
    let fixture = Fixture::new("qwen3");
    let image = |value: Value| json!({"role": "user", "content": [{"type": "image", "image": value}]});
    let parts =
        |parts: Value| json!({"messages": [{"role": "user", "content": parts}], "images": ["rgb.png", "tiny.png"]});
    let whole = fs::read(fixture.dir.path().join("rgb.png")).unwrap();
    fs::write(fixture.dir.path().join("half.png"), &whole[..3000]).unwrap();
    let mut huge = whole;
    huge[16..24].copy_from_slice(&[0, 1, 0x86, 0xa0, 0, 1, 0x86, 0xa0]);
    let mut huge_jpeg = fs::read(fixture.dir.path().join("420.jpg")).unwrap();
    let frame = huge_jpeg.windows(2).position(|pair| pair == [0xff, 0xc0]).unwrap();
    huge_jpeg[frame + 5..frame + 9].fill(0xff);
    let half = huge_jpeg[..huge_jpeg.len() / 2].to_vec();
    for (name, file) in [
        ("huge.png", huge),
        ("huge.jpg", huge_jpeg),
        ("half.jpg", half),
        ("text.png", b"hello".to_vec()),
        ("empty.png", Vec::new()),
    ] {
        fs::write(fixture.dir.path().join(name), file).unwrap();
    }
    for (row, what) in [
        (json!({"messages": [image(json!("half.png"))]}), "half.png: the image is truncated or damaged: "),
        (json!({"messages": [image(json!("half.jpg"))]}), "half.jpg: the image is truncated or damaged"),
        (json!({"messages": [image(json!("huge.png"))]}), "huge.png: the image is too large (100000 x 100000 pixels"),
        (json!({"messages": [image(json!("huge.jpg"))]}), "huge.jpg: the image is too large (65535 x 65535 pixels"),
        (json!({"messages": [image(json!("cmyk.jpg"))]}), "cmyk.jpg: the image has CMYK values"),
        (json!({"messages": [image(json!("animated.png"))]}), "an animated PNG"),
        (json!({"messages": [image(json!("animated.gif"))]}), "a GIF, which may be animated"),
        (json!({"messages": [image(json!("animated.webp"))]}), "an animated WebP"),
        (json!({"messages": [image(json!("text.png"))]}), "text.png: the image is neither JPEG nor PNG"),
        (json!({"messages": [image(json!("empty.png"))]}), "empty.png: the image is empty"),
        (json!({"messages": [image(json!({"path": "empty.png"}))]}), "empty.png: the image is empty"),
        (json!({"messages": [image(json!("none.png"))]}), "none.png does not exist"),
        (json!({"messages": [image(json!("https://x.org/a.png"))]}), "images are not downloaded"),
        (json!({"messages": [image(json!("data:image/png,abc"))]}), "must hold an image in base64"),
        (json!({"messages": [image(json!("data:image/png;base64,*"))]}), "must be base64"),
        (json!({"messages": [image(json!("iVBORw0KGgo".repeat(900)))]}), "the path of an image has 9900 bytes"),
        (json!({"messages": [image(json!({"path": null}))]}), "neither bytes nor a path"),
        (json!({"messages": [image(json!(7))]}), "must be a path, a data URL"),
        (parts(json!([{"type": "image"}])), "the messages have 1 place for 2 images"),
        (
            parts(json!([{"type": "image"}, {"type": "image"}, {"type": "image"}])),
            "the messages have 3 places for 2 images",
        ),
        (parts(json!([{"type": "image"}, {"type": "image", "max_pixels": 9}])), "a setting \"max_pixels\""),
        (json!({"prompt": "<image>?", "images": ["rgb.png", "tiny.png"]}), "the messages have 1 place for 2 images"),
        (json!({"prompt": "a", "images": ["rgb.png", "none.png"]}), "image 2: the image"),
        (json!({"prompt": "a <|image_pad|>"}), "the text has 1 place for 0 images"),
        (json!({"prompt": "a", "images": ["rgb.png"], "image": "rgb.png"}), "in both"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]}),
            "a part with video",
        ),
        (json!({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}), "a part with audio"),
    ] {
        let config = fixture.rows(&[json!({"prompt": "first"}), row.clone()]);
        let error = fixture.prepared(&config, RowKind::Prompt).unwrap_err();
        assert!(error.message.contains("rows.jsonl:2: ") && error.message.contains(what), "{what}: {error}");
        assert_eq!(error.exit_code(), 65, "{error}");
    }
}

#[test]
fn a_shard_with_images_needs_the_image_processor_that_made_it() {
    let fixture = Fixture::new("qwen3");
    let config = fixture.rows(&[json!({"prompt": "a", "image": "rgb.png"})]);
    let prefix = fixture.dir.path().join("shard");
    shard_rows(fixture.reading(&config, RowKind::Prompt), &[(Path::new(&config.prompts[0]), None)], &[], &prefix)
        .unwrap();
    let config = DataConfig { prompts: vec![prefix.display().to_string()], ..config };
    fixture.source::<Prompt>(&config).unwrap();
    let other = Fixture::new("qwen2_5");
    let error = other.source::<Prompt>(&config).unwrap_err().message;
    assert!(error.contains("was made with another image processor"), "{error}");
    // A model that reads text only.
    fs::remove_file(other.dir.path().join("preprocessor_config.json")).unwrap();
    let text = Arc::new(Tokenizer::load(other.dir.path()).unwrap());
    let error = Fixture { tokenizer: text, ..other }.source::<Prompt>(&config).unwrap_err().message;
    assert!(error.contains("the model reads text only"), "{error}");
}

/// A model's reading of feedback, and the token of images.
pub fn texts(fixture: &Fixture, blind: Option<Error>) -> (Texts, u32) {
    let (tokenizer, template) = (fixture.tokenizer.clone(), serde_json::Map::new());
    let token = tokenizer.images().unwrap().token;
    (Texts { vocabulary: tokenizer.vocabulary(), tokenizer, template, blind }, token)
}

fn feedback(value: &Value) -> Feedback {
    serde_json::from_value(value.clone()).unwrap()
}

#[test]
fn images_in_the_feedback_of_an_environment_are_placed_like_those_of_a_conversation() {
    let fixture = Fixture::new("qwen3");
    let ((texts, token), folder, none) = (texts(&fixture, None), fixture.dir.path(), serde_json::Map::new());
    let file = ImageFile::from(fs::read(folder.join("rgb.png")).unwrap());
    let question =
        json!({"role": "user", "content": [{"type": "image", "image": "tiny.png"}, {"type": "text", "text": "What?"}]});
    let look = |content: Value| json!({"role": "user", "content": content});
    let text = json!({"type": "text", "text": "And now?"});
    let parts = look(json!([{"type": "image", "image": "rgb.png"}, text]));
    let conversation = [question.clone(), json!({"role": "assistant", "content": "Nothing."}), parts.clone()];
    let [prompt, whole] = [&conversation[..1], &conversation[..]]
        .map(|messages| encode_chat(&fixture.tokenizer, messages, &none, folder).unwrap());
    let answer = fixture.tokenizer.encode("Nothing.<|im_end|>", false).unwrap();
    for (messages, images) in [
        (json!([parts]), json!([])),
        (json!([look(json!([{"type": "image_url", "image_url": {"url": file.data_url()}}, text]))]), json!([])),
        (json!([look(json!([{"image": {"path": "rgb.png"}}, text]))]), json!([])),
        (json!([look(json!([{"type": "image"}, text]))]), json!(["rgb.png"])),
        (json!([look(json!("<image>And now?"))]), json!([file.data_url()])),
        (json!([look(json!("And now?"))]), json!(["rgb.png"])),
    ] {
        let appended = texts.append(&feedback(&messages), images.as_array().unwrap(), &answer, folder).unwrap();
        assert_eq!([&prompt.0[..], &answer, &appended.tokens].concat(), whole.0, "{messages}");
        let first = prompt.0.len() + answer.len();
        let placed = appended.images.into_iter().map(|image| Image { at: first + image.at, ..image });
        assert_eq!(prompt.1.iter().cloned().chain(placed).collect::<Vec<_>>(), whole.1, "{messages}");
        assert!(appended.text.contains("<|vision_start|><|image_pad|><|vision_end|>And now?"), "{}", appended.text);
    }
    let tokens = fixture.tokenizer.encode("See <|image_pad|>.", false).unwrap();
    for plain in [json!("See <|image_pad|>."), json!(tokens)] {
        let appended = texts.append(&feedback(&plain), &[json!("rgb.png")], &answer, folder).unwrap();
        let image = &appended.images[0];
        assert!(image.tokens > 1 && appended.tokens[image.range()].iter().all(|other| *other == token));
        assert_eq!((appended.tokens.len(), &*appended.text), (tokens.len() + image.tokens - 1, "See <|image_pad|>."));
    }
}

#[test]
fn feedback_with_an_image_that_cannot_be_read_is_a_failure_with_its_reason() {
    let fixture = Fixture::new("qwen3");
    let ((texts, token), folder) = (texts(&fixture, None), fixture.dir.path());
    let look = |part: Value| json!([{"role": "user", "content": [part]}]);
    fs::write(folder.join("cut.png"), &fs::read(folder.join("rgb.png")).unwrap()[..300]).unwrap();
    for (content, images, why) in [
        (json!("See <|image_pad|>."), json!([]), "the text has 1 place for 0 images"),
        (json!([1, token]), json!([]), "the text has 1 place for 0 images"),
        (json!("See."), json!(["rgb.png"]), "the text has 0 places for 1 image"),
        (look(json!({"type": "image"})), json!([]), "the messages have 1 place for 0 images"),
        (
            look(json!({"type": "image", "image": "rgb.png"})),
            json!(["rgb.png"]),
            "the messages have 0 places for 1 image",
        ),
        (look(json!({"type": "image", "image": "none.png"})), json!([]), "none.png does not exist"),
        (look(json!({"type": "image", "image": "cut.png"})), json!([]), "cut.png: "),
        (look(json!({"type": "image", "image": "http://a/b.png"})), json!([]), "images are not downloaded"),
        (look(json!({"type": "video", "video": "a.mp4"})), json!([]), "a part with video"),
    ] {
        let error = texts.append(&feedback(&content), images.as_array().unwrap(), &[], folder).unwrap_err();
        assert!(error.contains("its feedback cannot be tokenized") && error.contains(why), "{content}: {error}");
    }
    let (texts, _) = self::texts(&fixture, Some(Error::usage("images are not supported on GPUs")));
    let error = texts.append(&feedback(&look(json!({"type": "image", "image": "rgb.png"}))), &[], &[], folder);
    assert!(error.unwrap_err().contains("images are not supported on GPUs"));
    texts.append(&feedback(&json!("See <image>.")), &[], &[], folder).unwrap();
}
