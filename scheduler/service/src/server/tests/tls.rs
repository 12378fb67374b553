//! Tests of the server with TLS, and of the clients that trust only its authority.

use cfq_deploy::Paths;
use cfq_deploy::certificates::{self, CertificateFiles};
use cfq_link::{outbound, tls};
use reqwest::Client;
use tokio_rustls::rustls;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;

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

fn pinned(authority: [u8; 32]) -> (Client, tls::SeenAuthority) {
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

/// A server may get another address after its certificate was issued. Clients of cfq check its fixed name; others, such as
/// OpenAI clients, check its address.
#[tokio::test]
async fn server_at_another_address_is_accepted_by_clients_of_cfq_only() {
    let certificates = Certificates::new(&["10.1.2.3"]);
    let server = Server::start_with(limits(), Some(certificates.server())).await;
    let (client, _) = pinned(certificates.fingerprint());
    assert_eq!(get(&client, server.address).await.unwrap(), "ok");
    let ordinary = |certificates: &Certificates| {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(&certificates.files.authority).unwrap()).unwrap();
        let config = rustls::ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
        outbound::tls_api_client(config).unwrap()
    };
    let refused = get(&ordinary(&certificates), server.address).await.unwrap_err();
    assert!(tls::certificate_problem(&refused).unwrap().contains("other names"), "{refused:?}");
    let here = Certificates::new(&["127.0.0.1"]);
    let server = Server::start_with(limits(), Some(here.server())).await;
    assert_eq!(get(&ordinary(&here), server.address).await.unwrap(), "ok");
}

#[tokio::test]
async fn server_without_tls_is_told_apart() {
    let plain = Server::start(limits()).await;
    let refused = get(&pinned([1; 32]).0, plain.address).await.unwrap_err();
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
