//! Groups of users, by the host's name services: files, LDAP, SSSD. The only unsafe code for them.

#![allow(unsafe_code)]

use std::ffi::{CString, c_char};
use std::io;
use std::mem::MaybeUninit;
use std::ptr;

/// Longest entry of a group that is read: those of large directories list thousands of members.
const MAX_ENTRY: usize = 4 << 20;

/// Returns the number of a group, given by name or number; `None` if there is no such name.
///
/// # Errors
/// The name services cannot be asked.
pub fn group_id(group: &str) -> io::Result<Option<u32>> {
    if let Ok(number) = group.parse() {
        return Ok(Some(number));
    }
    let Ok(name) = CString::new(group) else { return Ok(None) };
    let mut buffer: Vec<c_char> = vec![0; 16 << 10];
    loop {
        let (mut entry, mut found) = (MaybeUninit::<libc::group>::uninit(), ptr::null_mut());
        // SAFETY: the name ends with a zero byte, the buffer has the length that is passed, and `found` points to `entry` afterwards,
        // or is null.
        let outcome = unsafe {
            libc::getgrnam_r(name.as_ptr(), entry.as_mut_ptr(), buffer.as_mut_ptr(), buffer.len(), &mut found)
        };
        match outcome {
            libc::ERANGE if buffer.len() < MAX_ENTRY => buffer.resize(buffer.len() * 4, 0),
            // SAFETY: the call has written the entry that it points to.
            0 if !found.is_null() => return Ok(Some(unsafe { (*found).gr_gid })),
            // several codes mean that there is none: getgrnam(3)
            0 | libc::ENOENT | libc::ESRCH | libc::EBADF | libc::EPERM => return Ok(None),
            error => return Err(io::Error::from_raw_os_error(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn group_is_known_by_name_or_number() {
        assert_eq!(group_id("root").unwrap(), Some(0));
        assert_eq!(group_id("4242").unwrap(), Some(4242));
        for unknown in ["no-such-group-here", "a\0b", ""] {
            assert_eq!(group_id(unknown).unwrap(), None, "{unknown:?}");
        }
    }
}
