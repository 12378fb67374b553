//! Reads the object ids in the index of a pack (version 2, `gitformat-pack(5)`).

use std::io::{Error, ErrorKind};
use std::path::Path;

use git2::Oid;

const MAGIC: [u8; 8] = [0xff, b't', b'O', b'c', 0, 0, 0, 2];
/// Number of entries of the fan-out table; the last one is the number of objects.
const FAN_OUT: usize = 256;
const ID_BYTES: usize = 20;

/// Ids of all objects in the pack of an index.
pub(super) fn objects_of_index(index: &Path) -> std::io::Result<Vec<Oid>> {
    objects(&std::fs::read(index)?).ok_or_else(|| Error::new(ErrorKind::InvalidData, "not a pack index of version 2"))
}

fn objects(index: &[u8]) -> Option<Vec<Oid>> {
    let tables = index.strip_prefix(&MAGIC)?;
    let count = tables.get(4 * (FAN_OUT - 1)..4 * FAN_OUT)?;
    let count = u32::from_be_bytes(count.try_into().ok()?) as usize;
    let ids = tables.get(4 * FAN_OUT..4 * FAN_OUT + count.checked_mul(ID_BYTES)?)?;
    ids.chunks(ID_BYTES).map(|id| Oid::from_bytes(id).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn truncated_index_is_refused() {
        let mut index = MAGIC.to_vec();
        index.extend([0; 4 * (FAN_OUT - 1)]);
        index.extend([0, 0, 0, 2]);
        assert_eq!(objects(&index), None);
        index.extend([7; 2 * ID_BYTES]);
        assert_eq!(objects(&index).unwrap(), [Oid::from_bytes(&[7; ID_BYTES]).unwrap(); 2]);
        assert_eq!(objects(&index[..100]), None);
        assert_eq!(objects(b"something else"), None);
    }
}
