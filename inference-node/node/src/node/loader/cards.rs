//! Room on the cards.
//!
//! What models together may take of a card is what was free when it was opened, as with the host's memory. A card's driver
//! says what is free now, in which the scratch memory of the models on it is missing from time to time only: it is promised
//! to them and is left out.

use cfq_proto::model::ModelId;

use super::room::Room;
use super::{Failed, Loaded, Loader, on_disk};
use crate::engine::Engine;
use crate::engine::candle::{Card, DeviceChoice, LoadError, Need, Share, free_of, need_on_cards};
use crate::node::fleet::with_causes;

impl Loader {
    /// The cards with what is promised to nobody.
    pub(super) fn cards_now(&self, cards: &[Card]) -> Vec<Card> {
        cards_beside(cards, &self.all().collect::<Vec<_>>(), &[])
    }

    /// The same with all gone that may go.
    fn cards_at_most(&self, cards: &[Card]) -> Vec<Card> {
        let (staying, going) = self.staying_and_going();
        cards_beside(cards, &staying, &going)
    }

    pub(super) fn usable_cards(&self) -> Result<&[Card], Failed> {
        match &self.cards {
            Ok(cards) => Ok(cards),
            Err(reason) => Err(Failed::Refused(format!("device = \"{}\": {reason}", self.config.device))),
        }
    }

    /// `None`: it is for the CPU.
    pub(super) fn make_room_on_cards(&mut self, model: &ModelId) -> Result<Option<Room>, Failed> {
        let cards = self.cards_for(model)?;
        if cards.is_empty() {
            return Ok(None);
        }
        let path = self.path(model)?;
        // Nobody makes way for what would not fit even alone.
        let alone = match need_on_cards(&path, &cards, self.limits(0)) {
            Ok(need) => need,
            Err(_) if self.config.device == DeviceChoice::Auto => return Ok(None),
            Err(error) => return Err(Failed::Refused(with_causes(&error))),
        };
        loop {
            let refused = match need_on_cards(&path, &self.cards_now(&cards), self.limits(0)) {
                Ok(_) => return Ok(Some(Room::Made(self.have()))),
                Err(error) => error,
            };
            // Nor for what would not fit beside those that stay and what other programs hold now.
            if let Err(refused) = need_on_cards(&path, &self.cards_at_most(&cards), self.limits(0)) {
                if self.config.device == DeviceChoice::Auto && self.could_fit_the_host(model)? {
                    return Ok(None);
                }
                return Err(self.no_room_now(model, &named(&cards), &alone, with_causes(&refused)));
            }
            if self.goes_now(Loaded::is_on_card) {
                return Ok(Some(Room::Coming));
            }
            if let Some(idle) = self.least_used(|model, l| is_idle(l) && l.is_on_card() && !self.is_fresh(model, l)) {
                tracing::info!(model = %idle, wanted = %model, "idle model makes room on its card");
                self.dismiss(&idle);
                self.see_off();
                continue;
            }
            // The CPU takes it at once, where it can.
            if self.config.device == DeviceChoice::Auto && self.could_fit_the_host(model)? {
                return Ok(None);
            }
            let fresh = |model: &ModelId, l: &Loaded| l.is_on_card() && is_idle(l) && self.is_fresh(model, l);
            if self.leaving.iter().any(|(_, l)| l.is_on_card()) || self.least_used(fresh).is_some() {
                return Ok(Some(Room::Coming));
            }
            if let Some(busy) = self.least_used(|_, l| l.is_on_card()) {
                tracing::info!(model = %busy, wanted = %model, "model makes room on its card once its sequences have ended");
                self.dismiss(&busy);
                return Ok(Some(Room::Coming));
            }
            return Err(self.no_room_now(model, &named(&cards), &alone, with_causes(&refused)));
        }
    }

    /// Why a load came to nothing, and whether that passes.
    pub(super) fn failed(&self, model: &ModelId, error: &LoadError) -> Failed {
        let reason = with_causes(error);
        match error {
            LoadError::DoesNotFit { source, .. } if source.need.total() <= self.total => {
                self.no_room_now(model, "cpu", &source.need, reason)
            }
            LoadError::DoesNotFit { .. } | LoadError::NoLayout { .. } | LoadError::CardFull { .. } => {
                match self.need_alone_on_cards(model) {
                    Some((device, need)) => self.no_room_now(model, &device, &need, reason),
                    None => Failed::Refused(reason),
                }
            }
            LoadError::Header(_) | LoadError::Weights { .. } | LoadError::NotOnCards { .. } | LoadError::Thread(_) => {
                Failed::Refused(reason)
            }
        }
    }

    /// Where nothing else is on them.
    fn need_alone_on_cards(&self, model: &ModelId) -> Option<(String, Need)> {
        let cards = self.cards_for(model).ok().filter(|cards| !cards.is_empty())?;
        let path = self.path(model).ok()?;
        Some((named(&cards), need_on_cards(&path, &cards, self.limits(0)).ok()?))
    }

    pub(super) fn no_room_now(&self, model: &ModelId, device: &str, need: &Need, reason: String) -> Failed {
        Failed::NoRoomNow { state: Box::new(on_disk(model, device, need, self.config.max_sequences)), reason }
    }
}

/// The cards with what is promised to none of those that stay, once the others have given theirs back.
fn cards_beside(cards: &[Card], staying: &[&Loaded], going: &[&Loaded]) -> Vec<Card> {
    let left = |card: &Card| {
        let of = |models: &[&Loaded], what: fn(&Share) -> u64| {
            let shares = models.iter().flat_map(|l| l.engine.shares()).filter(|share| share.card == card.index);
            shares.map(what).sum::<u64>()
        };
        let promised = card.free.saturating_sub(of(staying, |share| share.bytes));
        let there = free_of(&card.device).map(|free| {
            free.saturating_add(of(going, |share| share.bytes)).saturating_sub(of(staying, |share| share.later))
        });
        Card { free: promised.min(there.unwrap_or(u64::MAX)), ..card.clone() }
    };
    cards.iter().map(left).collect()
}

fn named(cards: &[Card]) -> String {
    cards.iter().map(Card::id).collect::<Vec<_>>().join(",")
}

pub(super) fn is_idle(loaded: &Loaded) -> bool {
    loaded.engine.state().running == 0
}

impl Loaded {
    pub(super) fn is_on_card(&self) -> bool {
        !self.engine.shares().is_empty()
    }
}
