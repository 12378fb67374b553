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
use cfq_proto::node::{Device, DeviceKind};
use tokio::sync::watch;
use tokio::time::Instant;

use super::Shared;
use crate::config::Config;

/// By the card's id: who has it, in words.
pub type Taken = BTreeMap<String, String>;

/// A program of this name is this node, or another that shares the card by its own ledger.
const OWN: &str = "cfq";

/// For whom this machine makes way.
pub(super) struct Policy {
    /// Bytes of a card in one process.
    at: u64,
    ignores: Vec<String>,
    /// A level is loaded, a program starts again: gone this long, it is gone.
    patience: Duration,
}

impl Policy {
    /// `None` where this machine makes way for nobody.
    pub fn of(config: &Config) -> Option<Self> {
        let (at, ignores) = (config.yield_at, config.yield_ignores.clone());
        (at > 0).then(|| Self { at, ignores, patience: config.timing.beat() * 15 })
    }

    /// A process without a name is in another namespace: in a container this node would see itself so.
    fn taken(&self, devices: &[Device]) -> Taken {
        let of = |card: &Device| {
            let who = card.processes.iter().filter(|process| !process.own).find_map(|process| {
                let name =
                    process.name.as_deref().filter(|name| *name != OWN && !self.ignores.iter().any(|i| i == name))?;
                // Not how much, which changes all the time and would be news.
                process.memory.is_some_and(|bytes| bytes >= self.at).then(|| format!("{name} on {}", card.id))
            })?;
            Some((card.id.clone(), who))
        };
        devices.iter().filter(|device| device.kind == DeviceKind::Cuda).filter_map(of).collect()
    }
}

/// Looks whenever the devices were looked at.
pub(super) async fn make_way(shared: Arc<Shared>, policy: Policy, mut devices: watch::Receiver<Vec<Device>>) {
    let mut unloaded: BTreeSet<ModelId> = BTreeSet::new();
    let mut free_since = None;
    loop {
        let taken = policy.taken(&devices.borrow_and_update());
        if !taken.is_empty() {
            free_since = None;
            if let Some(whom) = shared.fleet.make_way_for(taken) {
                tracing::info!(whom, "this machine makes way");
            }
            // Each time: what was being loaded or admitted may be there now.
            shared.hand_back();
            for model in shared.fleet.in_the_way() {
                shared.fleet.unload(&model);
                unloaded.insert(model);
            }
        } else if shared.fleet.makes_way() {
            let since = *free_since.get_or_insert_with(Instant::now);
            if since.elapsed() >= policy.patience {
                shared.fleet.make_way_for(Taken::new());
                tracing::info!("this machine works again");
                for model in std::mem::take(&mut unloaded) {
                    shared.fleet.load(&model, || Ok(()));
                }
            }
        }
        if devices.changed().await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cfq_proto::node::DeviceProcess;

    fn process(name: Option<&str>, memory: Option<u64>) -> DeviceProcess {
        DeviceProcess { pid: 7, memory, name: name.map(str::to_owned), own: false }
    }

    fn card(id: &str, processes: Vec<DeviceProcess>) -> Device {
        let cpu = crate::gpu::inventory().devices.remove(0);
        Device { id: id.to_owned(), kind: DeviceKind::Cuda, processes, ..cpu }
    }

    #[test]
    fn a_program_with_much_of_a_card_takes_it_and_desktops_and_servers_do_not() {
        let policy = Policy { at: 1000, ignores: vec!["ollama".to_owned()], patience: Duration::ZERO };
        let taken = |process: DeviceProcess| policy.taken(&[card("cuda:1", vec![process])]);
        assert_eq!(
            taken(process(Some("game"), Some(1000))),
            Taken::from([("cuda:1".to_owned(), "game on cuda:1".to_owned())])
        );
        let own = DeviceProcess { own: true, ..process(Some("game"), Some(5000)) };
        for other in [
            process(Some("Xorg"), Some(999)),
            process(Some("ollama"), Some(5000)),
            process(Some("cfq"), Some(5000)),
            process(None, Some(5000)),
            process(Some("game"), None),
            own,
        ] {
            assert_eq!(taken(other.clone()), Taken::new(), "{other:?}");
        }
        let small_first = vec![process(Some("Xorg"), Some(10)), process(Some("game"), Some(2000))];
        let both = policy.taken(&[card("cuda:0", small_first), card("cuda:1", Vec::new())]);
        assert_eq!(both.keys().collect::<Vec<_>>(), ["cuda:0"]);
    }
}
