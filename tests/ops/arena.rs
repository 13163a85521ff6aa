//! Buffers in mapped files.

use rlhf_hpc::tensor::arena::{Buffer, moving_s};

#[test]
fn a_mapped_buffer_is_used_as_any_other_and_keeps_its_contents_while_it_is_evicted() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut buffer = Buffer::scratch(100_000);
    for (i, x) in buffer.iter_mut().enumerate() {
        *x = i as f32;
    }
    let expected = buffer.to_vec();
    buffer.move_to_file(dir.path()).expect("disk space");
    assert_eq!(buffer.resident_bytes(), 0);
    assert_eq!(*buffer, *expected);
    buffer.evict();
    assert_eq!(buffer.resident_bytes(), 0);
    buffer.prefetch();
    assert!(buffer.resident_bytes() >= 400_000 && moving_s() > 0.0);
    buffer[7] = -1.0;
    assert_eq!((buffer[6], buffer.clone()[7]), (6.0, -1.0));
}
