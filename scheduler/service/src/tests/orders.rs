//! Tests of how work orders reach a node: pushed by JetStream, without acknowledgement.

use async_nats::jetstream::{self, stream::RetentionPolicy};

use super::*;

impl TestCluster {
    /// Has a task's first job placed on the node.
    async fn place_job(&self) -> JobId {
        self.client.submit(&spec(), None).await.unwrap();
        let fence = self.take_task().await;
        self.submit_job(fence).await.id
    }

    async fn wait_until_placed(&self, job: JobId) {
        let placed = format!("select count(*) from jobs where id = '{job}' and state = 'placed'");
        in_time(async {
            while self.env.store.count(&placed).await == 0 {
                self.node_heartbeat(vec![]).await;
            }
        })
        .await;
    }

    async fn jetstream(&self) -> jetstream::Context {
        let scheduler = Session::connect(&self.config.nats, Identity::Scheduler, &self.config.timing).await.unwrap();
        jetstream::new(scheduler.client().clone())
    }
}

/// The accept timeout is longer than the test, so that the scheduler publishes the order only once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn order_for_a_disconnected_node_is_delivered_when_it_returns() {
    let mut cluster = TestCluster::start().await;
    cluster.stop().await;
    cluster.config.timing.accept_timeout_ms = 600_000;
    cluster.service = Some(serve(&cluster.config));
    ready(&cluster.client).await;
    let jetstream = cluster.jetstream().await;
    // The node is not subscribed, as if its connection to NATS were lost.
    let elsewhere = subscribe_to_orders(&cluster.node, BootId::fresh()).await;
    drop(std::mem::replace(&mut *cluster.orders.lock().await, elsewhere));
    let job = cluster.place_job().await;
    cluster.wait_until_placed(job).await;
    in_time(async {
        while jetstream.get_stream(subject::WORK_STREAM).await.unwrap().cached_info().state.messages == 0 {}
    })
    .await;
    *cluster.orders.lock().await = subscribe_to_orders(&cluster.node, cluster.node_boot).await;
    let order = cluster.receive_order().await;
    assert_eq!((order.fence.job, order.fence.attempt), (job, 1));
    assert_eq!(cluster.accept(&order).await, FenceReply::Committed);
    in_time(async {
        // A delivered order is removed from the stream, so that it is not delivered again.
        while jetstream.get_stream(subject::WORK_STREAM).await.unwrap().cached_info().state.messages > 0 {}
    })
    .await;
    cluster.stop().await;
}

/// A node that is connected, but takes no orders, or whose key was stolen, must not stop the orders of the others. The
/// limit is also set on the stream of an earlier build.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_that_takes_no_orders_leaves_room_for_the_orders_of_others() {
    let mut cluster = TestCluster::start().await;
    cluster.stop().await;
    let jetstream = cluster.jetstream().await;
    let mut earlier = jetstream.get_stream(subject::WORK_STREAM).await.unwrap().cached_info().config.clone();
    (earlier.max_messages_per_subject, earlier.discard_new_per_subject) = (-1, false);
    jetstream.update_stream(earlier).await.unwrap();
    cluster.service = Some(serve(&cluster.config));
    ready(&cluster.client).await;
    let elsewhere = subscribe_to_orders(&cluster.node, BootId::fresh()).await;
    drop(std::mem::replace(&mut *cluster.orders.lock().await, elsewhere));
    let full = subject::work(&node(), cluster.node_boot);
    in_time(async { while jetstream.publish(full.clone(), "x".into()).await.unwrap().await.is_ok() {} }).await;
    let (other, boot) = ("n2".parse().unwrap(), BootId::fresh());
    let consumer = jetstream::consumer::push::Config {
        durable_name: Some(subject::consumer(&other, boot)),
        deliver_subject: subject::order(&other, boot),
        filter_subject: subject::work(&other, boot),
        ..Default::default()
    };
    jetstream.create_consumer_on_stream(consumer, subject::WORK_STREAM).await.unwrap();
    jetstream.publish(subject::work(&other, boot), "x".into()).await.unwrap().await.unwrap();
    cluster.stop().await;
}

/// The stream stores no order without a consumer, and reports no error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_consumer_is_created_before_the_order_is_published_again() {
    let mut cluster = TestCluster::start().await;
    let consumer = subject::consumer(&node(), cluster.node_boot);
    cluster.jetstream().await.delete_consumer_from_stream(&consumer, subject::WORK_STREAM).await.unwrap();
    let job = cluster.place_job().await;
    let order = cluster.receive_order().await;
    assert_eq!((order.fence.job, order.fence.attempt), (job, 1), "the first attempt reached the node");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deleted_stream_is_recreated_with_its_consumers() {
    let mut cluster = TestCluster::start().await;
    cluster.jetstream().await.delete_stream(subject::WORK_STREAM).await.unwrap();
    let job = cluster.place_job().await;
    assert_eq!(cluster.receive_order().await.fence.job, job);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn next_boot_of_a_node_gets_its_orders_and_replaces_the_consumer() {
    let mut cluster = TestCluster::start().await;
    cluster.node_boot = BootId::fresh();
    *cluster.orders.lock().await = subscribe_to_orders(&cluster.node, cluster.node_boot).await;
    cluster.register().await;
    let job = cluster.place_job().await;
    assert_eq!(cluster.receive_order().await.fence.job, job);
    let stream = cluster.jetstream().await.get_stream(subject::WORK_STREAM).await.unwrap();
    let consumers: Vec<String> = stream.consumer_names().map(Result::unwrap).collect().await;
    assert_eq!(consumers, [subject::consumer(&node(), cluster.node_boot)]);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn work_stream_of_an_earlier_build_is_replaced() {
    let mut cluster = TestCluster::start().await;
    cluster.stop().await;
    let jetstream = cluster.jetstream().await;
    jetstream.delete_stream(subject::WORK_STREAM).await.unwrap();
    let former = jetstream::stream::Config {
        name: subject::WORK_STREAM.to_owned(),
        subjects: vec![subject::WORK_ALL.to_owned()],
        retention: RetentionPolicy::WorkQueue,
        ..Default::default()
    };
    let former = jetstream.create_stream(former).await.unwrap();
    let puller = jetstream::consumer::pull::Config {
        durable_name: Some("den".to_owned()),
        filter_subject: subject::work(&node(), cluster.node_boot),
        ..Default::default()
    };
    former.create_consumer(puller).await.unwrap();
    cluster.service = Some(serve(&cluster.config));
    ready(&cluster.client).await;
    let job = cluster.place_job().await;
    assert_eq!(cluster.receive_order().await.fence.job, job);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_of_an_earlier_build_is_refused_with_a_reason() {
    let mut cluster = TestCluster::start().await;
    let mut registration = serde_json::to_value(node_registration(cluster.node_boot)).unwrap();
    registration.as_object_mut().unwrap().remove("receives_pushed_orders").unwrap();
    let reply: RegisterReply = request_reply(&cluster.node, subject::node(&node(), "register"), registration).await;
    let RegisterReply::Refused { reason, .. } = reply else { panic!("{reply:?}") };
    assert!(reason.contains("older than the scheduler"), "{reason}");
    cluster.stop().await;
}
