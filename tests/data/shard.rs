use std::fs;
use std::path::Path;

use rlhf_hpc::comm::Group;
use rlhf_hpc::data::Hashes;
use rlhf_hpc::data::shard::{Meta, Shard, ShardWriter, Sidecar};
use rlhf_hpc::error::Kind;

use crate::data::fixture::{Fixture, config};

/// Documents of one to three sequences, in two splits.
fn write(prefix: &Path, vocabulary: usize) -> Vec<Vec<Vec<u32>>> {
    let mut writer = ShardWriter::create(prefix, vocabulary).unwrap();
    let mut documents = [Vec::new(), Vec::new()];
    for i in 0..50_u32 {
        let document: Vec<Vec<u32>> = (0..=i % 3)
            .map(|s| (0..=(i * 5 + s) % 11).map(|t| (i * 31 + s * 7 + t) % vocabulary as u32).collect())
            .collect();
        let side = usize::from(i % 4 == 0);
        let meta = Meta { label: format!("label {i}"), source: format!("rows:{i}"), ..Meta::default() };
        writer.push(Some(["train", "test"][side]), &document, &meta).unwrap();
        documents[side].push(document);
    }
    writer.commit(Sidecar { tokenizer_sha256: "aaaa".to_owned(), ..Sidecar::default() }).unwrap();
    // Splits are ordered by name: test, then train.
    documents[1].iter().chain(&documents[0]).cloned().collect()
}

fn written(vocabulary: usize) -> (tempfile::TempDir, std::path::PathBuf, Vec<Vec<Vec<u32>>>) {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("rows.v1");
    let documents = write(&prefix, vocabulary);
    (dir, prefix, documents)
}

fn suffixed(prefix: &Path, suffix: &str) -> std::path::PathBuf {
    format!("{}{suffix}", prefix.display()).into()
}

#[test]
fn documents_come_back_as_they_were_written_in_both_widths() {
    for (vocabulary, bytes) in [(1000, 2), (65_500, 4), (200_000, 4)] {
        let (_dir, prefix, documents) = written(vocabulary);
        let shard = Shard::open(&prefix, vocabulary).unwrap();
        assert_eq!(shard.documents(), 50);
        let tokens: usize = documents.iter().flatten().map(Vec::len).sum();
        assert_eq!(shard.tokens(), tokens as u64);
        assert_eq!(fs::metadata(suffixed(&prefix, ".bin")).unwrap().len(), (tokens * bytes) as u64);
        for (i, document) in documents.iter().enumerate() {
            assert_eq!(&shard.document(i).unwrap(), document);
            assert_eq!(shard.prompt(i).unwrap(), document[0]);
            assert_eq!(shard.prompt_tokens(i).unwrap(), document[0].len());
            assert_eq!(shard.lengths(i).unwrap(), document.iter().map(Vec::len).collect::<Vec<_>>());
        }
        let splits: Vec<_> = shard.sidecar().splits.iter().map(|s| (s.name.as_str(), s.first, s.documents)).collect();
        assert_eq!(splits, [("test", 0, 13), ("train", 13, 37)]);
        assert_eq!(shard.meta(1).unwrap().label, "label 4");
        assert_eq!(shard.meta(49).unwrap().source, "rows:49");
        shard.verify().unwrap();
        let left: Vec<_> = fs::read_dir(prefix.parent().unwrap()).unwrap().collect();
        assert_eq!(left.len(), 5, "{left:?}");
    }
}

#[test]
fn the_index_has_megatrons_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("two");
    let mut writer = ShardWriter::create(&prefix, 300).unwrap();
    writer.push(None, &[vec![1, 2, 299]], &Meta::default()).unwrap();
    writer.push(None, &[vec![4], vec![5, 6]], &Meta::default()).unwrap();
    writer.commit(Sidecar::default()).unwrap();
    let mut index = b"MMIDIDX\0\0".to_vec();
    index.extend(1_u64.to_le_bytes());
    index.push(8);
    index.extend(3_u64.to_le_bytes());
    index.extend(3_u64.to_le_bytes());
    index.extend([3_i32, 1, 2].iter().flat_map(|n| n.to_le_bytes()));
    index.extend([0_i64, 6, 8, 0, 1, 3].iter().flat_map(|n| n.to_le_bytes()));
    assert_eq!(fs::read(suffixed(&prefix, ".idx")).unwrap(), index);
    assert_eq!(fs::read(suffixed(&prefix, ".bin")).unwrap(), [1, 0, 2, 0, 43, 1, 4, 0, 5, 0, 6, 0]);
}

