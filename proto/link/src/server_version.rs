//! Oldest version of the NATS server that cfq works with.

use std::fmt;

/// A version of the NATS server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct NatsVersion {
    /// Major version.
    pub major: u32,
    /// Minor version.
    pub minor: u32,
    /// Patch version.
    pub patch: u32,
}

/// Oldest accepted version. Older servers have known errors in the permissions and in JetStream.
pub const MIN_NATS_VERSION: NatsVersion = NatsVersion { major: 2, minor: 12, patch: 3 };

impl NatsVersion {
    /// Parses the version in a server's greeting, such as `2.12.3` or `2.14.0-dev`.
    pub fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.trim_start_matches('v').splitn(3, '.').map(|part| {
            let end = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
            part[..end].parse::<u32>().ok()
        });
        Some(Self { major: numbers.next()??, minor: numbers.next()??, patch: numbers.next()?? })
    }
}

impl fmt::Display for NatsVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// Returns whether a server that reports this version is too old. A version that cannot be read is accepted: it is that
/// of a build from source.
pub(crate) fn is_too_old(reported: &str) -> bool {
    NatsVersion::parse(reported).is_some_and(|version| version < MIN_NATS_VERSION)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cfq_proto::subject::Identity;
    use cfq_proto::timing::Timing;
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};

    use crate::{LinkError, NatsConfig, Session};

    #[test]
    fn versions_are_compared_by_number() {
        assert!(["2.12.2", "2.9.25", "2.12.0-RC.1", "1.99.99"].into_iter().all(is_too_old));
        assert!(!["2.12.3", "2.12.10", "2.15.1", "3.0.0", "2.14.0-dev", "dev"].into_iter().any(is_too_old));
    }

    /// Accepts one client, as a server of this version does until the client is connected.
    async fn greet(version: &str) -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("nats://{}", listener.local_addr().unwrap());
        let info = format!(
            "INFO {{\"server_id\":\"x\",\"version\":\"{version}\",\"proto\":1,\"headers\":true,\"max_payload\":1048576}}\r\n"
        );
        tokio::spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            let (read, mut write) = stream.into_split();
            write.write_all(info.as_bytes()).await.unwrap();
            let mut lines = BufReader::new(read).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                if line.starts_with("PING") {
                    write.write_all(b"PONG\r\n").await.unwrap();
                }
            }
        });
        url
    }

    #[tokio::test]
    async fn server_that_is_too_old_is_refused_with_the_next_step() {
        let connect = async |version: &str| {
            let config = NatsConfig { url: greet(version).await, ca_file: None, seed_file: None };
            Session::connect(&config, Identity::Scheduler, &Timing::default()).await
        };
        let error = connect("2.11.8").await.unwrap_err();
        assert!(matches!(error, LinkError::ServerTooOld { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("2.11.8") && text.contains("install nats-server 2.12.3 or newer"), "{text}");
        connect("2.12.3").await.unwrap();
    }
}
