//! Binding a value as `json`. sqlx binds its `Json` as `jsonb`, which refuses U+0000, and what models and users write may
//! hold one.

use serde::Serialize;
use sqlx::encode::IsNull;
use sqlx::error::BoxDynError;
use sqlx::postgres::types::Oid;
use sqlx::postgres::{PgArgumentBuffer, PgTypeInfo};
use sqlx::{Encode, Postgres, Type};

/// `json` in Postgres' catalogue; fixed since 9.2.
const JSON: Oid = Oid(114);

pub(super) struct AsJson<T>(pub T);

impl<T> Type<Postgres> for AsJson<T> {
    fn type_info() -> PgTypeInfo {
        PgTypeInfo::with_oid(JSON)
    }
}

impl<T: Serialize> Encode<'_, Postgres> for AsJson<T> {
    fn encode_by_ref(&self, buffer: &mut PgArgumentBuffer) -> Result<IsNull, BoxDynError> {
        serde_json::to_writer(&mut **buffer, &self.0)?;
        Ok(IsNull::No)
    }
}