type Damage<'a> = &'a dyn Fn(&Path);

#[test]
fn a_truncated_incomplete_or_damaged_shard_is_rejected_with_the_cause() {
    let cut = |suffix, bytes| {
        move |prefix: &Path| {
            let path = suffixed(prefix, suffix);
            let file = fs::OpenOptions::new().write(true).open(path).unwrap();
            let length = file.metadata().unwrap().len();
            file.set_len(length - length.min(bytes)).unwrap();
        }
    };
    let remove = |suffix| move |prefix: &Path| fs::remove_file(suffixed(prefix, suffix)).unwrap();
    // A byte of the index.
    let set = |at: usize, value: u8| {
        move |prefix: &Path| {
            let path = suffixed(prefix, ".idx");
            let mut bytes = fs::read(&path).unwrap();
            bytes[at] = value;
            fs::write(&path, &bytes).unwrap();
        }
    };
    let header = 34;
    let faults: [(Damage, &str); 16] = [
        (&cut(".idx", 1), "bytes"),
        (&cut(".idx", 8), "bytes"),
        (&cut(".idx", 5000), "bytes"),
        (&cut(".bin", 2), "ends beyond the .bin"),
        (&cut(".meta.idx", 8), "bytes"),
        (&cut(".meta.jsonl", 1), "bytes"),
        (&remove(".idx"), ".idx"),
        (&remove(".bin"), ".bin"),
        (&remove(".meta.idx"), ".meta.idx"),
        (&remove(".meta.jsonl"), ".meta.jsonl"),
        (&set(0, b'X'), "MMIDIDX"),
        (&set(9, 2), "must have version 1 (got 2)"),
        (&set(17, 7), "the dtype code must be an integer type, 1 to 5 or 8 (got 7)"),
        (&set(18, 49), "sequences"),
        (&set(26, 99), "document entries"),
        (&set(header + 3, 0x7f), "tokens at byte"),
    ];
    for (i, (damage, words)) in faults.into_iter().enumerate() {
        let (_dir, prefix, _) = written(1000);
        damage(&prefix);
        let error = Shard::open(&prefix, 1000).and_then(|shard| shard.document(0)).unwrap_err();
        assert!(error.kind == Kind::Data && error.message.contains(words), "{i}: {error}");
    }
}

#[test]
fn a_document_boundary_out_of_range_is_rejected() {
    let (_dir, prefix, documents) = written(1000);
    let path = suffixed(&prefix, ".idx");
    let mut bytes = fs::read(&path).unwrap();
    let sequences: usize = documents.iter().map(Vec::len).sum();
    let boundary = 34 + 12 * sequences + 8 * 3;
    bytes[boundary..boundary + 8].copy_from_slice(&9999_i64.to_le_bytes());
    fs::write(&path, &bytes).unwrap();
    let shard = Shard::open(&prefix, 1000).unwrap();
    assert!(shard.document(2).unwrap_err().message.contains("document 2 runs from"));
    assert!(shard.document(3).unwrap_err().message.contains("document 3 runs from"));
    assert_eq!(shard.document(1).unwrap(), documents[1]);
}

#[test]
fn a_shard_of_a_larger_vocabulary_or_of_another_tokenizer_is_rejected() {
    let (_dir, prefix, documents) = written(1000);
    let token_max = documents.iter().flatten().flatten().max().unwrap();
    let error = Shard::open(&prefix, *token_max as usize).unwrap_err();
    assert_eq!(error.kind, Kind::Data);
    assert!(error.message.contains(&format!("token {token_max}")), "{error}");
    let shard = Shard::open(&prefix, *token_max as usize + 1).unwrap();
    assert!(shard.check_tokenizer("aaaa").is_ok());
    assert_eq!(shard.check_tokenizer("bbbb").unwrap_err().kind, Kind::Data);
}

