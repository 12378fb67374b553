//! Byte offsets in a GGUF file's header, for tests that damage a file.

/// A tensor's entry in the header.
#[derive(Debug, Clone)]
pub struct Tensor {
    pub name: String,
    /// Dimensions in the order of the file: columns first.
    pub dims: Vec<u64>,
    pub kind: u32,
    /// Byte offset, in the file, of the tensor's first dimension.
    pub dims_at: usize,
    /// Byte offset, in the file, of the field with the offset of the tensor's data.
    pub offset_at: usize,
}

/// Layout of a GGUF header, as byte offsets in the file.
#[derive(Debug)]
pub struct Layout {
    /// Byte range of the key-value pairs.
    pub pairs: std::ops::Range<usize>,
    pub tensors: Vec<Tensor>,
    /// Byte offset of the header's end; the tensor data begin after padding.
    pub end: usize,
}

struct Walk<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Walk<'_> {
    fn u32(&mut self) -> u32 {
        self.at += 4;
        u32::from_le_bytes(self.bytes[self.at - 4..self.at].try_into().unwrap())
    }

    fn u64(&mut self) -> u64 {
        self.at += 8;
        u64::from_le_bytes(self.bytes[self.at - 8..self.at].try_into().unwrap())
    }

    fn text(&mut self) -> String {
        let length = self.u64() as usize;
        self.at += length;
        String::from_utf8_lossy(&self.bytes[self.at - length..self.at]).into_owned()
    }

    fn value(&mut self, kind: u32) {
        match kind {
            0 | 1 | 7 => self.at += 1,
            2 | 3 => self.at += 2,
            4..=6 => self.at += 4,
            10..=12 => self.at += 8,
            8 => drop(self.text()),
            9 => {
                let (kind, count) = (self.u32(), self.u64());
                (0..count).for_each(|_| self.value(kind));
            }
            other => panic!("value of kind {other}"),
        }
    }
}

/// Parses the header of a valid GGUF file.
pub fn layout(bytes: &[u8]) -> Layout {
    let mut walk = Walk { bytes, at: 8 };
    let (tensors, pairs) = (walk.u64(), walk.u64());
    let begin = walk.at;
    for _ in 0..pairs {
        walk.text();
        let kind = walk.u32();
        walk.value(kind);
    }
    let pairs = begin..walk.at;
    let tensors = (0..tensors)
        .map(|_| {
            let name = walk.text();
            let count = walk.u32();
            let dims_at = walk.at;
            let dims = (0..count).map(|_| walk.u64()).collect();
            let kind = walk.u32();
            let offset_at = walk.at;
            walk.u64();
            Tensor { name, dims, kind, dims_at, offset_at }
        })
        .collect();
    Layout { pairs, tensors, end: walk.at }
}

/// Byte offset of the value of a metadata key, after its type field.
pub fn value_of(bytes: &[u8], layout: &Layout, key: &str) -> usize {
    let mut name = (key.len() as u64).to_le_bytes().to_vec();
    name.extend_from_slice(key.as_bytes());
    let found = bytes[layout.pairs.clone()].windows(name.len()).position(|w| w == name);
    layout.pairs.start + found.unwrap_or_else(|| panic!("no {key}")) + name.len() + 4
}
