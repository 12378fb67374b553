//! The private certificate authority of a cluster, and the certificate of this machine's servers. The authority is
//! created once; the servers' certificate is issued again at each start, for the names and addresses of that moment.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::path::PathBuf;

use cfq_link::child::Account;
use cfq_link::clock;
use cfq_link::tls::SERVER_NAME;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use serde::{Deserialize, Serialize};

use crate::files::{self, FileError};
use crate::paths::Paths;

/// Name of the certificate authority, in its certificate and in those that it issues.
const AUTHORITY_NAME: &str = "cfq cluster authority";
/// How long a certificate of the servers is valid. It is issued again at each start.
const SERVER_YEARS: i64 = 2;
const AUTHORITY_YEARS: i64 = 50;
const SECONDS_PER_YEAR: i64 = 31_556_952;
/// Certificates are valid from so long before they are issued, for machines whose clocks are slow.
const CLOCK_TOLERANCE_SECONDS: i64 = 2 * 24 * 3600;

#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error(
        "{path} is not a usable key of a certificate authority; restore it from a backup. If you remove it, all \
             machines have to join again"
    )]
    AuthorityKey { path: PathBuf, source: rcgen::Error },
    #[error(
        "{path} is missing: restore it from a backup. To create another authority instead, remove server.pem in the same \
             folder; then all machines have to join again"
    )]
    KeyLost { path: PathBuf },
    #[error("cannot issue a certificate")]
    Issue(#[from] rcgen::Error),
}

/// The files for TLS.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CertificateFiles {
    /// Certificate of the authority (PEM).
    pub authority: PathBuf,
    /// Certificate of this machine's servers, followed by that of the authority (PEM).
    pub certificate: PathBuf,
    /// Private key of the servers' certificate (PEM).
    pub key: PathBuf,
}

impl CertificateFiles {
    fn of(paths: &Paths) -> Self {
        let keys = paths.keys();
        Self {
            authority: keys.join("authority.pem"),
            certificate: keys.join("server.pem"),
            key: keys.join("server.key"),
        }
    }
}

/// Creates the authority if there is none, and issues a certificate for [`SERVER_NAME`] and `hosts` (names and IP addresses).
/// The folder of keys must exist. `reader` is the account that the servers run as; the authority's key stays with the current
/// user.
pub fn issue(paths: &Paths, hosts: &[String], reader: Option<Account>) -> Result<CertificateFiles, CertificateError> {
    let files = CertificateFiles::of(paths);
    let key_file = paths.keys().join("authority.key");
    let unusable = |source| CertificateError::AuthorityKey { path: key_file.clone(), source };
    let stored = files::read_if_exists(&key_file)?.map(|key| KeyPair::from_pem(&key)).transpose().map_err(unusable)?;
    if stored.is_none() && files.certificate.exists() {
        return Err(CertificateError::KeyLost { path: key_file });
    }
    let authority = authority_params()?;
    let (is_new, key) = match stored {
        Some(key) => (false, key),
        None => (true, KeyPair::generate()?),
    };
    let certificate = match files::read_if_exists(&files.authority)?.filter(|_| !is_new) {
        Some(certificate) => certificate,
        None => authority.self_signed(&key)?.pem(),
    };
    // Also if it exists: it may come from a backup, or have been written for another account.
    write(&files.authority, certificate.as_bytes(), reader)?;
    if is_new {
        files::write_private(&key_file, key.serialize_pem().as_bytes(), None)?;
    }
    let issuer = Issuer::new(authority, key);
    let names: Vec<String> = hosts.iter().cloned().chain([SERVER_NAME.to_owned()]).collect();
    let mut params = CertificateParams::new(names)?;
    params.distinguished_name = name("cfq server");
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    validity(&mut params, SERVER_YEARS)?;
    let server_key = KeyPair::generate()?;
    let server = params.signed_by(&server_key, &issuer)?.pem();
    write(&files.certificate, format!("{server}{certificate}").as_bytes(), reader)?;
    files::write_private(&files.key, server_key.serialize_pem().as_bytes(), reader)?;
    Ok(files)
}

/// Writes a certificate, which is not secret, so that the account of the servers can read it.
fn write(path: &std::path::Path, content: &[u8], reader: Option<Account>) -> Result<(), FileError> {
    match reader {
        Some(reader) => files::write_for_reader(path, content, reader),
        None => files::write_private(path, content, None),
    }
}

fn name(common: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, common);
    name
}

fn authority_params() -> Result<CertificateParams, CertificateError> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.distinguished_name = name(AUTHORITY_NAME);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    validity(&mut params, AUTHORITY_YEARS)?;
    Ok(params)
}

