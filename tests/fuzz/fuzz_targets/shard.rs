//! Token shards: Megatron's `.idx` and `.bin`, and this program's sidecar and metadata.

use crate::place;
use rlhf_hpc::data::shard::{Meta, Shard, ShardWriter, Sidecar};
use std::fs;

const FILES: [&str; 5] = ["s/a.idx", "s/a.bin", "s/a.json", "s/a.meta.jsonl", "s/a.meta.idx"];
const VOCABULARY: usize = 1000;

/// Opens the input and reads every document. Without a sidecar it is a shard of Megatron.
pub fn run(data: &[u8]) {
    place::write_all(FILES, place::cut(data));
    let Ok(shard) = Shard::open(&place::path("s/a"), VOCABULARY) else { return };
    drop(shard.verify());
    // A document without sequences has no bytes, so a small file has many.
    for i in 0..shard.documents().min(1000) {
        drop((shard.document(i), shard.lengths(i), shard.prompt(i), shard.prompt_tokens(i), shard.meta(i)));
    }
}

/// A shard with and without the files that Megatron lacks.
pub fn seeds() -> Vec<Vec<u8>> {
    let prefix = place::path("s/seed");
    fs::create_dir_all(place::path("s")).expect("a directory in memory");
    let mut writer = ShardWriter::create(&prefix, VOCABULARY).expect("a shard begins");
    for split in ["train", "train", "test"] {
        let meta = Meta { source: "rows.jsonl:1".to_owned(), ..Meta::default() };
        writer.push(Some(split), &[vec![1, 2, 3], vec![4]], &meta).expect("a document is added");
    }
    writer.commit(Sidecar::default()).expect("a shard ends");
    let files = FILES.map(|name| fs::read(place::path(&name.replace("/a.", "/seed."))).expect("a file of the shard"));
    let files = files.each_ref().map(Vec::as_slice);
    vec![place::join(&files), place::join(&files[..2])]
}
