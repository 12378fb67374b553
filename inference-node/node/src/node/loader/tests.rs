//! The loader step by step, with cards that are candle's CPU device: what it lets go for what, and what it calls passing.

use std::path::{Path, PathBuf};

use candle_core::Device;
use cfq_proto::messages::ModelReply;

use super::*;
use crate::engine::candle::{LoadError, need, need_on_cards};
use crate::models::Took;

const CUDA_0: usize = 0;

fn file(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models").join(family)
}

fn id(family: &str) -> ModelId {
    format!("path:{}", file(family).display()).parse().unwrap()
}

fn card(free: u64) -> Card {
    Card { index: CUDA_0, name: "a card".to_owned(), uuid: None, device: Device::Cpu, free, speed: 1.0, correction: 0 }
}

fn limits(memory: u64) -> Limits {
    Limits { memory, max_sequences: 4 }
}

fn whole_on_host(family: &str) -> u64 {
    need(&file(family), limits(u64::MAX)).unwrap().total()
}

fn on_card(family: &str) -> u64 {
    need_on_cards(&file(family), &[card(u64::MAX)], limits(0)).unwrap().total()
}

/// Bytes of the smallest card that takes it, with the smallest pool.
fn least_on_card(family: &str) -> u64 {
    let (mut low, mut high) = (0, on_card(family));
    while low < high {
        let middle = low + (high - low) / 2;
        match need_on_cards(&file(family), &[card(middle)], limits(0)) {
            Ok(_) => high = middle,
            Err(_) => low = middle + 1,
        }
    }
    high
}

struct Rig {
    loader: Loader,
    fleet: Arc<Fleet>,
    _folder: tempfile::TempDir,
}

/// Bytes of the host's memory for models, and of a card where there is one.
fn rig(host: u64, card_has: Option<u64>, accept_ms: u64) -> Rig {
    let folder = tempfile::tempdir().unwrap();
    let mut config: Config = serde_json::from_value(serde_json::json!({
        "node": "den", "nats": { "url": "nats://127.0.0.1:1" }, "model_dir": folder.path(), "models": [],
        "memory_limit": host, "parked_kv": 0, "parked_weights": 0, "max_sequences": 4,
        "hub": { "endpoint": "http://127.0.0.1:1" },
    }))
    .unwrap();
    config.timing.accept_ms = accept_ms;
    let (fleet, wished, _) = Fleet::new(&config, Arc::default());
    let mut loader = Loader::new(&fleet, &config, wished);
    loader.cards = Ok(card_has.map(card).into_iter().collect());
    Rig { loader, fleet, _folder: folder }
}

impl Rig {
    /// Asks for it as a job does, and does what the loader's thread would.
    fn wants(&mut self, family: &str) -> ModelState {
        self.asks(&id(family));
        self.state(family)
    }

    fn asks(&mut self, model: &ModelId) {
        assert!(matches!(self.fleet.load(model, || Ok(())), ModelReply::Loading { .. }));
        while let Ok(Wish::Load(model)) = self.loader.wished.try_recv() {
            self.loader.waiting.push_back(model);
        }
        self.loader.serve_waiting();
    }

    /// Loads it with so many bytes of the host's memory, or with what it wants of a card.
    fn loads(&mut self, model: &ModelId, memory: u64) {
        self.fleet.set(model, Standing::Loading);
        let outcome = self.loader.load(model, memory, 1);
        self.loader.settle(model, outcome);
        assert!(matches!(self.fleet.standing(model), Some(Standing::Ready(_))), "{:?}", self.fleet.ledger());
    }

