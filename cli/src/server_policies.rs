//! The server policies, for commands that show what the agents see.

use std::path::Path;

use cfq_agent_runner::ServerPolicies;

use crate::connect;

/// Reads the server policies in `folder`; `None` if `CFQ_URL` names another server than that of the data folder, because
/// its policies are on its machine.
pub fn read(data: &Path, folder: &Path) -> Option<ServerPolicies> {
    connect::foreign_url(data).is_none().then(|| ServerPolicies::read(folder))
}