fn validity(params: &mut CertificateParams, years: i64) -> Result<(), CertificateError> {
    let now = clock::unix_seconds();
    let time = |seconds| {
        time::OffsetDateTime::from_unix_timestamp(seconds).map_err(|_| CertificateError::Issue(rcgen::Error::Time))
    };
    params.not_before = time(now - CLOCK_TOLERANCE_SECONDS)?;
    params.not_after = time(now + years * SECONDS_PER_YEAR)?;
    Ok(())
}

/// Names and addresses at which other machines may reach this one: first the address of the route to other networks, then
/// private IPv4 addresses and the others of its interfaces (also those of container networks), then its host name.
pub fn own_hosts() -> Vec<String> {
    let mut addresses: Vec<IpAddr> = if_addrs::get_if_addrs()
        .unwrap_or_default()
        .into_iter()
        .filter(|interface| !interface.is_loopback() && !interface.is_link_local())
        .map(|interface| interface.ip())
        .collect();
    let route = route_address();
    addresses.sort_by_key(|address| match address {
        address if route == Some(*address) => 0,
        IpAddr::V4(address) if address.is_private() => 1,
        IpAddr::V4(_) => 2,
        IpAddr::V6(_) => 3,
    });
    addresses.dedup();
    let mut hosts: Vec<String> = addresses.iter().map(IpAddr::to_string).collect();
    hosts.extend(certificate_host());
    hosts
}

/// The address from which this machine would send to other networks; `None` without a default route. Nothing is sent: the
/// connection of a UDP socket only looks up the route. The other address is one for documentation (RFC 5737).
fn route_address() -> Option<IpAddr> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9)).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

/// The name of this machine, if it can be used in a certificate.
fn certificate_host() -> Option<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?.trim().to_ascii_lowercase();
    let is_usable = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
    (!name.is_empty() && name.chars().all(is_usable)).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(folder: &tempfile::TempDir) -> Paths {
        let data = folder.path().to_owned();
        std::fs::create_dir(data.join("keys")).unwrap();
        Paths { data, cache: "/nowhere".into(), config: "/nowhere".into() }
    }

    #[test]
    fn authority_is_created_once_and_the_server_certificate_at_each_start() {
        let folder = tempfile::tempdir().unwrap();
        let paths = paths(&folder);
        let read = |path: &PathBuf| std::fs::read_to_string(path).unwrap();
        let first = issue(&paths, &["127.0.0.1".to_owned(), "den".to_owned()], None).unwrap();
        let (authority, server) = (read(&first.authority), read(&first.certificate));
        assert!(server.ends_with(&authority), "the authority's certificate follows the server's");
        let second = issue(&paths, &["127.0.0.1".to_owned()], None).unwrap();
        assert_eq!(read(&second.authority), authority);
        assert_ne!(read(&second.certificate), server);
        std::fs::write(paths.keys().join("authority.key"), "torn").unwrap();
        let error = issue(&paths, &[], None).unwrap_err().to_string();
        assert!(error.contains("authority.key") && error.contains("join again"), "{error}");
    }

    /// The account of the servers reads the authority of a backup, whose files only their owner can read.
    #[test]
    fn restored_authority_is_given_to_the_account_of_the_servers() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let paths = paths(&folder);
        let mode = |path: &PathBuf| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let restored = issue(&paths, &[], None).unwrap().authority;
        let before = std::fs::read(&restored).unwrap();
        assert_eq!(mode(&restored), 0o600);
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        issue(&paths, &[], Some(Account { uid, gid })).unwrap();
        assert_eq!((mode(&restored), std::fs::read(&restored).unwrap()), (0o640, before));
    }

    /// A start that was interrupted before it wrote the key has issued nothing.
    #[test]
    fn authority_is_repaired_but_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let paths = paths(&folder);
        let files = issue(&paths, &[], None).unwrap();
        let key = std::fs::read_to_string(paths.keys().join("authority.key")).unwrap();
        std::fs::remove_file(&files.authority).unwrap();
        issue(&paths, &[], None).unwrap();
        assert_eq!(std::fs::read_to_string(paths.keys().join("authority.key")).unwrap(), key);
        assert!(files.authority.exists());
        std::fs::remove_file(paths.keys().join("authority.key")).unwrap();
        let lost = issue(&paths, &[], None).unwrap_err().to_string();
        assert!(lost.contains("restore it from a backup"), "{lost}");
        std::fs::remove_file(&files.certificate).unwrap();
        issue(&paths, &[], None).unwrap();
    }
}
