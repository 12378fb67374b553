use cfq_proto::blob::{BlobHash, CHUNK_BYTES};

use super::*;
use crate::store::PutOutcome;

async fn put(r: &Running, lease: &BlobLease, bytes: &[u8], size: u64, index: u32, chunk: &[u8]) -> PutOutcome {
    r.env.store.blob_put(lease, &BlobHash::of(bytes), size, index, chunk).await.unwrap()
}

#[tokio::test]
async fn chunks_that_do_not_match_the_blob_are_refused_and_discarded() {
    let r = running().await;
    let bytes: Vec<u8> = (0..CHUNK_BYTES + 5).map(|i| (i % 251) as u8).collect();
    let size = bytes.len() as u64;
    let (first, second) = bytes.split_at(CHUNK_BYTES);
    let refused =
        async |size, index, chunk: &[u8]| match put(&r, &of_node(r.job.lease), &bytes, size, index, chunk).await {
            PutOutcome::Refused(reason) => reason,
            PutOutcome::Kept => panic!("{size} {index}"),
        };
    assert!(refused(size, 1, b"shorter").await.contains("has 5 bytes, not 7"));
    assert!(refused(size, 2, b"").await.contains("has 2 chunks"));
    assert!(refused(1 << 40, 0, first).await.contains("1 to"));
    assert_eq!(put(&r, &of_node(r.job.lease), &bytes, size, 0, first).await, PutOutcome::Kept);
    assert!(refused(size + 1, 0, first).await.contains(&format!("has {size} bytes, not {}", size + 1)));
    let reason = refused(size, 1, b"wrong").await;
    assert!(reason.contains(BlobHash::of(&bytes).as_str()) && reason.contains("send the blob again"), "{reason}");
    assert_eq!(r.env.store.count("select count(*) from blob_chunks").await, 0, "all chunks are discarded");
    assert_eq!(put(&r, &of_node(r.job.lease), &bytes, size, 0, first).await, PutOutcome::Kept);
    assert_eq!(
        r.env.store.blob_get(&of_node(r.job.lease), &BlobHash::of(&bytes), 0).await.unwrap(),
        None,
        "not complete yet"
    );
    assert_eq!(put(&r, &of_node(r.job.lease), &bytes, size, 1, second).await, PutOutcome::Kept);
    assert_eq!(put(&r, &of_node(r.job.lease), &bytes, size, 1, second).await, PutOutcome::Kept, "repeated");
    let (_, stored) = r.env.store.blob_get(&of_node(r.job.lease), &BlobHash::of(&bytes), 1).await.unwrap().unwrap();
    assert_eq!(stored, second);
}

#[tokio::test]
async fn knowing_a_blobs_hash_gives_no_right_to_read_it() {
    let r = running().await;
    let secret = b"the other task's prompt";
    assert_eq!(put(&r, &of_runner(r.task.lease), secret, secret.len() as u64, 0, secret).await, PutOutcome::Kept);
    r.env.submit().await;
    let other = &of_runner(grant(&r.env, r.runner).await.fence.lease);
    let guess = vec![b'x'; secret.len()];
    let refused = put(&r, other, secret, secret.len() as u64, 0, &guess).await;
    assert!(matches!(refused, PutOutcome::Refused(_)), "{refused:?}");
    assert_eq!(r.env.store.blob_get(other, &BlobHash::of(secret), 0).await.unwrap(), None);
    let put_all = put(&r, other, secret, secret.len() as u64, 0, secret).await;
    assert_eq!(put_all, PutOutcome::Kept, "a sender that has the bytes may refer to it");
    assert!(r.env.store.blob_get(other, &BlobHash::of(secret), 0).await.unwrap().is_some());
}

/// The id of a lease is in the token frames of its attempt, which others receive.
#[tokio::test]
async fn lease_of_another_process_gives_no_right_to_blobs() {
    let r = running().await;
    let prompt = b"prompt";
    let thief = BlobLease::Node("thief".parse().unwrap(), r.job.lease);
    let same_name = BlobLease::Node(runner().as_str().parse().unwrap(), r.task.lease);
    assert_eq!(put(&r, &of_runner(r.task.lease), prompt, 6, 0, prompt).await, PutOutcome::Kept);
    for lease in [&thief, &same_name] {
        let written = put(&r, lease, prompt, 6, 0, prompt).await;
        assert_eq!(written, PutOutcome::Refused("the lease is not live".into()));
        assert_eq!(r.env.store.blob_get(lease, &BlobHash::of(prompt), 0).await.unwrap(), None);
    }
    assert!(r.env.store.blob_get(&of_node(r.job.lease), &BlobHash::of(prompt), 0).await.unwrap().is_some());
}
