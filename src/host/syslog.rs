//! The kernel log through syslog(2), which needs CAP_SYSLOG and no device.
//!
//! std and rustix lack this system call, and libc's function takes a raw pointer; the functions here are safe.

#![allow(unsafe_code)]

use rustix::io::Errno;

use super::{ReadError, classify};

const READ_ALL: libc::c_int = 3;
const SIZE_BUFFER: libc::c_int = 10;
/// The text of the buffer is longer than the buffer, since each line gets a timestamp.
const TEXT_FACTOR: usize = 2;
/// Maximum size of a read; the kernel omits the oldest records beyond it.
const MAX_BYTES: usize = super::bounds::SYSLOG.max_bytes;

/// Returns the buffer size that [`read_all`] needs, in bytes.
///
/// # Errors
/// The system call is not permitted.
pub fn buffer_size() -> Result<usize, ReadError> {
    // SAFETY: this action ignores the pointer.
    let size = unsafe { libc::klogctl(SIZE_BUFFER, std::ptr::null_mut(), 0) };
    let size = usize::try_from(size).map_err(|_| error())?;
    Ok(size.saturating_mul(TEXT_FACTOR).clamp(4096, MAX_BYTES))
}

/// Fills `buffer` with the newest whole records that fit into `capacity` bytes, each line with its level and timestamp.
/// Consumes nothing: other readers see the same records.
///
/// # Errors
/// The system call is not permitted.
pub fn read_all(buffer: &mut Vec<u8>, capacity: usize) -> Result<(), ReadError> {
    buffer.clear();
    buffer.resize(capacity, 0);
    let length = libc::c_int::try_from(capacity).unwrap_or(libc::c_int::MAX);
    // SAFETY: the kernel writes at most `length` bytes, and `buffer` has `capacity` bytes, which is at least `length`.
    let written = unsafe { libc::klogctl(READ_ALL, buffer.as_mut_ptr().cast(), length) };
    let written = usize::try_from(written).map_err(|_| error())?;
    buffer.truncate(written);
    Ok(())
}

fn error() -> ReadError {
    let errno = Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO);
    classify(errno, "syslog(2) (needs the capability CAP_SYSLOG)")
}