    /// A fixture as if it had been fetched: who brings a file of his own cannot pin it.
    fn installed(&self, family: &str) -> ModelId {
        let model: ModelId = format!("hf:den/{family}:model.gguf").parse().unwrap();
        let (store, models) = (self.loader.config.store(), &self.loader.config.model_dir);
        // The record's name is the lock's.
        assert!(store.hold(&model).unwrap().is_none());
        let folder = models.join("hf/den").join(family);
        let lock = std::fs::read_dir(&folder).unwrap().flatten().map(|e| e.path()).next().unwrap();
        let path = format!("hf/den/{family}/model.gguf");
        let bytes = std::fs::copy(file(family).join("model.gguf"), models.join(&path)).unwrap();
        let record = serde_json::json!({
            "format": 1, "model": model, "pinned": false, "fetched_at": 1, "used_at": 1,
            "files": [{ "path": path, "bytes": bytes }],
        });
        std::fs::write(lock.with_extension("json"), record.to_string()).unwrap();
        model
    }

    fn pins(&self, model: &ModelId, pinned: bool) {
        assert_eq!(self.loader.config.store().pin(model, pinned).unwrap().pinned, pinned);
    }

    fn state(&self, family: &str) -> ModelState {
        self.fleet.ledger().models.into_iter().find(|state| state.model == id(family)).unwrap()
    }

    /// Somebody used it, so that it is not fresh any more.
    fn uses(&self, family: &str) {
        self.fleet.use_now(&id(family));
    }
}

#[test]
fn what_fits_only_a_card_is_loaded_there_when_it_is_wanted() {
    let mut rig = rig(1 << 20, Some(on_card("llama")), 0);
    let state = rig.wants("llama");
    assert_eq!((state.residency, state.device.as_str()), (Residency::Resident, "cuda:0"));
    assert_eq!(rig.loader.free(), 1 << 20, "nothing of the host's is taken");
    let left = rig.loader.cards_now(&[card(on_card("llama"))]);
    assert_eq!(left[0].free, 0, "all of the card is promised");
    let measured = rig.loader.config.store().measured(&id("llama")).unwrap();
    assert!(measured.is_some_and(|notes| notes.unended() == 0), "the load was noted and struck out");
}

#[test]
fn idle_models_make_room_for_each_other_on_a_card() {
    let room = on_card("llama").max(on_card("qwen2"));
    let mut rig = rig(1 << 20, Some(room), 0);
    assert_eq!(rig.wants("llama").residency, Residency::Resident);
    rig.uses("llama");
    let second = rig.wants("qwen2");
    assert_eq!((second.residency, second.device.as_str()), (Residency::Resident, "cuda:0"));
    assert_eq!(rig.state("llama").residency, Residency::Available, "on disk");
    // One that was loaded a moment ago and has not served stays, and who wants its room waits.
    rig.loader.config.timing.accept_ms = 600_000;
    assert_eq!(rig.wants("llama").residency, Residency::Loading);
    assert_eq!(rig.state("qwen2").residency, Residency::Resident);
}

fn least_on_host(family: &str) -> u64 {
    match need(&file(family), limits(0)) {
        Err(LoadError::DoesNotFit { source, .. }) => source.need.total(),
        other => panic!("{other:?}"),
    }
}

/// One is pinned and one is idle, and what is wanted fits only without the pinned one, by a byte.
fn nobody_goes_beside_a_pinned_one(mut rig: Rig, [idle, large]: [&str; 2], memory: [u64; 2]) {
    let pinned = rig.installed("llama");
    rig.pins(&pinned, true);
    rig.loads(&pinned, memory[0]);
    rig.loads(&id(idle), memory[1]);
    // Every try is like the first.
    for _ in 0..2 {
        let Residency::Unusable { reason } = rig.wants(large).residency else { panic!("{:?}", rig.state(large)) };
        assert!(reason.contains("It is tried again"), "{reason}");
        assert_eq!(rig.state(idle).residency, Residency::Resident, "it would have gone for nothing");
        assert!(matches!(rig.fleet.standing(&pinned), Some(Standing::Ready(_))));
    }
    rig.pins(&pinned, false);
    assert_eq!(rig.wants(large).residency, Residency::Resident);
}

