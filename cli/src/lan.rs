//! How other machines reach the servers of this one, for `cfq up --lan`.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use cfq_deploy::LanOptions;
use cfq_deploy::certificates::own_hosts;

use crate::config::ServerConfig;

/// Addresses under which other machines reach this one.
#[derive(Debug, Clone)]
pub struct Lan {
    /// Address of the HTTP API.
    pub bind: SocketAddr,
    pub nats_port: u16,
    /// Names and IP addresses of this machine, the most likely one first.
    hosts: Vec<String>,
}

impl Lan {
    /// `bind` is the address that the user chose for the HTTP API, if any; all addresses of this machine otherwise.
    pub fn new(bind: Option<SocketAddr>, server: &ServerConfig) -> Self {
        let bind = match bind {
            Some(bind) => bind,
            None if server.bind.ip().to_canonical().is_loopback() => {
                SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), server.bind.port())
            }
            None => server.bind,
        };
        let mut hosts = match bind.ip() {
            // A socket of IPv6 usually accepts IPv4 too, but not the reverse.
            IpAddr::V4(address) if address.is_unspecified() => {
                own_hosts().into_iter().filter(|host| !matches!(host.parse(), Ok(IpAddr::V6(_)))).collect()
            }
            address if address.is_unspecified() => own_hosts(),
            address => vec![address.to_string()],
        };
        hosts.extend(server.allowed_hosts.iter().cloned());
        if hosts.is_empty() {
            hosts.push(Ipv4Addr::LOCALHOST.to_string());
        }
        Self { bind, nats_port: server.nats_port, hosts }
    }

    /// The same with another address, to which `bind` was resolved.
    pub fn with_bind(self, bind: SocketAddr) -> Self {
        Self { bind, ..self }
    }

    /// Values of the Host header that the API accepts.
    pub fn hosts(&self) -> &[String] {
        &self.hosts
    }

    /// URLs of the API for other machines, the most likely one first.
    pub fn urls(&self) -> Vec<String> {
        let port = self.bind.port();
        let url = |host: &String| match host.parse::<IpAddr>() {
            Ok(address) => format!("https://{}", SocketAddr::new(address, port)),
            Err(_) => format!("https://{host}:{port}"),
        };
        self.hosts.iter().map(url).collect()
    }

    pub fn options(&self) -> LanOptions {
        let local = ["localhost", "127.0.0.1", "::1"].map(str::to_owned);
        let mut hosts: Vec<String> = self.hosts.iter().cloned().chain(local).collect();
        hosts.sort();
        hosts.dedup();
        LanOptions { listen: self.bind.ip(), hosts }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lan(bind: Option<&str>, server: ServerConfig) -> Lan {
        Lan::new(bind.map(|bind| bind.parse().unwrap()), &server)
    }

    #[test]
    fn without_an_address_it_listens_on_all() {
        let all = lan(None, ServerConfig::default());
        assert_eq!(all.bind, "0.0.0.0:7710".parse().unwrap());
        assert!(all.urls().iter().all(|url| url.starts_with("https://") && !url.contains("0.0.0.0")), "{all:?}");
        let chosen = ServerConfig { bind: "10.0.0.5:80".parse().unwrap(), ..ServerConfig::default() };
        assert_eq!(lan(None, chosen).urls(), ["https://10.0.0.5:80"]);
    }

    #[test]
    fn chosen_address_and_further_names_are_in_the_certificate() {
        let server = ServerConfig { allowed_hosts: vec!["queue.lan".to_owned()], ..ServerConfig::default() };
        let one = lan(Some("[fd00::5]:7710"), server);
        assert_eq!(one.urls(), ["https://[fd00::5]:7710", "https://queue.lan:7710"]);
        let hosts = one.options().hosts;
        for host in ["fd00::5", "queue.lan", "127.0.0.1", "localhost"] {
            assert!(hosts.contains(&host.to_owned()), "{host}");
        }
    }
}
