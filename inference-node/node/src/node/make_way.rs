//! Somebody else's program has a good part of a card: the machine's owner plays, renders or trains. What this node computes
//! would slow that down, or find no memory, so it makes way until the program is gone.
//!
//! What runs is handed back, with what it has written in the journal, and goes on where there is a node for it, here again
//! later. A model on such a card is unloaded; one on another card goes on serving; one on the CPU stays in memory and takes
//! no work, and nothing new is loaded: who plays wants the processor too. Endpoints elsewhere are none of that.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use cfq_proto::model::ModelId;
use cfq_proto::node::{Device, DeviceKind, DeviceProcess};
use tokio::sync::watch;
use tokio::time::Instant;

use super::Shared;
use super::fleet::Fleet;
use crate::config::Config;
use crate::engine::candle::DeviceChoice;
use crate::gpu;

/// By the card's id: who has it, in words.
pub type Taken = BTreeMap<String, String>;

/// A program of this name is this node, or another that shares the card by its own ledger.
const OWN: &str = "cfq";

/// More than most desktops and browsers draw with, less than a game, a renderer or a training takes.
const AT: u64 = 1_500_000_000;

/// For whom this machine makes way.
pub(super) struct Policy {
    /// Bytes of a card in one process.
    at: u64,
    ignores: Vec<String>,
    /// A level is loaded, a program starts again: gone this long, it is gone.
    patience: Duration,
}

impl Policy {
    /// `None` where this machine makes way for nobody, as by default one whose models run on the CPU: a program that holds a
    /// card and does nothing would stop it for nothing.
    pub fn of(config: &Config) -> Option<Self> {
        let on_cards = gpu::uses_cards() && config.device != DeviceChoice::Cpu;
        let at = config.yield_at.unwrap_or(if on_cards { AT } else { 0 });
        let ignores = config.yield_ignores.iter().map(|name| name.to_lowercase()).collect();
        (at > 0).then(|| Self { at, ignores, patience: config.timing.beat() * 15 })
    }

    /// Of several, the one that is there the longest: which takes the most changes all the time, and would be news.
    fn taken(&self, devices: &[Device]) -> Taken {
        let of = |card: &Device| {
            let takers = card.processes.iter().filter(|process| self.is_taker(process));
            let name = takers.min_by_key(|process| process.pid)?.name.as_deref()?;
            Some((card.id.clone(), format!("{name} on {}", card.id)))
        };
        devices.iter().filter(|device| device.kind == DeviceKind::Cuda).filter_map(of).collect()
    }

    /// A process without a name is in another namespace: in a container this node would see itself so.
    fn is_taker(&self, process: &DeviceProcess) -> bool {
        let Some(name) = process.name.as_deref().filter(|name| !process.own && *name != OWN) else { return false };
        let name = name.to_lowercase();
        let ignored = self.ignores.iter().any(|beginning| name.starts_with(beginning.as_str()));
        !ignored && process.memory.is_some_and(|bytes| bytes >= self.at)
    }
}

/// What was done for it so far.
struct Way {
    policy: Policy,
    unloaded: BTreeSet<ModelId>,
    free_since: Option<Instant>,
}

impl Way {
    fn new(policy: Policy) -> Self {
        Self { policy, unloaded: BTreeSet::new(), free_since: None }
    }

    /// Whether what runs on models that make way has to stop.
    fn look(&mut self, fleet: &Fleet, devices: &[Device], now: Instant) -> bool {
        let taken = self.policy.taken(devices);
        if !taken.is_empty() {
            self.free_since = None;
            if let Some(whom) = fleet.make_way_for(taken) {
                tracing::info!(whom, "this machine makes way");
            }
            // Each time: what was being loaded may be there now.
            for model in fleet.in_the_way() {
                fleet.unload(&model);
                self.unloaded.insert(model);
            }
            return true;
        }
        if fleet.makes_way() {
            let since = *self.free_since.get_or_insert(now);
            if now.duration_since(since) >= self.policy.patience {
                fleet.make_way_for(Taken::new());
                tracing::info!("this machine works again");
                fleet.take_back(std::mem::take(&mut self.unloaded));
                self.free_since = None;
            }
        }
        false
    }
}

