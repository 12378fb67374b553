//! Encodings of files. Every file without a zero byte can be edited, and every byte that no edit replaces is kept: a file
//! that is not valid UTF-8 is decoded as Windows-1252, whose decoding by the
//! [Encoding Standard](https://encoding.spec.whatwg.org/#windows-1252) maps each byte to a character of its own.

use std::borrow::Cow;

use encoding_rs::WINDOWS_1252;

/// Encoding of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Encoding {
    /// UTF-8, with or without a byte order mark, which stays a part of the text.
    #[default]
    Utf8,
    /// Windows-1252, also for files in another encoding of one or more bytes.
    Windows1252,
}

/// Reason why a file cannot be decoded: it has a zero byte, so it is binary, or in UTF-16 or UTF-32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("it is not a text file")]
pub struct NotText;

/// Decodes the bytes of a file. [`encode`] returns the same bytes.
///
/// # Errors
/// [`NotText`] if there is a zero byte.
pub fn decode(bytes: &[u8]) -> Result<(Cow<'_, str>, Encoding), NotText> {
    if bytes.contains(&0) {
        return Err(NotText);
    }
    match std::str::from_utf8(bytes) {
        Ok(text) => Ok((Cow::Borrowed(text), Encoding::Utf8)),
        Err(_) => Ok((WINDOWS_1252.decode_without_bom_handling(bytes).0, Encoding::Windows1252)),
    }
}

/// Decodes bytes of this encoding, which may be a part of a file. Bytes that are not UTF-8 are replaced by U+FFFD if the
/// encoding is UTF-8.
pub fn decode_as(bytes: &[u8], encoding: Encoding) -> Cow<'_, str> {
    match encoding {
        Encoding::Utf8 => String::from_utf8_lossy(bytes),
        Encoding::Windows1252 => WINDOWS_1252.decode_without_bom_handling(bytes).0,
    }
}

/// Encodes a text.
///
/// # Errors
/// The first character that the encoding does not have.
pub fn encode(text: &str, encoding: Encoding) -> Result<Cow<'_, [u8]>, char> {
    match encoding {
        Encoding::Utf8 => Ok(Cow::Borrowed(text.as_bytes())),
        Encoding::Windows1252 => match WINDOWS_1252.encode(text) {
            (bytes, _, false) => Ok(bytes),
            (_, _, true) => {
                let is_missing = |c: &char| WINDOWS_1252.encode(c.encode_utf8(&mut [0; 4])).2;
                Err(text.chars().find(is_missing).unwrap_or(char::REPLACEMENT_CHARACTER))
            }
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_kept() {
        let bytes: Vec<u8> = (1..=255).collect();
        let (text, encoding) = decode(&bytes).unwrap();
        assert_eq!(encoding, Encoding::Windows1252);
        assert_eq!(encode(&text, encoding).unwrap(), bytes);
        assert_eq!(text.chars().count(), 255);
    }

    #[test]
    fn utf8_is_recognized_and_zero_bytes_are_refused() {
        assert_eq!(decode("é”".as_bytes()).unwrap(), (Cow::Borrowed("é”"), Encoding::Utf8));
        assert_eq!(decode(b"a\0"), Err(NotText));
    }

    #[test]
    fn character_that_the_encoding_lacks_is_named() {
        assert_eq!(encode("naïve “日”", Encoding::Windows1252), Err('日'));
        assert_eq!(encode("“é”", Encoding::Windows1252).unwrap(), b"\x93\xe9\x94".as_slice());
    }
}
