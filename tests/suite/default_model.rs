//! Tests the default model of `cfq up` for a GPU. The model is chosen according to the GPU's memory and downloaded from
//! a hub; connections break, the download is stopped in the middle, and the next start resumes it.

use cfq_inference_node::gpu;
use cfq_inference_node::models::{InstallState, ModelError, ModelStore, Presence, PullOptions, PullProgress};
use cfq_inference_node::models::{fitting_models, nominal_capacity};
use cfq_proto::model::ModelSource;
use cfq_proto::node::{Device, DeviceKind};
use cfq_tests::hub::{Fault, HubServer};

#[tokio::test(flavor = "multi_thread")]
async fn default_model_for_a_12_gb_gpu_downloads_over_failing_connections() {
    let mut gpu_device: Device = gpu::inventory().devices[0].clone();
    (gpu_device.kind, gpu_device.memory_total) = (DeviceKind::Cuda, 12 << 30);
    let entry = fitting_models(&[nominal_capacity(&gpu_device)], 4).find(|entry| entry.unrestricted_licence).unwrap();
    assert_eq!(entry.min_gpu_gib, 12);
    let model = entry.id().unwrap();
    let ModelSource::Hub { repo, revision: None, file } = model.source() else { panic!("{model}") };

    let (server, folder) = (HubServer::start().await, tempfile::tempdir().unwrap());
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    bytes.extend([0; 16]);
    bytes.extend((0..1_000_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8));
    server.commit(&repo, &[(&file, &bytes)]);
    let pull = |hub, stop_at: Option<(u64, cfq_link::stop::Stopper)>| {
        let store = ModelStore { dir: folder.path().to_owned(), quota: None, bound: Vec::new(), hub };
        let model = model.clone();
        tokio::task::spawn_blocking(move || {
            let mut report = |step: PullProgress| match (&stop_at, step) {
                (Some((at, stopper)), PullProgress::Transferred { done, .. }) if done >= *at => stopper.stop(),
                _ => {}
            };
            let outcome = store.pull(&model, PullOptions::default(), &mut report).map(drop);
            (outcome, store.presence(&model).unwrap(), store.list().unwrap())
        })
    };

    // First start: all connections break.
    server.inject_faults(&[Fault::CutAfter(300_000), Fault::CutAfter(0), Fault::CutAfter(0), Fault::CutAfter(0)]);
    let (outcome, presence, listed) = pull(server.hub(None), None).await.unwrap();
    let Err(ModelError::HubFetch { source, .. }) = outcome else { panic!("{outcome:?}") };
    assert!(source.to_string().contains("the partial download is kept"), "{source}");
    assert_eq!(listed[0].state, InstallState::Unfinished { fetched_bytes: 300_000 });
    assert!(matches!(presence, Presence::Missing { bytes: Some(_) }), "{presence:?}");

    // Second start: it is stopped in the middle of the download.
    let (stopper, stop) = cfq_link::stop::channel();
    server.inject_faults(&[Fault::HangAfter(300_000)]);
    let (outcome, _, listed) = pull(server.hub(None).with_stop(stop), Some((600_000, stopper))).await.unwrap();
    let Err(ModelError::HubFetch { source, .. }) = outcome else { panic!("{outcome:?}") };
    assert!(source.to_string().starts_with("stopped"), "{source}");
    assert_eq!(listed[0].state, InstallState::Unfinished { fetched_bytes: 600_000 });

    // Third start: it downloads the rest.
    let (_stopper, stop) = cfq_link::stop::channel();
    let (outcome, presence, listed) = pull(server.hub(None).with_stop(stop), None).await.unwrap();
    outcome.unwrap();
    assert_eq!((presence, &listed[0].state, &listed[0].model), (Presence::Present, &InstallState::Complete, &model));
    assert_eq!(std::fs::read(&listed[0].path).unwrap(), bytes);
    assert_eq!(server.ranges().last().unwrap().as_deref(), Some("bytes=600000-"));
}
