//! Legal transitions between the states of an internal pull request (W3).

use cfq_proto::pr::PrState;

/// Returns whether a pull request may change from `from` to `to`. Staying in a state is not a transition. `Merged` and
/// `Closed` are terminal.
pub fn pr_transition_allowed(from: PrState, to: PrState) -> bool {
    use PrState::{Approved, Closed, Merged, PendingCoordinator, PendingQc, QcApproved, QcRejected};
    match from {
        PendingQc => matches!(to, QcApproved | QcRejected | Closed),
        QcRejected => matches!(to, PendingQc | Closed),
        QcApproved => matches!(to, PendingCoordinator | Closed),
        // The coordinator approves the pull request or sends it back for another round of quality control.
        PendingCoordinator => matches!(to, Approved | PendingQc | Closed),
        Approved => matches!(to, Merged | Closed),
        Merged | Closed => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_transition_matches_the_table() {
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
                assert_eq!(pr_transition_allowed(from, to), cell == "x", "{from} -> {to}");
            }
        }
    }
}
