//! Lines of a log from its pieces, and the errors in them.

use crate::clock::Timestamp;
use crate::discover::ContainerId;
use crate::parse::cuda_oom::CudaOomText;
use crate::reporter::message::OomMessage;
use crate::reporter::ooms::ReportedOom;

/// Longer lines are read in parts, as the runtimes divide them.
pub const MAX_LINE: usize = crate::host::bounds::CONTAINER_LOG_LINE.max_bytes;

/// The line that is being read.
#[derive(Debug)]
pub struct LineBuffer {
    line: Vec<u8>,
    max: usize,
    /// The bytes that end a line.
    ends: &'static [u8],
}

impl Default for LineBuffer {
    fn default() -> Self {
        // a carriage return too: progress bars rewrite their lines
        Self { line: vec![], max: MAX_LINE, ends: b"\n\r" }
    }
}

impl LineBuffer {
    /// Creates a buffer for the records of a runtime, of at most so many bytes.
    pub fn of_records(max: usize) -> Self {
        Self { line: vec![], max, ends: b"\n" }
    }

    /// Adds a part of a log, and calls `each` with every line that ends in it.
    pub fn add(&mut self, mut part: &[u8], mut each: impl FnMut(&str)) {
        while let Some(end) = part.iter().position(|byte| self.ends.contains(byte)) {
            self.extend(&part[..end], &mut each);
            self.end(&mut each);
            part = &part[end + 1..];
        }
        self.extend(part, &mut each);
    }

    /// Ends the line, and calls `each` with it unless it is empty.
    pub fn end(&mut self, mut each: impl FnMut(&str)) {
        if !self.line.is_empty() {
            each(&String::from_utf8_lossy(&self.line));
        }
        self.line.clear();
    }

    fn extend(&mut self, mut part: &[u8], each: &mut impl FnMut(&str)) {
        while self.line.len() + part.len() > self.max {
            let (fitting, rest) = part.split_at(self.max - self.line.len());
            self.line.extend_from_slice(fitting);
            self.end(&mut *each);
            part = rest;
        }
        self.line.extend_from_slice(part);
    }
}

/// Returns the error that a line has; `None` for other lines.
pub fn oom(container: &ContainerId, at: Timestamp, line: &str) -> Option<ReportedOom> {
    let text = CudaOomText::find(line)?;
    Some(ReportedOom {
        at,
        process: None,
        rank: None,
        container: container.clone(),
        device: None,
        skipped: 0,
        errors: 1,
        is_event: true,
        message: OomMessage::of_text(&text),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_become_lines_and_long_ones_are_divided() {
        let mut buffer = LineBuffer::default();
        let mut lines = Vec::new();
        for part in [
            "a",
            "b\nc\n\nd",
            "e\r\n",
            " 3%\r 4%\rCUDA",
            "\r",
            &"x".repeat(MAX_LINE),
            &"y".repeat(9),
            "\n",
            &"z".repeat(2 * MAX_LINE),
            "\nopen",
        ] {
            buffer.add(part.as_bytes(), |line| lines.push(line.to_owned()));
        }
        assert_eq!(lines[..6], ["ab", "c", "de", " 3%", " 4%", "CUDA"]);
        assert_eq!(lines[6..8], ["x".repeat(MAX_LINE), "y".repeat(9)]);
        assert_eq!(lines[8..], ["z".repeat(MAX_LINE), "z".repeat(MAX_LINE)]);
        buffer.add(b"\xff", |_| unreachable!());
        buffer.end(|line| assert_eq!(line, "open\u{fffd}"));
        buffer.end(|_| unreachable!());
    }

    #[test]
    fn line_of_an_error_has_its_numbers_and_no_text() {
        let id = ContainerId::new("a");
        let at = Timestamp::now();
        let line = "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of \
            11.00 GiB of which 1.00 GiB is free. secret";
        let found = oom(&id, at, line).unwrap();
        assert_eq!(
            (found.message.tried, found.message.is_uncaught, found.process),
            (Some(2 << 30), false, None)
        );
        assert!(!format!("{found:?}").contains("secret"));
        assert_eq!(oom(&id, at, "epoch 3: loss 0.1, memory 3 GiB"), None);
    }
}
