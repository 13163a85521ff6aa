//! Buffers in mapped files.

use rlhf_hpc::sys::pages::page_size;
use rlhf_hpc::tensor::arena::{Buffer, moving_s};
use std::fs::File;
use std::os::unix::fs::FileExt;

/// Bytes of `range`, of whole pages, that this process has in its page tables.
fn resident_bytes(range: std::ops::Range<*const f32>) -> usize {
    const PRESENT: u64 = 1 << 63;
    let [start, end] = [range.start as usize / page_size(), (range.end as usize).div_ceil(page_size())];
    let mut entries = vec![0; (end - start) * 8];
    let map = File::open("/proc/self/pagemap").expect("Linux has it");
    map.read_exact_at(&mut entries, (start * 8) as u64).expect("an entry a page");
    let is_present = |entry: &&[u8; 8]| u64::from_ne_bytes(**entry) & PRESENT != 0;
    entries.as_chunks::<8>().0.iter().filter(is_present).count() * page_size()
}

#[test]
fn a_mapped_buffer_works_like_any_other_and_keeps_its_contents_while_evicted() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut buffer = Buffer::scratch(100_000);
    for (i, x) in buffer.iter_mut().enumerate() {
        *x = i as f32;
    }
    let expected = buffer.to_vec();
    buffer.move_to_file(dir.path()).expect("disk space");
    buffer.prefetch();
    // Only the address: reading the values would load them again.
    let range = buffer.as_ptr_range();
    buffer.evict();
    assert_eq!(resident_bytes(range.clone()), 0);
    assert_eq!(*buffer, *expected);
    buffer.evict();
    assert_eq!(resident_bytes(range.clone()), 0);
    buffer.prefetch();
    assert!(resident_bytes(range.clone()) >= 400_000 && moving_s() > 0.0);
    buffer[7] = -1.0;
    assert_eq!((buffer[6], buffer.clone()[7]), (6.0, -1.0));
}
