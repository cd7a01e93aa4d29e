//! Bytes and checksums as lower-case hexadecimal, of exactly one length.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Lower-case hexadecimal.
pub fn encode(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        for nibble in [byte >> 4, byte & 15] {
            text.push(char::from(DIGITS[usize::from(nibble)]));
        }
    }
    text
}

/// The bytes, if the text is lower-case hexadecimal of whole bytes.
pub fn decode(text: &str) -> Option<Vec<u8>> {
    let nibble = |digit: u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    if !rest.is_empty() {
        return None;
    }
    pairs
        .iter()
        .map(|[high, low]| Some(nibble(*high)? << 4 | nibble(*low)?))
        .collect()
}

/// `N` bytes that name something: a digest, a lineage, a generation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes<const N: usize>(pub [u8; N]);

impl<const N: usize> Default for Bytes<N> {
    fn default() -> Self {
        Self([0; N])
    }
}

/// 32 bytes, as a BLAKE3 digest has.
pub type Id = Bytes<32>;

impl<const N: usize> Bytes<N> {
    /// From hexadecimal of exactly this length.
    pub fn parse(text: &str) -> Option<Self> {
        decode(text)?.try_into().ok().map(Self)
    }
}

impl<const N: usize> fmt::Display for Bytes<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&encode(&self.0))
    }
}

impl<const N: usize> fmt::Debug for Bytes<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl<const N: usize> Serialize for Bytes<N> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de, const N: usize> Deserialize<'de> for Bytes<N> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor<const N: usize>;
        impl<const N: usize> de::Visitor<'_> for Visitor<N> {
            type Value = Bytes<N>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{} lower-case hexadecimal digits", N * 2)
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
                Bytes::parse(text).ok_or_else(|| E::invalid_value(de::Unexpected::Str(text), &self))
            }
        }
        deserializer.deserialize_str(Visitor)
    }
}

/// For a field of any number of bytes: `#[serde(with = "hex::blob")]`.
pub(crate) mod blob {
    use super::{Deserialize as _, Deserializer, Serializer, de};

    pub(crate) fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&super::encode(bytes))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<u8>, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        super::decode(&text).ok_or_else(|| de::Error::custom("not lower-case hexadecimal"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_lower_case_of_the_right_length() {
        assert_eq!(encode(&[0, 0x9a, 0xff]), "009aff");
        assert_eq!(decode("009aff"), Some(vec![0, 0x9a, 0xff]));
        for bad in ["0", "0A", "0g", "é"] {
            assert_eq!(decode(bad), None, "{bad}");
        }
        assert_eq!(Bytes::<2>::parse("00ff"), Some(Bytes([0, 255])));
        assert_eq!(Bytes::<2>::parse("00ff00"), None);
    }
}
