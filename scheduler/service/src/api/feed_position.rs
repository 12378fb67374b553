//! Position of a reader in an event feed, and whether the reader needs a `reset` frame because it missed events. Without
//! I/O.

use cfq_proto::http::FeedResetReason;

use crate::store::{FeedCursor, FeedEpoch, FeedPage, FeedPosition};

/// A reader of the feed of all tasks.
#[derive(Debug, Default)]
pub struct GlobalPosition {
    cursor: FeedCursor,
    epoch: Option<String>,
    /// Position of the last deleted event of which the reader knows; `None` before the first page.
    known_deleted: Option<FeedCursor>,
}

impl GlobalPosition {
    /// A reader that received this position earlier.
    pub fn after(position: FeedPosition) -> Self {
        Self { cursor: position.cursor, epoch: position.epoch, known_deleted: None }
    }

    pub fn cursor(&self) -> FeedCursor {
        self.cursor
    }

    /// The id of the frame with the event at `cursor`, which is now read.
    pub fn advance(&mut self, cursor: FeedCursor) -> FeedPosition {
        self.cursor = cursor;
        FeedPosition { cursor, epoch: self.epoch.clone() }
    }

    /// Compares the position with a page that was read at it. If the database was restored, the events of the page must
    /// not be sent: the reader starts again at the first event.
    pub fn check(&mut self, page: &FeedPage) -> Option<FeedResetReason> {
        let starts = self.cursor == FeedCursor::default();
        let epoch = self.epoch.replace(page.epoch.name.clone());
        let known = self.known_deleted.replace(page.deleted);
        if !starts && (!page.epoch.includes(epoch.as_deref()) || self.cursor.xid >= page.next_xid) {
            self.cursor = FeedCursor::default();
            return Some(FeedResetReason::Restored);
        }
        let known = known.unwrap_or(if starts { page.deleted } else { FeedCursor::default() });
        (known < page.deleted && self.cursor < page.deleted).then_some(FeedResetReason::Deleted)
    }
}

/// Position in the feed of one task: the `task_seq` of an event. Its text form is the id of a server-sent event.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TaskPosition {
    pub task_seq: i64,
    pub epoch: Option<String>,
}

impl TaskPosition {
    /// Whether the reader must start again at the first event, because the database was restored since it received this
    /// position. A position without an epoch, which `cfq watch` sends, is only compared with the last event.
    pub fn is_lost(&self, epoch: &FeedEpoch, last_task_seq: i64) -> bool {
        self.task_seq > last_task_seq || self.epoch.as_ref().is_some_and(|own| *own != epoch.name)
    }
}

impl std::fmt::Display for TaskPosition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.task_seq)?;
        self.epoch.iter().try_for_each(|epoch| write!(f, "-{epoch}"))
    }
}

impl std::str::FromStr for TaskPosition {
    type Err = std::num::ParseIntError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (task_seq, epoch) = text.split_once('-').map_or((text, None), |(seq, epoch)| (seq, Some(epoch.to_owned())));
        Ok(Self { task_seq: task_seq.parse()?, epoch })
    }
}

impl FeedEpoch {
    /// Whether positions with this epoch, or with none, are positions of this epoch.
    fn includes(&self, epoch: Option<&str>) -> bool {
        epoch.map_or(self.is_first, |epoch| epoch == self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(epoch: &str, deleted: (i64, i64), next_xid: i64) -> FeedPage {
        FeedPage {
            epoch: FeedEpoch { name: epoch.into(), is_first: epoch == "first" },
            deleted: FeedCursor { xid: deleted.0, id: deleted.1 },
            next_xid,
            events: Vec::new(),
        }
    }

    fn reader(position: &str) -> GlobalPosition {
        GlobalPosition::after(position.parse().unwrap())
    }

    #[test]
    fn reader_of_another_epoch_starts_again_after_one_reset() {
        for old in ["40-7-first", "40-7", "500-7-second"] {
            let mut reader = reader(old);
            assert_eq!(reader.check(&page("second", (50, 9), 100)), Some(FeedResetReason::Restored), "{old}");
            assert_eq!(reader.cursor(), FeedCursor::default());
            assert_eq!(reader.check(&page("second", (50, 9), 100)), None, "one reset only");
            assert_eq!(reader.advance(FeedCursor { xid: 60, id: 10 }).to_string(), "60-10-second");
        }
        for same in ["40-7-first", "40-7"] {
            assert_eq!(reader(same).check(&page("first", (0, 0), 100)), None, "{same}");
        }
    }

    #[test]
    fn reader_behind_a_deleted_event_gets_a_reset_and_continues() {
        let mut behind = reader("40-7-first");
        assert_eq!(behind.check(&page("first", (50, 9), 100)), Some(FeedResetReason::Deleted));
        assert_eq!(behind.cursor(), FeedCursor { xid: 40, id: 7 }, "the kept events are still sent");
        assert_eq!(behind.check(&page("first", (50, 9), 100)), None, "one reset only");
        assert_eq!(behind.check(&page("first", (60, 9), 100)), Some(FeedResetReason::Deleted), "more was deleted");
        assert_eq!(reader("50-9-first").check(&page("first", (50, 9), 100)), None, "it has read the deleted event");
        let mut new = GlobalPosition::default();
        assert_eq!(new.check(&page("first", (50, 9), 100)), None, "a new reader has no position");
        assert_eq!(new.check(&page("first", (60, 9), 100)), Some(FeedResetReason::Deleted));
    }

    #[test]
    fn position_in_a_task_is_lost_after_a_restore() {
        let epoch = FeedEpoch { name: "second".into(), is_first: false };
        let lost = |text: &str| text.parse::<TaskPosition>().unwrap().is_lost(&epoch, 10);
        assert!(lost("5-first") && lost("11") && lost("11-second"));
        assert!(!lost("5") && !lost("10-second") && !lost("0"));
    }
}
