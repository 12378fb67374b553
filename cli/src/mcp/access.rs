//! What the tools reach: the scheduler, and the folder of archives.

use std::path::PathBuf;

use cfq_deploy::Paths;
use cfq_proto::client::Client;

use super::error::ToolError;
use crate::connect;

/// Access to the scheduler of a data folder, or to the one in `CFQ_URL`.
#[derive(Debug, Clone)]
pub struct Access {
    data: PathBuf,
    /// Folder of the archives for which the caller names none.
    pub archives: PathBuf,
}

impl Access {
    pub fn new(paths: &Paths) -> Self {
        Self { data: paths.data.clone(), archives: paths.cache.join("archives") }
    }

    /// A client of the scheduler. It is created for each call, because the scheduler may start after the editor, or
    /// restart at another address.
    pub fn client(&self) -> Result<Client, ToolError> {
        Ok(connect::client(&self.data)?)
    }
}
