//! What a model takes of the graphics cards that NVML tells of, by the sum a load would be laid out with.
//!
//! No card is opened for it: that would take memory of a card whose room is asked about, and only a build for cards could.
//! So their speeds are not known, and a model that needs several is laid out as if they were equally fast, the emptiest
//! first; a load puts the fastest first.

use std::path::Path;

use cfq_inference_node::engine::candle::{
    Bytes, CardRoom, DeviceChoice, DoesNotFit, Layout, LoadError, NoLayout, fit_on_cards,
};
use cfq_inference_node::gpu;
use cfq_inference_node::models::{Measured, Took};
use cfq_proto::node::{Device, DeviceKind};
use serde::Serialize;

use super::{Length, Place, Terms, lengths};
use crate::config::Node;
use crate::output;

/// The sum of one card or of several together.
#[derive(Serialize)]
pub struct OnCards {
    /// The layout a load would choose term by term, or why there is none.
    pub sum: String,
    /// `None`: there is no layout, and no one sum.
    pub terms: Option<Terms>,
    /// What each of several would hold.
    pub shares: Vec<Part>,
}

#[derive(Serialize)]
pub struct Part {
    device: String,
    /// The first layer on it, and how many.
    first_layer: usize,
    layers: usize,
    bytes: u64,
    available: u64,
}

/// Each card alone, then all together.
pub fn places(
    devices: &[Device],
    path: &Path,
    context: u64,
    measured: Option<&Measured>,
    node: &Node,
) -> Result<Vec<Place>, LoadError> {
    let cards: Vec<&Device> = devices.iter().filter(|device| device.kind == DeviceKind::Cuda).collect();
    let alone = cards.iter().map(std::slice::from_ref);
    let together = Some(&cards[..]).filter(|cards| cards.len() > 1 && node.device == DeviceChoice::Auto);
    alone.chain(together).map(|cards| place(cards, path, context, measured, node)).collect()
}

fn place(
    cards: &[&Device],
    path: &Path,
    context: u64,
    measured: Option<&Measured>,
    node: &Node,
) -> Result<Place, LoadError> {
    let room = |card: &&Device| CardRoom {
        free: card.memory_total.saturating_sub(card.memory_others),
        speed: 1.0,
        correction: measured
            .and_then(|measured| measured.on(&gpu::kept_as(&card.id, card.uuid.as_deref())))
            .map_or(0, Took::thousandths),
    };
    let rooms: Vec<CardRoom> = cards.iter().map(room).collect();
    let joined = |what: fn(&Device) -> &str| cards.iter().map(|card| what(card)).collect::<Vec<_>>();
    let device = joined(|card| &card.id).join(",");
    let length = |total: u64, tokens, fits| Length { tokens, total, fits };
    let (on_cards, lengths) = match fit_on_cards(path, &device, &rooms, node.max_sequences) {
        Ok(Layout { need, split }) => {
            let part = |share: &cfq_inference_node::engine::candle::CardShare| {
                Some(Part {
                    device: cards.get(share.card)?.id.clone(),
                    first_layer: share.layers.start,
                    layers: share.layers.len(),
                    bytes: share.bytes,
                    available: rooms.get(share.card)?.free,
                })
            };
            let shares = split.shares.iter().filter(|_| cards.len() > 1).filter_map(part).collect();
            let found = OnCards { sum: need.to_string(), terms: Some(need.into()), shares };
            let fits = |tokens| length(need.with_tokens(tokens).total(), tokens, tokens <= need.kv_tokens);
            (found, lengths(context).map(fits).collect())
        }
        Err(LoadError::NoLayout { source, .. }) => {
            let sum = source.to_string();
            match *source {
                NoLayout::Card(DoesNotFit { need, .. }) => {
                    let none = |tokens| length(need.with_tokens(tokens).total(), tokens, false);
                    let found = OnCards { sum, terms: Some(need.into()), shares: Vec::new() };
                    (found, lengths(context).map(none).collect())
                }
                NoLayout::Cards(_) => (OnCards { sum, terms: None, shares: Vec::new() }, Vec::new()),
            }
        }
        // As of heads that the cards' kernel does not take.
        Err(LoadError::Header(refused)) => {
            (OnCards { sum: refused.to_string(), terms: None, shares: Vec::new() }, Vec::new())
        }
        Err(error) => return Err(error),
    };
    let chosen = match node.device {
        DeviceChoice::Auto => true,
        DeviceChoice::Cpu => false,
        DeviceChoice::Cuda(_) => device == node.device.to_string(),
    };
    Ok(Place {
        name: joined(|card| &card.name).join(", "),
        available: rooms.iter().map(|room| room.free).sum(),
        parked_kv: 0,
        used: gpu::uses_cards() && chosen,
        device,
        on_cards: Some(on_cards),
        lengths,
    })
}

impl OnCards {
    pub fn words(&self) -> String {
        let sum = output::plain(&self.sum);
        [sum].into_iter().chain(self.shares.iter().map(Part::words)).collect::<Vec<_>>().join("\n")
    }
}

impl Part {
    fn words(&self) -> String {
        let last = self.first_layer + self.layers.saturating_sub(1);
        let (device, bytes, available) = (&self.device, Bytes(self.bytes), Bytes(self.available));
        format!("{device}: layers {} to {last}, {bytes} of {available}", self.first_layer)
    }
}
