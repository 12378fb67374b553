use cfq_proto::blob::{BlobHash, CHUNK};
use cfq_proto::ids::LeaseId;

use super::*;
use crate::store::Put;

async fn put(r: &Running, lease: LeaseId, bytes: &[u8], size: u64, index: u32, chunk: &[u8]) -> Put {
    r.lab.store.blob_put(lease, &BlobHash::of(bytes), size, index, chunk).await.unwrap()
}

#[tokio::test]
async fn what_is_not_what_it_is_called_is_refused_in_words_and_not_kept() {
    let r = running().await;
    let bytes: Vec<u8> = (0..CHUNK + 5).map(|i| (i % 251) as u8).collect();
    let size = bytes.len() as u64;
    let (first, second) = bytes.split_at(CHUNK);
    let refused = async |size, index, chunk: &[u8]| match put(&r, r.job.lease, &bytes, size, index, chunk).await {
        Put::Refused(why) => why,
        Put::Kept => panic!("{size} {index}"),
    };
    assert!(refused(size, 1, b"shorter").await.contains("has 5 bytes, not 7"));
    assert!(refused(size, 2, b"").await.contains("has 2 chunks"));
    assert!(refused(1 << 40, 0, first).await.contains("1 to"));
    assert_eq!(put(&r, r.job.lease, &bytes, size, 0, first).await, Put::Kept);
    assert!(refused(size + 1, 0, first).await.contains("is known with"));
    let why = refused(size, 1, b"wrong").await;
    assert!(why.contains(BlobHash::of(&bytes).as_str()) && why.contains("send it anew"), "{why}");
    assert_eq!(r.lab.store.count("select count(*) from blob_chunks").await, 0, "nothing of it is kept");
    assert_eq!(put(&r, r.job.lease, &bytes, size, 0, first).await, Put::Kept);
    assert_eq!(r.lab.store.blob_get(r.job.lease, &BlobHash::of(&bytes), 0).await.unwrap(), None, "not whole yet");
    assert_eq!(put(&r, r.job.lease, &bytes, size, 1, second).await, Put::Kept);
    assert_eq!(put(&r, r.job.lease, &bytes, size, 1, second).await, Put::Kept, "sent twice");
    let (_, stored) = r.lab.store.blob_get(r.job.lease, &BlobHash::of(&bytes), 1).await.unwrap().unwrap();
    assert_eq!(stored, second);
}

#[tokio::test]
async fn knowing_a_blobs_name_gives_no_right_to_read_it() {
    let r = running().await;
    let secret = b"the other task's prompt";
    assert_eq!(put(&r, r.task.lease, secret, secret.len() as u64, 0, secret).await, Put::Kept);
    r.lab.submit().await;
    let other = grant(&r.lab, r.runner).await.fence.lease;
    let guess = vec![b'x'; secret.len()];
    let refused = put(&r, other, secret, secret.len() as u64, 0, &guess).await;
    assert!(matches!(refused, Put::Refused(_)), "{refused:?}");
    assert_eq!(r.lab.store.blob_get(other, &BlobHash::of(secret), 0).await.unwrap(), None);
    assert_eq!(put(&r, other, secret, secret.len() as u64, 0, secret).await, Put::Kept, "who has it may name it");
    assert!(r.lab.store.blob_get(other, &BlobHash::of(secret), 0).await.unwrap().is_some());
}