#[test]
fn a_shard_of_another_program_is_scanned_once_and_gets_a_sidecar() {
    let (_dir, prefix, documents) = written(1000);
    let written: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(suffixed(&prefix, ".json")).unwrap()).unwrap();
    for suffix in [".json", ".meta.idx", ".meta.jsonl"] {
        fs::remove_file(suffixed(&prefix, suffix)).unwrap();
    }
    let shard = Shard::open(&prefix, 1000).unwrap();
    assert_eq!(shard.document(7).unwrap(), documents[7]);
    assert_eq!(shard.meta(7).unwrap().label, "");
    let scanned: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(suffixed(&prefix, ".json")).unwrap()).unwrap();
    for key in ["token_max", "documents", "sequences", "tokens"] {
        assert_eq!(scanned[key], written[key], "{key}");
    }
    for suffix in [".bin", ".idx"] {
        assert_eq!(scanned["files"][suffix], written["files"][suffix]);
    }
    // The second opening uses the sidecar.
    let mut believed = scanned.clone();
    believed["token_max"] = serde_json::json!(1234);
    fs::write(suffixed(&prefix, ".json"), believed.to_string()).unwrap();
    assert!(Shard::open(&prefix, 1000).unwrap_err().message.contains("token 1234"));
}

#[test]
fn a_writer_that_stops_half_way_leaves_the_old_shard_and_no_other_files() {
    let (dir, prefix, documents) = written(1000);
    let before = fs::read_dir(dir.path()).unwrap().count();
    let mut writer = ShardWriter::create(&prefix, 1000).unwrap();
    writer.push(None, &[vec![1, 2, 3]], &Meta::default()).unwrap();
    drop(writer);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), before);
    assert_eq!(Shard::open(&prefix, 1000).unwrap().document(3).unwrap(), documents[3]);
}

#[test]
fn empty_documents_and_tokens_outside_the_vocabulary_are_not_written() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = ShardWriter::create(&dir.path().join("x"), 10).unwrap();
    for document in [vec![], vec![vec![]], vec![vec![1], vec![]], vec![vec![10]]] {
        assert_eq!(writer.push(None, &document, &Meta::default()).unwrap_err().kind, Kind::Data);
    }
    let error = writer.commit(Sidecar::default()).unwrap_err();
    assert!(error.message.contains("no rows"), "{error}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_file_is_hashed_again_if_it_changed_with_equal_size_and_mtime() {
    let dir = tempfile::tempdir().unwrap();
    let (path, cache) = (dir.path().join("a"), dir.path().join("inputs.json"));
    let hash = |hashes: &mut Hashes| {
        let found = hashes.hash_files(std::slice::from_ref(&path), &Group::one()).unwrap()[&path].clone();
        hashes.save(&cache).unwrap();
        (found.bytes, found.xxh3, hashes.read_bytes)
    };
    fs::write(&path, "one").unwrap();
    let mtime = fs::metadata(&path).unwrap().modified().unwrap();
    let (bytes, first, read) = hash(&mut Hashes::read(&cache));
    assert_eq!((bytes, read), (3, 3));
    assert_eq!(hash(&mut Hashes::read(&cache)), (3, first.clone(), 0));
    // File system clocks have a resolution of a few milliseconds.
    std::thread::sleep(std::time::Duration::from_millis(30));
    fs::write(&path, "two").unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_modified(mtime).unwrap();
    let (bytes, second, read) = hash(&mut Hashes::read(&cache));
    assert!((bytes, read) == (3, 3) && first != second, "{first} {second}");
    fs::write(&cache, "no JSON").unwrap();
    assert_eq!(hash(&mut Hashes::read(&cache)), (3, second, 3), "a damaged cache holds nothing");
}