#[test]
fn nobody_goes_for_what_a_pinned_model_leaves_no_room_for() {
    let mut families = ["qwen2", "gemma3"];
    families.sort_by_key(|family| least_on_host(family));
    let [idle, large] = families.map(least_on_host);
    let Err(LoadError::DoesNotFit { source, .. }) = need(&file("llama").join("model.gguf"), limits(0)) else {
        panic!()
    };
    let pinned = source.need.total();
    assert!(idle < large, "{idle} {large}");
    nobody_goes_beside_a_pinned_one(rig(pinned + large - 1, None, 0), families, [pinned, idle]);

    let mut families = ["qwen2", "gemma3"];
    families.sort_by_key(|family| least_on_card(family));
    let [idle, large] = families.map(least_on_card);
    let pinned = need_on_cards(&file("llama").join("model.gguf"), &[card(u64::MAX)], limits(0)).unwrap().total();
    assert!(idle < large, "{idle} {large}");
    nobody_goes_beside_a_pinned_one(rig(1 << 20, Some(pinned + large - 1), 0), families, [0, 0]);
}

/// Nobody who is here waits for a download; its turn brings it.
#[test]
fn what_is_not_installed_is_not_fetched_before_its_turn() {
    let mut rig = rig(1 << 40, None, 0);
    let (absent, here): (ModelId, _) = ("hf:den/absent:model.gguf".parse().unwrap(), id("llama"));
    rig.loader.waiting = [here.clone(), absent.clone(), here.clone()].into();
    assert!(matches!(rig.loader.room_behind(1, &absent), Room::Coming));
    assert!(matches!(rig.loader.room_behind(2, &here), Room::Coming));
    rig.loader.waiting.remove(1);
    assert!(matches!(rig.loader.room_behind(1, &here), Room::Made(_)));
    // What was looked up is kept for as long as it waits.
    assert_eq!(rig.loader.least, [(here, least_on_host("llama"))].into());
    rig.loader.waiting.clear();
    rig.loader.serve_waiting();
    assert_eq!(rig.loader.least, [].into());
}

/// The first in line waits for a model that was loaded a moment ago, and what it will take is kept for it.
#[test]
fn what_fits_beside_goes_on_while_the_first_in_line_waits_for_room() {
    let mut families = ["llama", "qwen2", "gemma3"];
    families.sort_by_key(|family| least_on_host(family));
    let [small, fresh, large] = families;
    let total = whole_on_host(fresh) + least_on_host(large) - 1;
    // All that there is, or as little as it can do with.
    for (wanted, fits) in [(total, false), (0, true)] {
        let mut rig = rig(total, None, 600_000);
        assert_eq!(rig.wants(fresh).residency, Residency::Resident);
        rig.loader.needed.insert(id(large), wanted);
        assert_eq!(rig.wants(large).residency, Residency::Loading);
        assert_eq!(rig.wants(small).residency == Residency::Resident, fits, "{:?}", rig.state(small));
        assert_eq!(rig.state(fresh).residency, Residency::Resident, "nobody goes for it");
        assert_eq!(rig.loader.waiting.front(), Some(&id(large)));
    }
}

/// The one on the card was used least lately, and letting it go would free nothing of the host's memory.
#[test]
fn for_the_hosts_memory_only_what_has_some_goes() {
    let mut families = ["llama", "qwen2", "gemma3"];
    families.sort_by_key(|family| least_on_card(family));
    let [small, middle, large] = families;
    let host = whole_on_host(middle).max(whole_on_host(large));
    let mut rig = rig(host, Some(least_on_card(small)), 0);
    assert_eq!(rig.wants(small).device, "cuda:0");
    rig.uses(small);
    assert_eq!(rig.wants(middle).device, "cpu", "it would not fit the card even alone");
    rig.uses(middle);
    let third = rig.wants(large);
    assert_eq!((third.residency, third.device.as_str()), (Residency::Resident, "cpu"));
    assert_eq!(rig.state(small).residency, Residency::Resident);
    assert_eq!(rig.state(middle).residency, Residency::Available);
}

