//! A piece of an expected prompt: one short pass between sequences.
//!
//! Nothing is held from one piece to the next. A piece begins like a sequence, with whatever is known of its beginning, and
//! ends like one, so what it computed is found by the next piece and by the call it was computed for, and stays only as long
//! as nobody needs the room. Pieces end where a block does, since a part of a block is copied by whatever follows, and kept
//! besides; only on a model that takes longer for a block than a pass may take they are smaller.

use std::time::Duration;

use crate::engine::candle::batcher::{Batcher, CHUNK_TIME};
use crate::engine::candle::kv::BLOCK;
use crate::engine::candle::model::{Network, Rows, Trouble};
use crate::engine::{Ahead, Warmed};

/// What a sequence waits that comes in the middle of a piece, where that is enough for a block: a quarter of what a
/// neighbour's prompt may cost it. It never waits longer than for that neighbour.
const PIECE_TIME: Duration = Duration::from_millis(60);

impl<N: Network> Batcher<N> {
    pub(super) fn ahead(&mut self, ahead: &Ahead) -> Warmed {
        let Ahead { tokens, long, exact } = ahead;
        // Whatever memory there is is for those who were put aside for it.
        if !self.pace.is_full() {
            return Warmed::Enough;
        }
        // The last token is always left to the call, as from any beginning.
        let most = tokens.len().saturating_sub(1) / BLOCK * BLOCK;
        let mut kv = self.pool.begin(tokens, *long, *exact);
        let from = kv.len();
        let rows = self.chunk(PIECE_TIME, from).max(BLOCK.min(self.chunk(CHUNK_TIME, from)));
        let end = if rows < BLOCK { from + rows } else { (from + rows) / BLOCK * BLOCK };
        let to = end.min(most);
        if from >= to || !self.pool.grow(&mut kv, to - from) {
            self.pool.end(kv, tokens);
            return Warmed::Enough;
        }
        // The figures stay those of real work: a piece is shorter than what a pass is worth.
        let part = Rows { kv: &kv, tokens: &tokens[from..to], scored: 0 };
        if let Err(error) = self.model.forward(&mut self.pool, &[part], *exact) {
            tracing::warn!(%error, "a warm-up failed; the call it was for is not touched by it");
            self.pool.discard(kv);
            if let Trouble::Device = self.model.trouble(&error) {
                self.lost = Some(format!("the card cannot be used any more: {error}"));
            }
            return Warmed::Enough;
        }
        self.pool.advance(&mut kv, tokens, to - from);
        self.pool.end(kv, tokens);
        self.figures.holds(self.pool.tokens());
        if to < most { Warmed::Further } else { Warmed::Enough }
    }
}
