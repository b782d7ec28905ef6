//! Lines of a log from its pieces, and the errors in them.

use std::time::Duration;

use crate::clock::Timestamp;
use crate::discover::ContainerId;
use crate::parse::cuda_oom::CudaOomText;
use crate::parse::log_error::{ErrorFinder, LogError, MAX_LINES, with_next_lines};
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

/// The errors in the lines of one log. Of an error whose line lacks numbers, the lines behind it may have them: it is held back for them.
#[derive(Debug, Default)]
pub struct ErrorReader {
    finder: ErrorFinder,
    open: Option<OpenError>,
}

/// An error that is held back.
#[derive(Debug)]
struct OpenError {
    found: CudaOomText,
    /// When its line was written.
    at: Timestamp,
    /// When it was read.
    read_at: Timestamp,
    lines: Vec<String>,
}

impl ErrorReader {
    /// Adds a line, and calls `each` with every error that is complete.
    pub fn add(
        &mut self,
        at: Timestamp,
        now: Timestamp,
        line: &str,
        mut each: impl FnMut(Timestamp, LogError),
    ) {
        match self.finder.find(line) {
            Some(LogError::Cuda(found)) => {
                self.end(&mut each);
                if found.total.is_some() {
                    return each(at, LogError::Cuda(found));
                }
                self.open = Some(OpenError { found, at, read_at: now, lines: vec![line.to_owned()] });
            }
            Some(error) => {
                self.end(&mut each);
                each(at, error);
            }
            None => {
                let Some(open) = &mut self.open else { return };
                open.lines.push(line.to_owned());
                let joined = with_next_lines(open.found, &open.lines);
                if joined.total.is_some() || open.lines.len() >= MAX_LINES {
                    open.found = joined;
                    self.end(each);
                }
            }
        }
    }

    /// Calls `each` with an error that has been held back for so long.
    pub fn end_older(&mut self, age: Duration, now: Timestamp, each: impl FnMut(Timestamp, LogError)) {
        if self.open.as_ref().is_some_and(|open| now.since(open.read_at) >= age) {
            self.end(each);
        }
    }

    /// Calls `each` with the error that is held back.
    pub fn end(&mut self, mut each: impl FnMut(Timestamp, LogError)) {
        if let Some(OpenError { found, at, lines, .. }) = self.open.take() {
            each(at, LogError::Cuda(with_next_lines(found, &lines)));
        }
    }
}

/// Returns an error as one that was reported.
pub fn reported(container: &ContainerId, at: Timestamp, text: &CudaOomText) -> ReportedOom {
    ReportedOom {
        at,
        process: None,
        rank: None,
        container: container.clone(),
        device: None,
        skipped: 0,
        errors: 1,
        is_event: true,
        message: OomMessage::of_text(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse::log_error::{HostError, RefusedMemory};

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

    fn cuda(error: LogError) -> CudaOomText {
        let LogError::Cuda(text) = error else { panic!("{error:?}") };
        text
    }

    /// What is around a line decides also where the log is followed.
    #[test]
    fn error_of_the_host_is_known_at_once_and_ends_one_of_a_gpu() {
        let (now, mut reader, mut found) = (Timestamp::now(), ErrorReader::default(), Vec::new());
        for line in [
            "Allocation on device 1 would exceed allowed memory. (out of memory)",
            "MemoryError",
            "  data = data.pin_memory(device)",
            "RuntimeError: CUDA error: out of memory",
        ] {
            reader.add(now, now, line, |_, error| found.push(error));
        }
        assert!(matches!(found[0], LogError::Cuda(_)), "{found:?}");
        let refused = [RefusedMemory::Any, RefusedMemory::Pinned];
        assert_eq!(found[1..], refused.map(|of| LogError::Host(HostError::Refused(of).into())));
    }

    #[test]
    fn line_of_an_error_has_its_numbers_and_no_text() {
        let id = ContainerId::new("a");
        let at = Timestamp::now();
        let line = "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of \
            11.00 GiB of which 1.00 GiB is free. secret";
        let mut errors = Vec::new();
        let mut reader = ErrorReader::default();
        reader.add(at, at, line, |_, _| unreachable!());
        reader.add(at, at, "epoch 3: loss 0.1, memory 3 GiB", |_, _| unreachable!());
        reader.end(|at, error| errors.push(reported(&id, at, &cuda(error))));
        let [found] = &errors[..] else { panic!("{errors:?}") };
        assert_eq!(
            (found.message.tried, found.message.is_uncaught, found.process),
            (Some(2 << 30), false, None)
        );
        assert!(!format!("{found:?}").contains("secret"));
    }

    #[test]
    fn error_waits_for_its_further_lines_and_not_for_ever() {
        let now = Timestamp::now();
        let read = |lines: &[&str]| {
            let (mut reader, mut found) = (ErrorReader::default(), Vec::new());
            lines.iter().for_each(|line| reader.add(now, now, line, |_, error| found.push(cuda(error))));
            let complete = found.len();
            reader.end_older(Duration::from_secs(1), now, |_, _| unreachable!());
            reader.end_older(Duration::from_secs(1), now.plus(Duration::from_secs(1)), |_, error| {
                found.push(cuda(error))
            });
            let tried: Vec<_> = found.iter().map(|text| (text.tried, text.total)).collect();
            (complete, tried)
        };
        let first = "Allocation on device 1 would exceed allowed memory. (out of memory)";
        let rest = [
            "Currently allocated     : 6.00 GiB",
            "Requested               : 320.00 MiB",
            "Device limit            : 24.00 GiB",
            "Free (according to CUDA): 2.00 MiB",
        ];
        let numbers = (Some(320 << 20), Some(24 << 30));
        assert_eq!(read(&[&[first], &rest[..]].concat()), (1, vec![numbers]));
        assert_eq!(read(&[first, "step 3"]), (0, vec![(None, None)]));
        assert_eq!(read(&[&[first], &["x"; 12][..]].concat()), (1, vec![(None, None)]));
        assert_eq!(read(&[&[first, first], &rest[..]].concat()), (2, vec![(None, None), numbers]));
    }
}
