//! Which states of an internal pull request may follow which (W3).

use cfq_proto::pr::PrState;

/// Staying where one is is not a move. `Merged` and `Closed` are the end.
pub fn pr_legal(from: PrState, to: PrState) -> bool {
    use PrState::{Approved, Closed, Merged, PendingCoordinator, PendingQc, QcApproved, QcRejected};
    match from {
        PendingQc => matches!(to, QcApproved | QcRejected | Closed),
        QcRejected => matches!(to, PendingQc | Closed),
        QcApproved => matches!(to, PendingCoordinator | Closed),
        // The coordinator approves, or sends it back, which is a new round of quality control.
        PendingCoordinator => matches!(to, Approved | PendingQc | Closed),
        Approved => matches!(to, Merged | Closed),
        Merged | Closed => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_is_as_the_table_says() {
        // Order of PrState::ALL: pending_qc, qc_approved, qc_rejected, pending_coordinator, approved, merged, closed.
        let table = [
            ". x x . . . x",
            ". . . x . . x",
            "x . . . . . x",
            "x . . . x . x",
            ". . . . . x x",
            ". . . . . . .",
            ". . . . . . .",
        ];
        for (from, row) in PrState::ALL.into_iter().zip(table) {
            for (to, cell) in PrState::ALL.into_iter().zip(row.split(' ')) {
                assert_eq!(pr_legal(from, to), cell == "x", "{from} -> {to}");
            }
        }
    }
}