#[test]
fn what_can_never_fit_is_unusable_and_what_has_no_room_now_is_offered_again() {
    let mut rig = rig(1 << 20, None, 10);
    let Residency::Unusable { reason } = rig.wants("llama").residency else { panic!("it fits nowhere") };
    assert!(reason.contains("does not fit") && !reason.contains("tried again"), "{reason}");
    assert_eq!(rig.loader.later.next(), None);

    // A card's memory that is lacking now is no reason for ever: here the driver's count says so.
    let state = on_disk(&id("qwen2"), "cpu", &need(&file("qwen2"), limits(u64::MAX)).unwrap(), 4);
    rig.loader
        .settle(&id("qwen2"), Err(Failed::NoRoomNow { state: Box::new(state.clone()), reason: "full".to_owned() }));
    let Residency::Unusable { reason } = rig.state("qwen2").residency else { panic!("it waits") };
    assert!(reason.contains("full. It is tried again"), "{reason}");
    let due = rig.loader.later.next().unwrap();
    rig.loader.offer_again(due - Duration::from_millis(1));
    assert!(matches!(rig.state("qwen2").residency, Residency::Unusable { .. }));
    rig.loader.offer_again(due);
    assert_eq!(rig.state("qwen2"), state);
}

/// candle's CPU device counts nothing, so what an earlier load took is written down here as a driver's count would be.
#[test]
fn what_loads_took_on_a_card_raises_the_next_sum_there() {
    let plain = on_card("llama");
    let mut rig = rig(1 << 40, Some(u64::MAX), 0);
    assert_eq!(rig.wants("llama").need_bytes, plain);
    let weights = rig.loader.loaded[&id("llama")].engine.shares()[0].weights;
    let took = Took { predicted: weights, took: weights + weights / 4 };
    rig.loader.config.store().load_ends(&id("llama"), &[("cuda:0".to_owned(), took)]).unwrap();
    rig.loader.dismiss(&id("llama"));
    rig.loader.see_off();
    let raised = rig.wants("llama").need_bytes;
    assert!(raised > plain && raised - plain <= weights / 4, "{raised} after {plain}");
    // On another card it counts for nothing.
    let mut on = |index, uuid: Option<&str>| {
        rig.loader.dismiss(&id("llama"));
        rig.loader.see_off();
        rig.loader.cards = Ok(vec![Card { index, uuid: uuid.map(str::to_owned), ..card(u64::MAX) }]);
        (rig.wants("llama").need_bytes, rig.state("llama").device)
    };
    assert_eq!(on(1, None), (plain, "cuda:1".to_owned()));
    // Nor on one with a UUID in the slot it was kept for, as it was kept before there were UUIDs.
    assert_eq!(on(0, Some("GPU-a")), (plain, "cuda:0".to_owned()));
}

#[test]
fn what_loads_took_follows_a_card_to_another_slot_and_no_other_card_into_its_own() {
    let plain = on_card("llama");
    let mut rig = rig(1 << 40, Some(u64::MAX), 0);
    rig.wants("llama");
    let weights = rig.loader.loaded[&id("llama")].engine.shares()[0].weights;
    let took = Took { predicted: weights, took: weights + weights / 4 };
    let with = |index, uuid: &str| Card { index, uuid: Some(uuid.to_owned()), ..card(u64::MAX) };
    rig.loader.config.store().load_ends(&id("llama"), &[(with(0, "GPU-a").kept_as(), took)]).unwrap();

    let mut on = |index, uuid: &str| {
        rig.loader.dismiss(&id("llama"));
        rig.loader.see_off();
        rig.loader.cards = Ok(vec![with(index, uuid)]);
        rig.wants("llama").need_bytes
    };
    let raised = on(0, "GPU-a");
    assert!(raised > plain && raised - plain <= weights / 4, "{raised} after {plain}");
    assert_eq!([on(0, "GPU-b"), on(1, "GPU-b"), on(1, "GPU-a")], [plain, plain, raised]);
}

