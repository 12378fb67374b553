//! Fuzz target for the messages of NATS: any bytes must result in a message or an error, as every type of message. A
//! message that is decoded must be encoded in a form that decodes to the same message.

#![no_main]

use cfq_proto::envelope::{decode, encode};
use cfq_proto::messages::{
    Abandon, Accept, BlobGet, BlobGetReply, BlobPut, BlobPutReply, FenceReply, Heartbeat, HeartbeatReply, JobCancel,
    JobGet, JobReply, JobResult, JobSubmit, Journal, LeaseReply, LeaseRequest, ModelReply, NodeCommand,
    NodeRegistration, PrefillHint, Preparing, Refuse, RegisterReply, Release, RunnerCommand, RunnerRegistration, StepReply,
    StepRequest, TokenFrame, WorkOrder,
};
use libfuzzer_sys::fuzz_target;
use serde::Serialize;
use serde::de::DeserializeOwned;

fn check<T: Serialize + DeserializeOwned>(bytes: &[u8]) {
    let Ok(message) = decode::<T>(bytes) else { return };
    let encoded = encode(&message).unwrap();
    let again = decode::<T>(&encoded).unwrap();
    assert_eq!(encode(&again).unwrap(), encoded, "{}", std::any::type_name::<T>());
}

macro_rules! check_as {
    ($bytes:expr, $($message:ty),+ $(,)?) => { $(check::<$message>($bytes);)+ };
}

fuzz_target!(|bytes: &[u8]| {
    check_as!(
        bytes,
        Abandon,
        Accept,
        BlobGet,
        BlobGetReply,
        BlobPut,
        BlobPutReply,
        FenceReply,
        Heartbeat,
        HeartbeatReply,
        JobCancel,
        JobGet,
        JobReply,
        JobResult,
        JobSubmit,
        Journal,
        LeaseReply,
        LeaseRequest,
        ModelReply,
        NodeCommand,
        NodeRegistration,
        PrefillHint,
        Preparing,
        Refuse,
        RegisterReply,
        Release,
        ActivityReport,
        RunnerCommand,
        RunnerRegistration,
        StepReply,
        StepRequest,
        TokenFrame,
        WorkOrder,
    );
});
