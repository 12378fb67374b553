//! Fuzz target for the bodies of HTTP requests and replies: any bytes must result in a value or an error, as every type
//! of body. A value that is read must be written in a form that reads as the same value.

#![no_main]

use cfq_proto::event::Event;
use cfq_proto::http::{
    ArtifactChain, CancelRequest, ErrorReply, EventList, ModelAnswer, ModelRequest, NodeView, PrView, ResolveRequest,
    StateReply, SubmitReply, SubmitRequest, TaskDetail, TaskList, TokensData,
};
use libfuzzer_sys::fuzz_target;
use serde::Serialize;
use serde::de::DeserializeOwned;

fn check<T: Serialize + DeserializeOwned>(bytes: &[u8]) {
    // The scheduler reads requests through serde_path_to_error, which names the field of an error.
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    let Ok(body) = serde_path_to_error::deserialize::<_, T>(&mut reader) else { return };
    let written = serde_json::to_vec(&body).unwrap();
    let again = serde_json::from_slice::<T>(&written).unwrap();
    assert_eq!(serde_json::to_vec(&again).unwrap(), written, "{}", std::any::type_name::<T>());
}

macro_rules! check_as {
    ($bytes:expr, $($body:ty),+ $(,)?) => { $(check::<$body>($bytes);)+ };
}

fuzz_target!(|bytes: &[u8]| {
    check_as!(
        bytes,
        ArtifactChain,
        CancelRequest,
        ErrorReply,
        Event,
        EventList,
        ModelAnswer,
        ModelRequest,
        NodeView,
        PrView,
        ResolveRequest,
        StateReply,
        SubmitReply,
        SubmitRequest,
        TaskDetail,
        TaskList,
        TokensData,
    );
});
