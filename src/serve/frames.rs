//! Where HTTP/2's frames end: enough of RFC 9113 to tell whether something has begun and is not complete.
//!
//! Not here: what is in them. A frame that hyper refuses ends the connection there.

/// The connection preface that comes before the first frame.
const PREFACE: usize = 24;
/// Bytes before each payload.
const HEAD: usize = 9;
/// HEADERS, PUSH_PROMISE and CONTINUATION carry parts of a header block.
const OF_A_BLOCK: [u8; 3] = [1, 5, 9];
const END_HEADERS: u8 = 4;

/// Cuts bytes into frames.
#[derive(Debug)]
pub struct Frames {
    /// Bytes of the preface, or of a payload, that have to come.
    missing: usize,
    head: [u8; HEAD],
    filled: usize,
    /// A header block goes on in the next frame.
    is_open: bool,
}

impl Default for Frames {
    fn default() -> Self {
        Self { missing: PREFACE, head: [0; HEAD], filled: 0, is_open: false }
    }
}

impl Frames {
    /// Takes what came.
    pub fn take(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let passed = self.missing.min(bytes.len());
            self.missing -= passed;
            bytes = &bytes[passed..];
            let more = (HEAD - self.filled).min(bytes.len());
            self.head[self.filled..self.filled + more].copy_from_slice(&bytes[..more]);
            self.filled += more;
            bytes = &bytes[more..];
            if self.filled == HEAD {
                self.filled = 0;
                let [high, middle, low, kind, flags, ..] = self.head;
                self.missing = usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
                if OF_A_BLOCK.contains(&kind) {
                    self.is_open = flags & END_HEADERS == 0;
                }
            }
        }
    }

    /// True if the last frame is complete, and no header block is open.
    pub fn are_whole(&self) -> bool {
        self.missing == 0 && self.filled == 0 && !self.is_open
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, flags: u8, length: usize) -> Vec<u8> {
        let mut frame = vec![0, (length >> 8) as u8, length as u8, kind, flags, 0, 0, 0, 1];
        frame.resize(HEAD + length, b'x');
        frame
    }

    #[test]
    fn frames_are_whole_at_their_ends_and_nowhere_else_however_they_come() {
        let (settings, headers) = (frame(4, 0, 0), frame(1, END_HEADERS, 300));
        let ends = [PREFACE + settings.len(), PREFACE + settings.len() + headers.len()];
        let all = [vec![b'P'; PREFACE], settings, headers].concat();
        for size in [1, 2, 7, 9, 100] {
            let (mut frames, mut at) = (Frames::default(), 0);
            for bytes in all.chunks(size) {
                frames.take(bytes);
                at += bytes.len();
                // the preface's own end is one too
                assert_eq!(
                    frames.are_whole(),
                    ends.contains(&at) || at == PREFACE,
                    "{at} in steps of {size}"
                );
            }
        }
    }

    #[test]
    fn a_header_block_is_open_until_the_frame_that_says_it_ends() {
        let mut frames = Frames::default();
        frames.take(&[b'P'; PREFACE]);
        frames.take(&frame(1, 0, 5));
        assert!(!frames.are_whole());
        frames.take(&frame(9, 0, 0));
        assert!(!frames.are_whole());
        frames.take(&frame(9, END_HEADERS, 1));
        assert!(frames.are_whole());
    }
}
