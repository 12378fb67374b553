//! Tests of models on GPUs, with candle's CPU device in place of GPUs.

use cfq_proto::node::Residency;

use super::*;
use crate::models::MeasuredLoad;
use crate::node::loader::load::measurement_key;
use crate::node::model_registry::yielding::GpuClaim;

#[test]
fn model_that_fits_only_a_gpu_is_loaded_there() {
    let gpu_bytes = largest_on_gpu(&file("llama"));
    let mut test = loader(1 << 20, Some(gpu_bytes), 0);
    let state = test.request("llama");
    assert_eq!((state.residency, state.device.as_str()), (Residency::Resident, "cuda:0"));
    assert_eq!(test.loader.state.unreserved_bytes(), 1 << 20, "no host memory is taken");
    assert_eq!(test.loader.state.gpu_free_now(), [0], "the whole GPU is reserved");
    let measured = test.loader.store.load_measurements(&id("llama")).unwrap();
    assert!(measured.is_some_and(|measured| measured.interrupted_loads() == 0), "the record of the load was removed");
}

#[test]
fn idle_models_evict_each_other_on_a_gpu() {
    let gpu_bytes = largest_on_gpu(&file("llama")).max(largest_on_gpu(&file("qwen2")));
    let mut test = loader(1 << 20, Some(gpu_bytes), 0);
    assert_eq!(test.request("llama").residency, Residency::Resident);
    test.use_model("llama");
    let second = test.request("qwen2");
    assert_eq!((second.residency, second.device.as_str()), (Residency::Resident, "cuda:0"));
    assert_eq!(test.state("llama").residency, Residency::Available, "on disk");
    // A model in its grace period is not evicted, and the next model waits.
    test.loader.state.config.load_grace_period = Duration::from_secs(1200);
    assert_eq!(test.request("llama").residency, Residency::Loading);
    assert_eq!(test.state("qwen2").residency, Residency::Resident);
}

/// The model on the GPU is the least recently used one, and its eviction would free no host memory.
#[test]
fn model_on_a_gpu_is_not_evicted_for_host_memory() {
    let [small, middle, large] = families_by(smallest_on_gpu);
    let host = largest_on_host(middle).max(largest_on_host(large));
    let mut test = loader(host, Some(smallest_on_gpu(small)), 0);
    assert_eq!(test.request(small).device, "cuda:0");
    test.use_model(small);
    assert_eq!(test.request(middle).device, "cpu", "it would not fit the GPU even alone");
    test.use_model(middle);
    let third = test.request(large);
    assert_eq!((third.residency, third.device.as_str()), (Residency::Resident, "cpu"));
    assert_eq!(test.state(small).residency, Residency::Resident);
    assert_eq!(test.state(middle).residency, Residency::Available);
}

/// candle's CPU device does not report memory, so the test writes the measurement of an earlier load itself.
#[test]
fn measured_overhead_on_a_gpu_raises_the_next_estimate_there() {
    let plain = largest_on_gpu(&file("llama"));
    let mut test = loader(1 << 40, Some(u64::MAX), 0);
    assert_eq!(test.request("llama").need_bytes, plain);
    let weights = test.engine("llama").gpu_allocations()[0].weight_bytes;
    let took = MeasuredLoad { predicted: weights, measured: weights + weights / 4 };
    test.loader.store.record_load_end(&id("llama"), &[("cuda:0".to_owned(), took)]).unwrap();
    let (raised, _) = test.reloaded_on("llama", 0, None);
    assert!(raised > plain && raised - plain <= weights / 4, "{raised} after {plain}");
    // The measured overhead does not apply to another GPU,
    assert_eq!(test.reloaded_on("llama", 1, None), (plain, "cuda:1".to_owned()));
    // nor on one with a UUID in the same slot.
    assert_eq!(test.reloaded_on("llama", 0, Some("GPU-a")), (plain, "cuda:0".to_owned()));
}

#[test]
fn measured_overhead_follows_a_gpu_to_another_slot() {
    let plain = largest_on_gpu(&file("llama"));
    let mut test = loader(1 << 40, Some(u64::MAX), 0);
    test.request("llama");
    let weights = test.engine("llama").gpu_allocations()[0].weight_bytes;
    let took = MeasuredLoad { predicted: weights, measured: weights + weights / 4 };
    let key = measurement_key(&Gpu { uuid: Some("GPU-a".to_owned()), ..gpu_with(u64::MAX) });
    test.loader.store.record_load_end(&id("llama"), &[(key, took)]).unwrap();
    let mut on = |index, uuid| test.reloaded_on("llama", index, Some(uuid)).0;
    let raised = on(0, "GPU-a");
    assert!(raised > plain && raised - plain <= weights / 4, "{raised} after {plain}");
    assert_eq!([on(0, "GPU-b"), on(1, "GPU-b"), on(1, "GPU-a")], [plain, plain, raised]);
}

#[test]
fn models_are_unloaded_for_another_program_and_loaded_together_afterwards() {
    let mut test = loader(1 << 40, Some(largest_on_gpu(&file("llama")) * 2), 60_000);
    assert_eq!(test.request("llama").device, "cuda:0");
    let claim = |gpu: &str| (gpu.to_owned(), GpuClaim { program: "game".to_owned(), gpu: gpu.to_owned() });
    let claims = |gpus: &[&str]| gpus.iter().map(|gpu| claim(gpu)).collect();
    test.registry.set_gpu_claims(claims(&["cuda:0"]));
    assert_eq!(test.registry.models_on_claimed_gpus(), [id("llama")]);
    test.registry.unload(&id("llama"));
    assert_eq!(test.loader.commands.try_recv(), Ok(LoaderCommand::Unload(id("llama"))));
    test.unload("llama");
    assert_eq!(test.state("llama").residency, Residency::Available);
    // One model was requested just before the yield, the other is configured.
    test.loader.state.waiting.push_back(id("llama"));
    test.registry.set_status(&id("qwen2"), ModelStatus::Loading);
    test.loader.load_pending();
    assert_eq!(test.state("llama").residency, Residency::Available);
    assert_eq!(test.state("qwen2").residency, Residency::Loading);
    assert_eq!(test.loader.state.waiting, [id("llama"), id("qwen2")]);

    test.registry.set_gpu_claims(claims(&[]));
    test.loader.state.waiting.clear();
    test.registry.reclaim(&[id("llama")].into());
    assert_eq!(test.loader.commands.try_recv(), Ok(LoaderCommand::LoadPending));
    test.loader.load_pending();
    for family in ["llama", "qwen2"] {
        let state = test.state(family);
        assert_eq!((state.residency, state.device.as_str()), (Residency::Resident, "cuda:0"), "{family}");
    }
}
