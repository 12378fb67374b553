//! The request with which a machine joins. The machine creates its key itself, and sends nothing before the server's
//! certificate was verified against the token.

use anyhow::Context;
use cfq_deploy::{Paths, nats};
use cfq_link::{outbound, tls};
use cfq_proto::client::{Client, ClientError};
use cfq_proto::http::JoinRequest;
use cfq_proto::ids::NodeId;
use cfq_proto::join_token::JoinToken;
use uuid::Uuid;

use crate::bind::DEFAULT_PORT;
use crate::connect;
use crate::exit;
use crate::local_server;
use crate::membership::{self, Membership};
use crate::output::Output;

/// Checks the form of a URL and a token, before anything is created.
///
/// # Errors
/// A usage error, which also recognizes that both were exchanged.
pub fn check(url: Option<&str>, token: Option<&str>) -> anyhow::Result<()> {
    if let (Some(url), Some(token)) = (url, token)
        && url.parse::<JoinToken>().is_ok()
        && server_url(token).is_ok()
    {
        return Err(exit::usage("the URL comes first, then the token: `cfq join URL TOKEN`"));
    }
    if let Some(url) = url {
        server_url(url)?;
    }
    match token {
        Some(token) if token != "-" => {
            token.parse::<JoinToken>().map(|_| ()).map_err(|error| exit::usage(format!("{error}")))
        }
        Some(_) | None => Ok(()),
    }
}

/// Asks the server to let this machine join, and stores the membership. The server answers a repetition with the same token
/// and key like the first time. A machine that joined the same cluster before keeps its key, and with it its name.
pub async fn join(
    out: Output,
    paths: &Paths,
    url: &str,
    token: &str,
    name: Option<NodeId>,
    joined: Option<Membership>,
) -> anyhow::Result<Membership> {
    let url = server_url(url)?;
    let token: JoinToken = token.parse().map_err(|error| exit::usage(format!("{error}")))?;
    let is_repeated = |joined: &&Membership| {
        joined.token_id == token.id && joined.url == url && name.as_ref().is_none_or(|name| *name == joined.name)
    };
    if let Some(joined) = joined.as_ref().filter(is_repeated) {
        out.status(&format!("this machine has joined with this token already, as {}", joined.name));
        return Ok(joined.clone());
    }
    let (known, left) = match joined {
        Some(joined) if is_same_cluster(paths, &joined, &token) => (Some(joined), None),
        Some(joined) => (None, Some(joined.url)),
        None => (None, None),
    };
    // An earlier request with this token has created a key for it, and its reply may have been lost.
    let has_own_key = membership::seed_file(paths, token.id).exists();
    let mut key = known.as_ref().filter(|_| !has_own_key).map_or(token.id, |known| known.token_id);
    let (tls, authority) = tls::trust_only_fingerprint(token.authority);
    let http = outbound::tls_api_client(tls).context("cannot create an HTTP client")?;
    let request = |key: Uuid| -> anyhow::Result<JoinRequest> {
        Ok(JoinRequest {
            token: token.to_string(),
            name: name.clone(),
            fallback_name: NodeId::new(local_server::node_name()).ok(),
            nats_key: nats::public_key_in(&membership::seed_file(paths, key))?,
            version: env!("CARGO_PKG_VERSION").to_owned(),
        })
    };
    let mut reply = Client::join(http.clone(), &url, &request(key)?).await;
    // A revoked key is not used again, because it may have been stolen.
    if key != token.id && matches!(&reply, Err(error) if is_refused_key(error)) {
        key = token.id;
        reply = Client::join(http, &url, &request(key)?).await;
    }
    let reply = reply.map_err(|error| describe(&error))?;
    let authority = authority.pem().context("the server sent no certificate of its authority")?;
    let host = host_of(&url)?;
    let membership = Membership {
        nats_url: format!("tls://{host}:{}", reply.nats_port),
        url,
        name: reply.name,
        token_id: key,
        models: reply.models,
        timing: reply.timing,
    };
    membership.write(paths, Some(&authority))?;
    if let Some(left) = left {
        out.status(&format!("this machine has left {left}, where it can be removed with `cfq machines revoke`"));
    }
    Ok(membership)
}

/// Whether the token is of the cluster that this machine joined. Otherwise the machine leaves that cluster.
fn is_same_cluster(paths: &Paths, joined: &Membership, token: &JoinToken) -> bool {
    let authority = membership::authority_file(&paths.data, joined.token_id);
    tls::fingerprint_of_file(&authority).is_ok_and(|fingerprint| fingerprint == token.authority)
}

fn is_refused_key(error: &ClientError) -> bool {
    matches!(error, ClientError::Refused { body, .. } if body.field.as_deref() == Some("nats_key"))
}

