//! The model that `cfq up` takes by itself for a card: chosen from the card's memory, fetched from a hub over a line that
//! breaks, told to stop in the middle, and gone on with.

use cfq_inference_node::engine::candle::{curated_that_fit, lasting_room};
use cfq_inference_node::gpu;
use cfq_inference_node::models::{ModelError, Presence, Pull, State, Step, Store};
use cfq_proto::model::ModelSource;
use cfq_proto::node::{Device, DeviceKind};
use cfq_tests::hub::{Fault, HubServer};

#[tokio::test(flavor = "multi_thread")]
async fn what_suits_a_card_of_12_gb_comes_over_a_bad_line_and_in_as_many_starts_as_it_takes() {
    let mut card: Device = gpu::inventory().devices[0].clone();
    (card.kind, card.memory_total) = (DeviceKind::Cuda, 12 << 30);
    let entry = curated_that_fit(&[lasting_room(&card)], 4).find(|entry| entry.for_anybody).unwrap();
    assert_eq!(entry.smallest_card, 12);
    let model = entry.id().unwrap();
    let ModelSource::Hub { repo, revision: None, file } = model.source() else { panic!("{model}") };

    let (server, folder) = (HubServer::start().await, tempfile::tempdir().unwrap());
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    bytes.extend([0; 16]);
    bytes.extend((0..1_000_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8));
    server.commit(&repo, &[(&file, &bytes)]);
    let pull = |hub, stop_at: Option<(u64, cfq_link::stop::Stopper)>| {
        let store = Store { dir: folder.path().to_owned(), quota: None, bound: Vec::new(), hub };
        let model = model.clone();
        tokio::task::spawn_blocking(move || {
            let mut report = |step: Step| match (&stop_at, step) {
                (Some((at, stopper)), Step::Bytes { done, .. }) if done >= *at => stopper.stop(),
                _ => {}
            };
            let outcome = store.pull(&model, Pull::default(), &mut report).map(drop);
            (outcome, store.presence(&model).unwrap(), store.list().unwrap())
        })
    };

    // A start without a line worth the name.
    server.misbehave(&[Fault::CutAfter(300_000), Fault::CutAfter(0), Fault::CutAfter(0), Fault::CutAfter(0)]);
    let (outcome, presence, listed) = pull(server.hub(None), None).await.unwrap();
    let Err(ModelError::Hub { source, .. }) = outcome else { panic!("{outcome:?}") };
    assert!(source.to_string().contains("what was fetched is kept"), "{source}");
    assert_eq!(listed[0].state, State::Unfinished { have: 300_000 });
    assert!(matches!(presence, Presence::Missing { bytes: Some(_) }), "{presence:?}");

    // One that is told to stop.
    let (stopper, stop) = cfq_link::stop::pair();
    server.misbehave(&[Fault::HangAfter(300_000)]);
    let (outcome, _, listed) = pull(server.hub(None).until(stop), Some((600_000, stopper))).await.unwrap();
    let Err(ModelError::Hub { source, .. }) = outcome else { panic!("{outcome:?}") };
    assert!(source.to_string().starts_with("stopped"), "{source}");
    assert_eq!(listed[0].state, State::Unfinished { have: 600_000 });

    // And one that brings the rest.
    let (_stopper, stop) = cfq_link::stop::pair();
    let (outcome, presence, listed) = pull(server.hub(None).until(stop), None).await.unwrap();
    outcome.unwrap();
    assert_eq!((presence, &listed[0].state, &listed[0].model), (Presence::Here, &State::Ready, &model));
    assert_eq!(std::fs::read(&listed[0].path).unwrap(), bytes);
    assert_eq!(server.ranges().last().unwrap().as_deref(), Some("bytes=600000-"));
}
