//! Computing a prompt before it is asked for.
//!
//! A warm-up is no sequence: it has no room reserved, no place in a batch and no end anybody waits for. It is asked for
//! piece by piece, each piece is one forward pass of its own that is only made while the engine has nothing else, and what it
//! leaves are blocks like those of a sequence that ended: known by their tokens, held by nobody, the first to go when room is
//! wanted that nobody used for longer. The call it was for finds them as it finds any beginning it shares, and what was
//! guessed wrong is not found. So taking it back is doing nothing, and usage tells of it only as cached tokens.

/// The beginning of a prompt that is expected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ahead {
    pub tokens: Vec<u32>,
    /// Rotated for long sequences.
    pub long: bool,
    /// For a sequence whose bits matter.
    pub exact: bool,
}

/// What became of a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Warmed {
    /// There is more.
    Further,
    /// Something else is to do; nothing was computed.
    Busy,
    /// All of it is there, or there is no room for more.
    Enough,
}