/// Looks whenever the devices were looked at.
pub(super) async fn make_way(shared: Arc<Shared>, policy: Policy, mut devices: watch::Receiver<Vec<Device>>) {
    let mut way = Way::new(policy);
    loop {
        let seen = devices.borrow_and_update().clone();
        if way.look(&shared.fleet, &seen, Instant::now()) {
            shared.hand_back();
        }
        if devices.changed().await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::fleet::{Standing, Wish, way::tests::fleet_on};
    use cfq_proto::node::Residency;

    const PATIENCE: Duration = Duration::from_secs(30);

    fn policy() -> Policy {
        Policy { at: 1000, ignores: vec!["ollama".to_owned()], patience: PATIENCE }
    }

    fn process(name: Option<&str>, memory: Option<u64>) -> DeviceProcess {
        DeviceProcess { pid: 7, memory, name: name.map(str::to_owned), own: false }
    }

    fn card(id: &str, processes: Vec<DeviceProcess>) -> Device {
        let cpu = gpu::inventory().devices.remove(0);
        Device { id: id.to_owned(), kind: DeviceKind::Cuda, processes, ..cpu }
    }

    #[test]
    fn a_program_with_much_of_a_card_takes_it_and_desktops_and_servers_do_not() {
        let taken = |processes: Vec<DeviceProcess>| policy().taken(&[card("cuda:1", processes)]);
        let game = Taken::from([("cuda:1".to_owned(), "game on cuda:1".to_owned())]);
        assert_eq!(taken(vec![process(Some("game"), Some(1000))]), game);
        let own = DeviceProcess { own: true, ..process(Some("game"), Some(5000)) };
        for other in [
            process(Some("Xorg"), Some(999)),
            process(Some("Ollama-runner"), Some(5000)),
            process(Some("cfq"), Some(5000)),
            process(None, Some(5000)),
            process(Some("game"), None),
            own,
        ] {
            assert_eq!(taken(vec![other.clone()]), Taken::new(), "{other:?}");
        }
        let recorder = DeviceProcess { pid: 8, ..process(Some("recorder"), Some(9000)) };
        assert_eq!(taken(vec![recorder, process(Some("game"), Some(2000))]), game, "and is named, whoever has more");
        let both = [card("cuda:0", vec![process(Some("game"), Some(2000))]), card("cuda:1", Vec::new())];
        assert_eq!(policy().taken(&both).keys().collect::<Vec<_>>(), ["cuda:0"]);
    }

    #[test]
    fn what_is_on_the_card_is_unloaded_and_comes_back_once_the_program_is_gone_for_a_while() {
        let (fleet, wished, [cpu, first, second]) = fleet_on(["cpu", "cuda:0", "cuda:1"]);
        let mut way = Way::new(policy());
        let began = Instant::now();
        let busy = [card("cuda:0", vec![process(Some("game"), Some(2000))]), card("cuda:1", Vec::new())];
        let free = [card("cuda:0", Vec::new()), card("cuda:1", Vec::new())];
        assert!(!way.look(&fleet, &free, began) && !fleet.makes_way());
        assert!(way.look(&fleet, &busy, began));
        assert_eq!(wished.try_iter().collect::<Vec<_>>(), [Wish::Unload(first.clone())]);
        assert!(fleet.yields(&cpu).is_some() && fleet.yields(&second).is_none());
        // As the loader does it.
        fleet.set(&first, Standing::OnDisk(crate::node::fleet::unknown(&first, Residency::Available)));
        assert!(way.look(&fleet, &busy, began + PATIENCE * 9), "for hours");
        assert_eq!(wished.try_iter().count(), 0);
        for (after, comes_back) in [(10, false), (20, false), (39, false), (40, true)] {
            assert!(!way.look(&fleet, &free, began + PATIENCE * 9 + Duration::from_secs(after)));
            assert_eq!(fleet.makes_way(), !comes_back, "{after} s");
            if after == 20 {
                assert!(way.look(&fleet, &busy, began), "it was only between two levels");
                way.free_since = Some(began + PATIENCE * 9 + Duration::from_secs(10));
            }
        }
        assert_eq!(wished.try_iter().collect::<Vec<_>>(), [Wish::LoadFiles]);
        assert_eq!(fleet.files_to_load(), [first]);
        assert_eq!(fleet.yields(&cpu), None);
    }

    #[test]
    fn a_machine_whose_models_run_on_the_cpu_makes_way_only_where_it_is_told_to() {
        let config = |yield_at: Option<u64>| -> Config {
            serde_json::from_value(serde_json::json!({
                "node": "den", "nats": { "url": "nats://127.0.0.1:1" }, "model_dir": "/m", "device": "cpu",
                "yield_at": yield_at,
            }))
            .unwrap()
        };
        assert!(Policy::of(&config(None)).is_none() && Policy::of(&config(Some(0))).is_none());
        assert!(Policy::of(&config(Some(5))).is_some_and(|policy| policy.at == 5));
    }
}