/// Stores another URL of the server that this machine joined, after the server was reached there. The port of NATS stays the
/// same.
pub async fn change_url(out: Output, paths: &Paths, joined: Membership, url: &str) -> anyhow::Result<Membership> {
    let url = server_url(url)?;
    if joined.url == url {
        return Ok(joined);
    }
    let tls = tls::trust_only(&membership::authority_file(&paths.data, joined.token_id))?;
    let http = outbound::tls_api_client(tls).context("cannot create an HTTP client")?;
    match Client::new(http, &url, "").check_ready().await {
        Ok(()) | Err(ClientError::Refused { .. }) => {}
        Err(error) => return Err(describe(&error)),
    }
    let port = joined.nats_url.rsplit(':').next().unwrap_or_default();
    let nats_url = format!("tls://{}:{port}", host_of(&url)?);
    out.status(&format!("the server that this machine joined is at {url} now, no longer at {}", joined.url));
    let moved = Membership { url, nats_url, ..joined };
    moved.write(paths, None)?;
    Ok(moved)
}

/// The root URL of a server: `host`, `host:port` or a URL with HTTPS.
fn server_url(text: &str) -> anyhow::Result<String> {
    let wrong = || {
        exit::usage(format!("{text:?} is not the URL of a server: it must be like https://192.168.1.5:{DEFAULT_PORT}"))
    };
    if text.starts_with("http://") {
        return Err(exit::usage(format!("{text} is not encrypted: joining needs https://")));
    }
    let with_scheme = if text.contains("://") { text.to_owned() } else { format!("https://{text}") };
    let mut url = reqwest::Url::parse(&with_scheme).map_err(|_| wrong())?;
    if url.scheme() != "https" || !matches!(url.path(), "" | "/") || url.query().is_some() || url.host_str().is_none() {
        return Err(wrong());
    }
    let host_and_port = with_scheme.trim_start_matches("https://").trim_end_matches('/');
    if url.port().is_none() && !host_and_port.ends_with(":443") {
        url.set_port(Some(DEFAULT_PORT)).map_err(|()| wrong())?;
    }
    Ok(url.as_str().trim_end_matches('/').to_owned())
}

fn host_of(url: &str) -> anyhow::Result<String> {
    let host = reqwest::Url::parse(url).ok().and_then(|url| url.host_str().map(str::to_owned));
    host.with_context(|| format!("{url} has no host"))
}

fn describe(error: &ClientError) -> anyhow::Error {
    match error {
        ClientError::Unreachable { url, source } => {
            if let Some(problem) = tls::certificate_problem(source) {
                return exit::usage(format!(
                    "the certificate of {url} is not accepted, because {problem}; no token was sent. Check the address, and \
                     that the token is of that server"
                ));
            }
            if tls::is_not_tls(source) {
                return exit::usage(format!(
                    "{url} does not use TLS: check the port ({DEFAULT_PORT} by default), and that the server was started with \
                     `cfq up --lan`"
                ));
            }
            exit::unreachable(format!(
                "cannot reach {url} ({}): check that `cfq up --lan` runs there, and that its firewall lets this port and that \
                 of NATS through (by default 7710 and 7711)",
                connect::root_cause(source)
            ))
        }
        ClientError::Refused { status: 401, .. } => {
            exit::usage("that server is of a version that machines cannot join: install this version there".to_owned())
        }
        ClientError::Refused { status, body } if *status < 500 => exit::usage(body.message.clone()),
        other => exit::failed(connect::describe_error(other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn url_of_a_server_is_completed() {
        for (text, url) in [
            ("192.168.1.5", "https://192.168.1.5:7710"),
            ("den.lan:7000", "https://den.lan:7000"),
            ("https://den.lan/", "https://den.lan:7710"),
            ("https://[fd00::5]:7710", "https://[fd00::5]:7710"),
            ("https://den.lan:443", "https://den.lan"),
        ] {
            assert_eq!(server_url(text).unwrap(), url, "{text}");
        }
        assert_eq!(host_of("https://[fd00::5]:7710").unwrap(), "[fd00::5]");
        let token = JoinToken::new(Uuid::now_v7(), [1; 32], [2; 32]).to_string();
        assert!(check(Some("192.168.1.5"), Some(&token)).is_ok() && check(Some("den.lan"), Some("-")).is_ok());
        let exchanged = check(Some(&token), Some("192.168.1.5")).unwrap_err();
        assert!(exchanged.to_string().contains("the URL comes first"), "{exchanged}");
        assert!(check(None, Some("nothing")).is_err() && check(Some("http://den"), None).is_err());
        for wrong in ["http://den.lan:7710", "", "https://", "ftp://den", "https://den/api", "den lan"] {
            let error = server_url(wrong).unwrap_err();
            assert_eq!(exit::of_error(&error), exit::Code::Usage, "{wrong}");
        }
    }
}
