//! The server's configuration file, written again at each start.

use std::fmt::Write;
use std::net::SocketAddr;
use std::path::Path;

use cfq_proto::subject::{Identity, grants};

use crate::certificates::CertificateFiles;

/// Interval at which the server pings each client. A client that is stopped, for example by SIGSTOP, keeps its connection
/// open; until the server closes it, requests that are delivered to it are lost.
const PING_INTERVAL: &str = "1s";
/// The server closes a connection after this number of pings without an answer.
const MAX_UNANSWERED_PINGS: u32 = 3;

pub struct Server<'a> {
    pub name: &'a str,
    pub address: SocketAddr,
    /// The certificate and key, if clients must use TLS.
    pub certificates: Option<&'a CertificateFiles>,
    pub store: &'a Path,
    pub store_bytes: u64,
    /// The clients that may connect: public key and identity of each.
    pub users: &'a [(String, &'a Identity)],
}

pub fn render(server: &Server<'_>) -> String {
    let mut users = String::new();
    for (key, identity) in server.users {
        let grants = grants(identity);
        // Writing to a String cannot fail.
        let _ = write!(
            users,
            "    {{\n      nkey: {}\n      permissions: {{\n        publish: {{ allow: {} }}\n        subscribe: {{ allow: {} }}\n        allow_responses: {}\n      }}\n    }}\n",
            quoted(key),
            quoted_list(&grants.publish),
            quoted_list(&grants.subscribe),
            grants.responses,
        );
    }
    let tls = match server.certificates {
        Some(files) => format!(
            "tls {{\n  cert_file: {}\n  key_file: {}\n  min_version: \"1.3\"\n}}\n",
            quoted(&files.certificate.display().to_string()),
            quoted(&files.key.display().to_string()),
        ),
        None => String::new(),
    };
    format!(
        "server_name: {}\nlisten: \"{}\"\n{tls}jetstream {{\n  store_dir: {}\n  max_memory_store: {}\n  max_file_store: {}\n}}\nping_interval: {}\nping_max: {}\nauthorization {{\n  users: [\n{users}  ]\n}}\n",
        quoted(server.name),
        server.address,
        quoted(&server.store.display().to_string()),
        // A small limit for memory storage, since all of cfq's streams use file storage.
        64 << 20,
        server.store_bytes,
        quoted(PING_INTERVAL),
        MAX_UNANSWERED_PINGS,
    )
}

fn quoted_list(subjects: &[String]) -> String {
    let subjects: Vec<String> = subjects.iter().map(|subject| quoted(subject)).collect();
    format!("[{}]", subjects.join(", "))
}

fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

#[cfg(test)]
mod tests {
    use super::*;
    use cfq_proto::ids::NodeId;

    #[test]
    fn rendered_file_contains_grants_and_no_anonymous_access() {
        let node = Identity::Node(NodeId::new("den").unwrap());
        let users = [("UNODE".to_owned(), &node)];
        let text = render(&Server {
            name: "cfq-1",
            address: "127.0.0.1:4222".parse().unwrap(),
            certificates: None,
            store: Path::new("/a b/store"),
            store_bytes: 9,
            users: &users,
        });
        assert!(text.contains("listen: \"127.0.0.1:4222\"") && text.contains("store_dir: \"/a b/store\""), "{text}");
        assert!(text.contains("nkey: \"UNODE\"") && text.contains("\"cfq.v1.order.den.*\""), "{text}");
        assert!(!text.contains("$JS"), "{text}");
        assert!(text.contains("allow_responses: true"));
        assert!(text.contains("\nping_interval: \"1s\"\nping_max: 3\n"), "{text}");
        assert!(!text.contains("no_auth_user") && !text.contains("0.0.0.0"));
    }
}