/// The kernel still calls memory available that a pool will fill and that parked keys and values will take.
#[test]
fn what_is_promised_and_not_yet_touched_is_not_had_twice() {
    let mut rig = rig(1 << 40, None, 0);
    rig.loader.arena = Arena::new(64 << 20, crate::engine::candle::ParkedAs::F16);
    assert_eq!(rig.loader.to_come(), 64 << 20);
    rig.wants("llama");
    let engine = &rig.loader.loaded[&id("llama")].engine;
    let (need, to_come) = (*engine.need(), engine.to_come());
    assert!(to_come >= need.reserve + need.scratch, "{to_come} of {need}");
    assert!(to_come + engine.weights() <= need.total(), "{to_come} of {need}");
    assert_eq!(rig.loader.to_come(), to_come + (64 << 20));
    let promised = rig.loader.to_come();
    assert_eq!([promised - 1, promised, promised + 1000].map(|a| rig.loader.have_of(a)), [0, 0, 1000]);
    // With it gone there is what it holds as well, whatever the machine has beside it.
    assert_eq!([promised, promised + 1000].map(|a| rig.loader.most_of(a)), [need.total(), need.total() + 1000]);
    // The ledger tells it in whole steps, up to what is promised to nobody.
    let step = 64 << 20;
    let told = [0, promised + step - 1, promised + 3 * step + 1, u64::MAX].map(|a| rig.loader.told_of(a));
    assert_eq!(told, [0, 0, 3 * step, rig.loader.free() / step * step]);
}

#[test]
fn a_model_of_no_configuration_that_proved_unusable_is_forgotten() {
    let mut rig = rig(1 << 20, None, 10);
    rig.wants("llama");
    assert!(matches!(rig.fleet.unload(&id("llama")), ModelReply::Unloaded));
    assert!(rig.fleet.ledger().models.is_empty());
}

#[test]
fn the_loader_ends_with_its_node_and_lets_its_models_go() {
    let Rig { loader, fleet, _folder } = rig(1 << 40, None, 10);
    let watched = Arc::downgrade(&fleet);
    let thread = std::thread::spawn(move || loader.run());
    fleet.close();
    thread.join().unwrap();
    assert!(matches!(fleet.load(&id("llama"), || Ok(())), ModelReply::Refused { .. }));
    drop(fleet);
    assert!(watched.upgrade().is_none(), "nobody holds it any more");
}

#[test]
fn for_another_program_the_card_is_left_nothing_is_loaded_and_then_all_is_as_before() {
    let mut rig = rig(1 << 40, Some(on_card("llama") * 2), 60_000);
    assert_eq!(rig.wants("llama").device, "cuda:0");
    let taken = |whom: &[&str]| whom.iter().map(|card| ((*card).to_owned(), "game".to_owned())).collect();
    rig.fleet.make_way_for(taken(&["cuda:0"]));
    assert_eq!(rig.fleet.in_the_way(), [id("llama")]);
    rig.fleet.unload(&id("llama"));
    assert_eq!(rig.loader.wished.try_recv(), Ok(Wish::Unload(id("llama"))));
    rig.loader.dismiss(&id("llama"));
    assert!(rig.loader.see_off());
    assert_eq!(rig.state("llama").residency, Residency::Available);
    // Asked for a moment before, and configured.
    rig.loader.waiting.push_back(id("llama"));
    rig.fleet.set(&id("qwen2"), Standing::Loading);
    rig.loader.load_files();
    rig.loader.serve_waiting();
    assert_eq!(rig.state("llama").residency, Residency::Available);
    assert_eq!(rig.state("qwen2").residency, Residency::Loading);
    assert_eq!(rig.loader.waiting, [id("llama"), id("qwen2")]);

    rig.fleet.make_way_for(taken(&[]));
    rig.loader.waiting.clear();
    rig.fleet.take_back([id("llama")].into());
    assert_eq!(rig.loader.wished.try_recv(), Ok(Wish::LoadFiles));
    rig.loader.load_files();
    for family in ["llama", "qwen2"] {
        let state = rig.state(family);
        assert_eq!((state.residency, state.device.as_str()), (Residency::Resident, "cuda:0"), "{family}");
    }
}
