//! Which models make way for other programs, see [`super::super::make_way`].

use std::collections::BTreeSet;

use cfq_proto::messages::ModelReply;
use cfq_proto::model::ModelId;

use super::{Fleet, Standing, Wish, is_file, lock};
use crate::node::make_way::Taken;

impl Fleet {
    /// From now on, or for nobody any more. Returns for whom, where that is news.
    pub fn make_way_for(&self, taken: Taken) -> Option<String> {
        let whom = taken.values().map(String::as_str).collect::<Vec<_>>().join(", ");
        let before = std::mem::replace(&mut *lock(&self.taken), taken.clone());
        if before == taken {
            return None;
        }
        self.changes.send_replace(());
        Some(whom)
    }

    pub fn makes_way(&self) -> bool {
        !lock(&self.taken).is_empty()
    }

    /// For whom the model takes no work now.
    pub fn yields(&self, model: &ModelId) -> Option<String> {
        let taken = lock(&self.taken).clone();
        self.standing(model)?.yields(model, &taken)
    }

    /// For whom nothing is loaded now, where this would be a load.
    pub(super) fn keeps_from_loading(&self, model: &ModelId, standing: Option<&Standing>) -> Option<String> {
        match standing {
            Some(Standing::Ready(_)) => None,
            Some(_) | None => lock(&self.taken).values().next().filter(|_| is_file(model)).cloned(),
        }
    }

    /// What is loaded on cards that others have.
    pub fn in_the_way(&self) -> Vec<ModelId> {
        let taken = lock(&self.taken).clone();
        let on_them = |(model, standing): &(&ModelId, &Standing)| {
            matches!(standing, Standing::Ready(_)) && standing.cards(model).iter().any(|card| taken.contains_key(card))
        };
        lock(&self.standings).iter().filter(on_them).map(|(model, _)| model.clone()).collect()
    }

    /// Loads them as at the start, where models share what there is. What is still on its way out is loaded when it is wanted.
    pub fn take_back(&self, models: BTreeSet<ModelId>) {
        let gone = models.into_iter().filter(|model| matches!(self.standing(model), Some(Standing::OnDisk(_))));
        let gone: Vec<ModelId> = gone.collect();
        gone.iter().for_each(|model| self.set(model, Standing::Loading));
        if !gone.is_empty() {
            // Where it is not heard, the node stops.
            self.wish(Wish::LoadFiles, ModelReply::Unloaded);
        }
    }
}

impl Standing {
    /// Those it is loaded on.
    fn cards(&self, model: &ModelId) -> Vec<String> {
        let engine = match self {
            Self::Ready(engine) => Some(engine.clone()),
            Self::Leaving(engine) => engine.upgrade(),
            Self::OnDisk(_) | Self::Loading | Self::Unusable(_) => None,
        };
        let device = engine.filter(|_| is_file(model)).map(|engine| engine.state().device).unwrap_or_default();
        device.split(',').filter(|id| !id.is_empty() && *id != "cpu").map(str::to_owned).collect()
    }

    /// What serves on cards of its own goes on, and what cannot be used says why.
    pub(super) fn yields(&self, model: &ModelId, taken: &Taken) -> Option<String> {
        if !is_file(model) || matches!(self, Self::Unusable(_)) {
            return None;
        }
        let cards = self.cards(model);
        match cards.is_empty() {
            true => taken.values().next().cloned(),
            false => cards.iter().find_map(|card| taken.get(card).cloned()),
        }
    }
}

#[cfg(test)]
pub(in crate::node) mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::Receiver;

    use cfq_proto::node::{ModelState, Residency};
    use futures::future::BoxFuture;

    use super::super::unknown;
    use super::*;
    use crate::config::Config;
    use crate::engine::{Admitted, Engine, Refused};

    /// Loaded on these devices.
    struct On(&'static str, ModelId);

    impl Engine for On {
        fn state(&self) -> ModelState {
            ModelState { device: self.0.to_owned(), ..unknown(&self.1, Residency::Resident) }
        }

        fn admit_after(
            &self,
            _: cfq_proto::job::Prompt,
            _: cfq_proto::job::Written,
        ) -> BoxFuture<'_, Result<Admitted, Refused>> {
            Box::pin(async { Err(Refused::NotNow { need: None, have: 0 }) })
        }
    }

    /// Models that are loaded on these devices.
    pub fn fleet_on<const N: usize>(devices: [&'static str; N]) -> (Arc<Fleet>, Receiver<Wish>, [ModelId; N]) {
        let models = devices.map(|device| format!("path:/{device}").parse::<ModelId>().unwrap());
        let config: Config = serde_json::from_value(serde_json::json!({
            "node": "den", "nats": { "url": "nats://127.0.0.1:1" }, "model_dir": "/m", "models": &models[..],
        }))
        .unwrap();
        let (fleet, wished, _) = Fleet::new(&config, Arc::default());
        for (model, device) in models.iter().zip(devices) {
            fleet.set(model, Standing::Ready(Arc::new(On(device, model.clone()))));
        }
        (fleet, wished, models)
    }

    #[test]
    fn what_others_have_is_left_to_them_and_other_cards_and_endpoints_go_on() {
        let (fleet, _wished, [cpu, first, second, split, disk, broken]) =
            fleet_on(["cpu", "cuda:0", "cuda:1", "cuda:0,cuda:1", "disk", "broken"]);
        let endpoint: ModelId = "openai:box/m".parse().unwrap();
        let on_endpoint: Arc<dyn Engine> = Arc::new(On("proxy", endpoint.clone()));
        fleet.set(&endpoint, Standing::Ready(on_endpoint));
        fleet.set(&disk, Standing::OnDisk(unknown(&disk, Residency::Available)));
        fleet.set(&broken, Standing::Unusable("no such file".to_owned()));
        let before = fleet.ledger();
        assert!(before.yields.is_empty() && !fleet.makes_way() && fleet.in_the_way().is_empty());
        let game = Taken::from([("cuda:0".to_owned(), "game on cuda:0".to_owned())]);
        assert_eq!(fleet.make_way_for(game.clone()).as_deref(), Some("game on cuda:0"));
        assert_eq!(fleet.make_way_for(game), None, "no news");
        let ledger = fleet.ledger();
        assert!(ledger.version > before.version);
        let yields: Vec<_> = ledger.yields.keys().cloned().collect();
        assert_eq!(yields, [cpu, first.clone(), split.clone(), disk.clone()]);
        assert_eq!(fleet.in_the_way(), [first, split]);
        for model in [disk, "path:/unheard-of".parse().unwrap()] {
            let refused = fleet.load(&model, || Ok(()));
            assert!(matches!(refused, ModelReply::Refused { reason } if reason.contains("game on cuda:0")));
        }
        // On its way out, but not of that card.
        let engine: Arc<dyn Engine> = Arc::new(On("cuda:1", second.clone()));
        fleet.set(&second, Standing::Leaving(Arc::downgrade(&engine)));
        assert_eq!(fleet.yields(&second), None);
        fleet.make_way_for(Taken::new());
        assert!(fleet.ledger().yields.is_empty() && fleet.ledger().version > ledger.version);
    }
}
