use super::*;

/// After the clock was set back, the last heartbeat of a dead process lies in the future.
#[tokio::test]
async fn heartbeats_of_the_future_make_nothing_alive() {
    let r = running().await;
    let alive = async || {
        let status = r.env.store.cluster_status(3600.0, None).await.unwrap();
        let node = r.env.store.node_views().await.unwrap()[0].alive;
        (status.nodes_alive, status.runners_alive, node, r.env.store.task_queue().await.unwrap().free_slots > 0)
    };
    let before = alive().await;
    assert_eq!((before.0, before.1, before.2), (1, 1, true));
    for table in ["nodes", "runners"] {
        r.env.store.raw(&format!("update {table} set last_seen = now() + interval '1 hour'")).await;
    }
    assert_eq!(alive().await, (0, 0, false, false));
}
