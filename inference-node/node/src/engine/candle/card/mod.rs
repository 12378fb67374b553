//! The engine on graphics cards: the forward pass over candle's tensors, with keys and values in pages on the card.
//!
//! The CPU's forward pass ([`super::model`]) works on slices with kernels of our own; a card wants whole tensors, few
//! launches and memory of its own. Both run the same [`super::architecture`] and the batcher drives either. Everything
//! here but one kernel runs on candle's CPU device too, where it is held against the same references.

mod attention;
mod choice;
#[cfg(feature = "cuda")]
mod cuda;
mod curated;
mod device;
mod feed_forward;
mod ledger;
mod linear;
mod load;
mod model;
#[cfg(any(feature = "cuda", test))]
mod numbers;
mod pages;
#[cfg(test)]
mod parity;
mod pass;

pub use choice::{Choice, Idle, choose_here};
pub use curated::{curated_that_fit, lasting_room};
pub use device::{Card, DeviceChoice, NoCard, NoSuchDevice, cards, free_of, give_back, is_out_of_memory, memory};
pub use ledger::{ELEMENT, Layout, NoLayout};
pub use load::{Share, fit_on_cards, need_on_cards};
pub use model::{CardModel, Stage};
