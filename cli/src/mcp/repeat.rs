//! Repetition of requests whose effect does not depend on how often they are sent.

use std::future::Future;
use std::time::Duration;

use cfq_proto::client::ClientError;

/// Pauses before a request without a response is sent again, in seconds.
const REPEAT_AFTER_S: [u64; 3] = [1, 1, 2];

/// True if the server did not say whether the request took effect.
pub fn is_unanswered(error: &ClientError) -> bool {
    matches!(error, ClientError::Unreachable { .. } | ClientError::Refused { status: 503, .. })
}

/// Sends a request, and repeats it while there is no answer. Returns the last error if there is none for about 4 s.
pub async fn until_answered<T, F>(mut send: impl FnMut() -> F) -> Result<T, ClientError>
where
    F: Future<Output = Result<T, ClientError>>,
{
    for pause in REPEAT_AFTER_S {
        match send().await {
            Err(error) if is_unanswered(&error) => tokio::time::sleep(Duration::from_secs(pause)).await,
            result => return result,
        }
    }
    send().await
}
