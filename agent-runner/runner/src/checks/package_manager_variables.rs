//! Environment variables by which package managers find the proxy and the system's certificates.

use std::ffi::OsString;
use std::path::Path;

use super::registry_proxy::{PROXY_PORT, Registry};

/// The system's certificates, as one file: of Debian and of Fedora.
const CERTIFICATES: [&str; 2] = ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt"];
/// Variables by which package managers find the proxy and the system's certificates, and print no progress. Java reads
/// properties instead.
pub(super) fn package_manager_variables(registries: &[Registry]) -> Vec<(OsString, OsString)> {
    let proxy = format!("http://127.0.0.1:{PROXY_PORT}");
    let java =
        ["http", "https"].map(|scheme| format!("-D{scheme}.proxyHost=127.0.0.1 -D{scheme}.proxyPort={PROXY_PORT}"));
    // Without it, Maven 3.9 ignores these properties.
    let maven = "-Daether.connector.http.useSystemProperties=true -Daether.transport.http.useSystemProperties=true";
    let mut variables = vec![("JAVA_TOOL_OPTIONS".into(), format!("{} {maven}", java.join(" ")).into())];
    let of_proxy =
        ["http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "npm_config_proxy", "npm_config_https_proxy"];
    variables.extend(of_proxy.map(|name| (name.into(), proxy.clone().into())));
    // Servers that the preparation starts, unless a registry has the same name: one of this machine.
    let bypasses_proxy = |name: &&str| !registries.iter().any(|registry| registry.host() == *name);
    let local: Vec<_> = ["localhost", "127.0.0.1"].into_iter().filter(bypasses_proxy).collect();
    variables.extend(["no_proxy", "NO_PROXY"].map(|name| (name.into(), local.join(",").into())));
    if let Some(file) = CERTIFICATES.into_iter().find(|file| Path::new(file).is_file()) {
        let of_certificates = ["SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE", "PIP_CERT"];
        variables.extend(of_certificates.map(|name| (name.into(), file.into())));
    }
    let settings = [
        ("UV_SYSTEM_CERTS", "1"),
        ("PIP_PROGRESS_BAR", "off"),
        // A refused host is not tried for minutes.
        ("PIP_RETRIES", "1"),
        ("npm_config_update_notifier", "false"),
        ("npm_config_audit", "false"),
        ("npm_config_fund", "false"),
    ];
    variables.extend(settings.map(|(name, value)| (name.into(), value.into())));
    variables
}