/// 60 GB of tokens in a sparse file. Reading them would take minutes.
#[test]
fn opening_a_shard_reads_none_of_its_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("huge");
    let (sequences, length) = (15_u64, 2_000_000_000_u64);
    let bin = fs::File::create(suffixed(&prefix, ".bin")).unwrap();
    bin.set_len(2 * sequences * length).unwrap();
    let mut index = b"MMIDIDX\0\0".to_vec();
    index.extend(1_u64.to_le_bytes());
    index.push(8);
    index.extend(sequences.to_le_bytes());
    index.extend((sequences + 1).to_le_bytes());
    index.extend((0..sequences).flat_map(|_| (length as i32).to_le_bytes()));
    index.extend((0..sequences).flat_map(|i| (i * 2 * length).to_le_bytes()));
    index.extend((0..=sequences).flat_map(u64::to_le_bytes));
    fs::write(suffixed(&prefix, ".idx"), &index).unwrap();
    let file = |bytes: u64| serde_json::json!({"bytes": bytes, "xxh3": ""});
    let sidecar = serde_json::json!({
        "version": 1, "token_max": 7, "documents": sequences, "sequences": sequences, "tokens": sequences * length,
        "files": {".bin": file(2 * sequences * length), ".idx": file(index.len() as u64)},
    });
    fs::write(suffixed(&prefix, ".json"), sidecar.to_string()).unwrap();
    let shard = Shard::open(&prefix, 8).unwrap();
    assert_eq!(shard.tokens(), 30_000_000_000);
    assert_eq!(shard.prompt_tokens(14).unwrap() as u64, length);
}

/// A shard as Megatron's preprocess_data writes it: `documents` of sequences of u16 tokens, and a mode per sequence.
fn megatron(prefix: &Path, documents: &[Vec<Vec<u16>>], modes: Option<u8>) {
    let sequences: Vec<&Vec<u16>> = documents.iter().flatten().collect();
    let mut index = b"MMIDIDX\0\0".to_vec();
    index.extend(1_u64.to_le_bytes());
    index.push(8);
    index.extend((sequences.len() as u64).to_le_bytes());
    index.extend((documents.len() as u64 + 1).to_le_bytes());
    index.extend(sequences.iter().flat_map(|sequence| (sequence.len() as i32).to_le_bytes()));
    let mut at = 0_u64;
    for sequence in &sequences {
        index.extend(at.to_le_bytes());
        at += 2 * sequence.len() as u64;
    }
    let mut end = 0_u64;
    index.extend(end.to_le_bytes());
    for document in documents {
        end += document.len() as u64;
        index.extend(end.to_le_bytes());
    }
    index.extend(modes.map_or(Vec::new(), |mode| vec![mode; sequences.len()]));
    fs::write(suffixed(prefix, ".idx"), index).unwrap();
    let tokens: Vec<u8> = sequences.into_iter().flatten().flat_map(|token| token.to_le_bytes()).collect();
    fs::write(suffixed(prefix, ".bin"), tokens).unwrap();
}

#[test]
fn empty_documents_and_modes_of_megatron_are_read_and_empty_documents_are_counted() {
    let documents = [vec![vec![5, 6]], vec![], vec![vec![]], vec![vec![7], vec![8, 9]]];
    let read: Vec<Vec<Vec<u32>>> = documents
        .iter()
        .map(|document| document.iter().map(|s: &Vec<u16>| s.iter().map(|t| u32::from(*t)).collect()).collect())
        .collect();
    for modes in [None, Some(0), Some(1)] {
        let fixture = Fixture::new();
        let prefix = fixture.path("megatron");
        megatron(&prefix, &documents, modes);
        let shard = Shard::open(&prefix, 1000).unwrap();
        assert_eq!((0..4).map(|i| shard.document(i).unwrap()).collect::<Vec<_>>(), read, "{modes:?}");
        shard.verify().unwrap();
        let mut source = fixture.prompts(&config(prefix.to_str().unwrap()), 0).unwrap();
        assert_eq!(source.ledger().filtered["empty_document"], 2);
        let mut prompts: Vec<_> = source.next(2).unwrap().into_iter().map(|prompt| prompt.tokens).collect();
        prompts.sort();
        assert_eq!(prompts, [vec![5, 6], vec![7]]);
    }
}
