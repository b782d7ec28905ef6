//! The kernel log through syslog(2), which needs CAP_SYSLOG and no device.
//!
//! The one unsafe call of memledger is here: neither std nor rustix has this system call, and libc's function takes a
//! pointer. What is offered to the rest is safe.

#![allow(unsafe_code)]

use rustix::io::Errno;

use super::{ReadError, classify};

const READ_ALL: libc::c_int = 3;
const SIZE_BUFFER: libc::c_int = 10;
/// The texts of a buffer with a stamp before each line need more than the buffer itself.
const ROOM: usize = 2;
/// More is never read: the kernel then leaves out the oldest.
const MOST_BYTES: usize = 32 << 20;

/// How many bytes [`read_all`] wants room for.
///
/// # Errors
/// The system call is forbidden.
pub fn room() -> Result<usize, ReadError> {
    // SAFETY: this action takes no buffer: the pointer is not looked at.
    let size = unsafe { libc::klogctl(SIZE_BUFFER, std::ptr::null_mut(), 0) };
    let size = usize::try_from(size).map_err(|_| error())?;
    Ok(size.saturating_mul(ROOM).clamp(4096, MOST_BYTES))
}

/// Fills `buffer` with the newest whole records that fit into `room` bytes, each line with its level and stamp. Nothing
/// is consumed: other readers see the same.
///
/// # Errors
/// The system call is forbidden.
pub fn read_all(buffer: &mut Vec<u8>, room: usize) -> Result<(), ReadError> {
    buffer.clear();
    buffer.resize(room, 0);
    let length = libc::c_int::try_from(room).unwrap_or(libc::c_int::MAX);
    // SAFETY: the kernel writes at most `length` bytes, and `buffer` has `room` of them, which is not less.
    let got = unsafe { libc::klogctl(READ_ALL, buffer.as_mut_ptr().cast(), length) };
    let got = usize::try_from(got).map_err(|_| error())?;
    buffer.truncate(got);
    Ok(())
}

fn error() -> ReadError {
    let errno = Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO);
    classify(errno, "syslog(2); memledger needs the capability CAP_SYSLOG for it")
}
