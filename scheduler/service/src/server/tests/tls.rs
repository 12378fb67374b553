//! Tests of the server with TLS, and of the clients that trust only its authority.

use cfq_deploy::Paths;
use cfq_deploy::certificates::{self, CertificateFiles};
use cfq_link::{outbound, tls};
use reqwest::Client;

use super::*;

struct Certificates {
    folder: tempfile::TempDir,
    files: CertificateFiles,
}

impl Certificates {
    fn new(hosts: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("keys")).unwrap();
        let data = folder.path().to_owned();
        let paths = Paths { data, cache: "/nowhere".into(), config: "/nowhere".into() };
        let hosts: Vec<String> = hosts.iter().map(|&host| host.to_owned()).collect();
        let files = certificates::issue(&paths, &hosts, None).unwrap();
        Self { folder, files }
    }

    fn server(&self) -> Tls {
        Tls::load(&self.files.certificate, &self.files.key).unwrap()
    }

    fn fingerprint(&self) -> [u8; 32] {
        tls::fingerprint_of_file(&self.files.authority).unwrap()
    }
}

fn pinned(authority: [u8; 32]) -> (Client, tls::PinnedAuthority) {
    let (config, seen) = tls::trust_only_fingerprint(authority);
    (outbound::tls_api_client(config).unwrap(), seen)
}

async fn get(client: &Client, address: SocketAddr) -> Result<String, reqwest::Error> {
    client.get(format!("https://{address}/")).send().await?.text().await
}

#[tokio::test]
async fn tls_and_plain_http_of_this_machine_are_served_on_one_port() {
    let certificates = Certificates::new(&["127.0.0.1"]);
    let server = Server::start_with(limits(), Some(certificates.server())).await;
    read_until(&mut server.send(REQUEST).await, "ok").await;
    let trusting = outbound::tls_api_client(tls::trust_only(&certificates.files.authority).unwrap()).unwrap();
    assert_eq!(get(&trusting, server.address).await.unwrap(), "ok");
    let large = trusting.get(format!("https://{}/large", server.address)).send().await.unwrap().bytes().await.unwrap();
    assert_eq!(large.len(), LARGE_BYTES);
}

#[tokio::test]
async fn client_accepts_only_the_authority_of_its_token() {
    let (certificates, other) = (Certificates::new(&["127.0.0.1"]), Certificates::new(&["127.0.0.1"]));
    let server = Server::start_with(limits(), Some(certificates.server())).await;
    let (client, seen) = pinned(certificates.fingerprint());
    assert_eq!(seen.pem(), None);
    assert_eq!(get(&client, server.address).await.unwrap(), "ok");
    let file = certificates.folder.path().join("seen.pem");
    std::fs::write(&file, seen.pem().unwrap()).unwrap();
    assert_eq!(tls::fingerprint_of_file(&file).unwrap(), certificates.fingerprint());

    let (client, seen) = pinned(other.fingerprint());
    let refused = get(&client, server.address).await.unwrap_err();
    assert!(tls::certificate_problem(&refused).unwrap().contains("expected authority"), "{refused:?}");
    assert_eq!(seen.pem(), None);
    let trusting = outbound::tls_api_client(tls::trust_only(&other.files.authority).unwrap()).unwrap();
    assert!(tls::certificate_problem(&get(&trusting, server.address).await.unwrap_err()).is_some());
}

/// The authority's certificate alone proves nothing: anybody who saw it can send it.
#[tokio::test]
async fn server_that_only_shows_the_authority_is_refused() {
    let (certificates, other) = (Certificates::new(&["127.0.0.1"]), Certificates::new(&["127.0.0.1"]));
    let chain = other.folder.path().join("chain.pem");
    let leaf = std::fs::read_to_string(&other.files.certificate).unwrap();
    let authority = std::fs::read_to_string(&certificates.files.authority).unwrap();
    std::fs::write(&chain, format!("{leaf}{authority}")).unwrap();
    let server = Server::start_with(limits(), Some(Tls::load(&chain, &other.files.key).unwrap())).await;
    let (client, seen) = pinned(certificates.fingerprint());
    let refused = get(&client, server.address).await.unwrap_err();
    assert!(tls::certificate_problem(&refused).is_some(), "{refused:?}");
    assert_eq!(seen.pem(), None);
}

#[tokio::test]
async fn certificate_for_other_hosts_and_server_without_tls_are_told_apart() {
    let certificates = Certificates::new(&["10.1.2.3"]);
    let server = Server::start_with(limits(), Some(certificates.server())).await;
    let (client, _) = pinned(certificates.fingerprint());
    let refused = get(&client, server.address).await.unwrap_err();
    assert!(tls::certificate_problem(&refused).unwrap().contains("other names"), "{refused:?}");
    assert!(!tls::is_not_tls(&refused));
    let plain = Server::start(limits()).await;
    let refused = get(&client, plain.address).await.unwrap_err();
    assert!(tls::is_not_tls(&refused) && tls::certificate_problem(&refused).is_none(), "{refused:?}");
}

#[tokio::test]
async fn handshake_that_does_not_end_is_closed() {
    let certificates = Certificates::new(&["127.0.0.1"]);
    let limits = ConnectionLimits { request_head_timeout: Duration::from_millis(300), ..limits() };
    let server = Server::start_with(limits, Some(certificates.server())).await;
    for bytes in ["", "\u{16}", "\u{16}\u{3}\u{1}"] {
        closed(&mut server.send(bytes).await).await;
    }
    assert_eq!(get(&pinned(certificates.fingerprint()).0, server.address).await.unwrap(), "ok");
}
