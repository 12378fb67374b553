//! The engine on the real small model, and every part that faces something hostile or remote.

mod generation;
mod smollm;
mod tokens;
