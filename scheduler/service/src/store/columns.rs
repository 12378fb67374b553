//! Conversions between Rust values and database columns.

use serde::Serialize;
use sqlx::encode::IsNull;
use sqlx::error::BoxDynError;
use sqlx::postgres::types::Oid;
use sqlx::postgres::{PgArgumentBuffer, PgTypeInfo};
use sqlx::{Encode, Postgres, Type};

use super::StoreError;

/// Type id of `json` in the catalogue of Postgres; fixed since 9.2.
const JSON_OID: Oid = Oid(114);

/// Binds a value as `json`. sqlx binds its `Json` as `jsonb`, which refuses U+0000; text written by models and users
/// may contain one.
pub(super) struct AsJson<T>(pub T);

impl<T> Type<Postgres> for AsJson<T> {
    fn type_info() -> PgTypeInfo {
        PgTypeInfo::with_oid(JSON_OID)
    }
}

impl<T: Serialize> Encode<'_, Postgres> for AsJson<T> {
    fn encode_by_ref(&self, buffer: &mut PgArgumentBuffer) -> Result<IsNull, BoxDynError> {
        serde_json::to_writer(&mut **buffer, &self.0)?;
        Ok(IsNull::No)
    }
}

/// Parses a stored `text` value into its type; `what` names the value in the error.
pub(super) fn parse<T: std::str::FromStr>(what: &'static str, text: &str) -> Result<T, StoreError> {
    text.parse().map_err(|_| StoreError::Unreadable { what, text: text.to_owned() })
}

/// Text for a `text` column: replaces U+0000, which Postgres cannot store there.
pub(super) fn pg_text(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}
