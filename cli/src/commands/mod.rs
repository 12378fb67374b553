//! The commands, one file each.

pub mod completions;
pub mod control;
pub mod dead;
pub mod demo;
pub mod diff;
pub mod doctor;
pub mod down;
pub mod engine;
pub mod explain;
pub mod gc;
pub mod jobs;
pub mod logs;
pub mod ls;
pub mod models;
pub mod nodes;
pub mod pr;
pub mod pull;
pub mod resolve;
pub mod schedule;
pub mod serve;
pub mod services;
pub mod show;
pub mod submit;
pub mod token;
pub mod up;
pub mod watch;
