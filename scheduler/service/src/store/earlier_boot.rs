//! The earlier boot of a node or runner that registers: whether its process may be alive, and how it ended.
//!
//! Two processes with one id, for example from a copied folder, would take each other's work. So a registration is
//! refused while the process of the earlier boot may be alive: until its lease ends, unless the new process proves that
//! the earlier one has ended, by holding the same lock.

use cfq_proto::ids::BootId;
use sqlx::PgConnection;

use super::StoreError;
use super::error::Doing;

/// The registration is refused, because the process of another boot may be alive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdInUse {
    /// Time until the lease of the other boot ends, in ms.
    pub lease_ms: u64,
}

/// How an earlier boot ended. The name is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BootEnd {
    /// The process was draining.
    Drained,
    /// The machine was restarted, so no work is suspected.
    MachineRestarted,
    /// The process ended without draining, for example because it crashed.
    Unexpected,
}

impl BootEnd {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Drained => "drained",
            Self::MachineRestarted => "machine_restarted",
            Self::Unexpected => "unexpected",
        }
    }

    /// Reads the stored name. A boot whose end was not recorded ended unexpectedly.
    pub fn from_stored(name: Option<&str>) -> Self {
        [Self::Drained, Self::MachineRestarted]
            .into_iter()
            .find(|end| name == Some(end.as_str()))
            .unwrap_or(Self::Unexpected)
    }
}

/// The boot that has the id when another process registers with it.
#[derive(Debug, Clone)]
pub(super) struct EarlierBoot {
    pub boot: BootId,
    pub machine_boot: Option<String>,
    pub credentials_lock: Option<String>,
    pub is_draining: bool,
    /// Whether the boot holds a job or task.
    pub holds_work: bool,
    /// Time until its lease ends, in ms; 0 if it has ended.
    pub lease_ms: i64,
}

/// The boot that registers.
#[derive(Debug, Clone, Copy)]
pub(super) struct NewBoot<'a> {
    pub boot: BootId,
    pub machine_boot: Option<&'a str>,
    pub credentials_lock: Option<&'a str>,
}

impl EarlierBoot {
    /// Whether the new boot may replace this one. Boot ids are ordered by start time, so a registration that arrives
    /// late, after a later boot's, proves nothing.
    pub fn check(&self, new: NewBoot<'_>) -> Result<(), IdInUse> {
        let is_later = self.boot < new.boot;
        let same_lock = new.credentials_lock.is_some() && self.credentials_lock.as_deref() == new.credentials_lock;
        let has_stopped = self.is_draining && !self.holds_work;
        if self.boot == new.boot || (is_later && (same_lock || has_stopped)) {
            return Ok(());
        }
        match u64::try_from(self.lease_ms) {
            Ok(lease_ms @ 1..) => Err(IdInUse { lease_ms }),
            Ok(0) | Err(_) => Ok(()),
        }
    }

    /// Whether the new boot runs on another start of the machine, or on another machine.
    pub fn is_other_machine_boot(&self, new: NewBoot<'_>) -> bool {
        self.machine_boot.as_deref().zip(new.machine_boot).is_some_and(|(before, now)| before != now)
    }

    /// How this boot ended, when the new one replaces it.
    pub fn end(&self, new: NewBoot<'_>) -> BootEnd {
        match (self.is_draining, self.is_other_machine_boot(new)) {
            (true, _) => BootEnd::Drained,
            (false, true) => BootEnd::MachineRestarted,
            (false, false) => BootEnd::Unexpected,
        }
    }
}

/// Lets the next boot of each node and runner count as one after a restart of its machine. In a restored database, how the
/// earlier boot ended says nothing about its work.
pub(super) async fn forget_machine_boots(connection: &mut PgConnection) -> Result<(), StoreError> {
    let restored = "restored";
    sqlx::query!("with runners as (update runners set machine_boot = $1) update nodes set machine_boot = $1", restored)
        .execute(connection)
        .await
        .doing("forgetting the boots of the machines")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn earlier(lease_ms: i64) -> EarlierBoot {
        EarlierBoot {
            boot: BootId::fresh(),
            machine_boot: Some("monday".into()),
            credentials_lock: Some("monday:8:1".into()),
            is_draining: false,
            holds_work: true,
            lease_ms,
        }
    }

    fn new(lock: &str) -> NewBoot<'_> {
        NewBoot { boot: BootId::fresh(), machine_boot: Some("monday"), credentials_lock: Some(lock) }
    }

    #[test]
    fn only_the_same_lock_or_the_end_of_the_lease_gives_the_id_to_another_boot() {
        let live = earlier(4_000);
        assert_eq!(live.check(new("monday:8:1")), Ok(()), "the lock is free, so the earlier process has ended");
        assert_eq!(live.check(new("monday:8:2")), Err(IdInUse { lease_ms: 4_000 }), "a copied file");
        assert_eq!(live.check(NewBoot { credentials_lock: None, ..new("") }), Err(IdInUse { lease_ms: 4_000 }));
        let without_lock = EarlierBoot { credentials_lock: None, ..earlier(4_000) };
        let also_without = NewBoot { credentials_lock: None, ..new("") };
        assert_eq!(without_lock.check(also_without), Err(IdInUse { lease_ms: 4_000 }), "no lock proves nothing");
        for ended in [0, -5] {
            assert_eq!(EarlierBoot { lease_ms: ended, ..live.clone() }.check(new("monday:8:2")), Ok(()));
        }
    }

    #[test]
    fn registration_of_an_older_boot_waits_although_it_has_the_same_lock() {
        let older = new("monday:8:1");
        let live = earlier(4_000);
        assert_eq!(live.check(older), Err(IdInUse { lease_ms: 4_000 }));
        assert_eq!(live.check(NewBoot { boot: live.boot, ..older }), Ok(()), "it registers again");
    }

    #[test]
    fn drained_boot_is_replaced_once_it_holds_no_work() {
        let draining = EarlierBoot { is_draining: true, ..earlier(4_000) };
        assert_eq!(draining.check(new("copy")), Err(IdInUse { lease_ms: 4_000 }));
        assert_eq!(EarlierBoot { holds_work: false, ..draining }.check(new("copy")), Ok(()));
    }

    #[test]
    fn stored_ends_are_read_back() {
        for end in [BootEnd::Drained, BootEnd::MachineRestarted, BootEnd::Unexpected] {
            assert_eq!(BootEnd::from_stored(Some(end.as_str())), end);
        }
        assert_eq!(BootEnd::from_stored(None), BootEnd::Unexpected);
    }
}
