//! Addresses to listen at, as users write them.

use std::net::{Ipv4Addr, SocketAddr};

/// Default port of `cfq up`.
pub const DEFAULT_PORT: u16 = 7710;

/// Parses an address to listen at; `localhost` is the loopback address.
pub fn parse(text: &str) -> Result<SocketAddr, String> {
    let numeric = match text.strip_prefix("localhost:") {
        Some(port) => format!("{}:{port}", Ipv4Addr::LOCALHOST),
        None => text.to_owned(),
    };
    numeric.parse().map_err(|_| format!("{text:?} is not an address with a port, such as 127.0.0.1:{DEFAULT_PORT}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn localhost_is_an_address() {
        assert_eq!(parse("localhost:7711"), Ok("127.0.0.1:7711".parse().unwrap()));
        for text in ["localhost", "7711", ":7711", "localhost:x", "example.org:7711", "127.0.0.1"] {
            assert!(parse(text).unwrap_err().contains("such as 127.0.0.1:7710"), "{text}");
        }
    }
}
