//! Which versions of nodes and runners work with this scheduler.

/// The reason to refuse a node or runner of this version; `None` if the version is accepted. Only an older minor version is
/// refused: its messages may lack fields that this build needs. Within a minor version, messages only gain optional
/// fields.
pub fn refusal(version: &str) -> Option<String> {
    let own = env!("CARGO_PKG_VERSION");
    let minor = |v: &str| {
        let mut parts = v.split('.').map(|p| p.parse::<u32>().ok());
        Some((parts.next()??, parts.next()??))
    };
    let (sender, scheduler) = (minor(version)?, minor(own)?);
    (sender < scheduler)
        .then(|| format!("its cfq {version} is older than the scheduler's {own}: install {own} there, then restart it"))
}

#[cfg(test)]
mod tests {
    use super::refusal;

    #[test]
    fn only_an_older_minor_version_is_refused() {
        assert_eq!(refusal(env!("CARGO_PKG_VERSION")), None);
        assert_eq!(refusal("99.0.0"), None);
        let reason = refusal("0.0.9").unwrap();
        assert!(reason.contains("0.0.9") && reason.contains("install"), "{reason}");
    }
}
