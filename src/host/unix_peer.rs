//! The process at the other end of a Unix socket, as the kernel knows it.
//!
//! rustix reads these credentials into a pid that must not be 0, and 0 is what the kernel reports for a process that is
//! not visible in our pid namespace. It also has no SO_PEERPIDFD. The functions here are safe.

#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// Linux 6.5; the number is the same on x86-64 and ARM64. libc has it for some targets only.
const SO_PEERPIDFD: libc::c_int = 77;
/// Room for the credentials and nothing else, so that the kernel closes descriptors that a client sends.
const CONTROL_BYTES: usize = 32;

/// One received packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// Bytes in the buffer.
    pub len: usize,
    /// The packet was longer than the buffer.
    pub is_truncated: bool,
    /// Pid of the process that sent it, 0 if that is not visible here; `None` at the end of the connection.
    pub sender: Option<u32>,
}

/// Returns the process that connected, with a pidfd; `None` if it is not visible in our pid namespace.
///
/// Before Linux 6.5 the pidfd is opened by the pid, which a process that ended before it was accepted can have lost to another.
///
/// # Errors
/// The process has ended, or the descriptor is not a connected Unix socket.
pub fn connected_process(socket: impl AsFd) -> Result<Option<(Pid, OwnedFd)>, Errno> {
    let mut credentials = MaybeUninit::<libc::ucred>::zeroed();
    option(&socket, libc::SO_PEERCRED, &mut credentials)?;
    // SAFETY: the kernel filled it in, and every bit pattern is valid for its three integers.
    let Some(pid) = Pid::from_raw(unsafe { credentials.assume_init() }.pid) else { return Ok(None) };
    let mut pidfd = MaybeUninit::<RawFd>::zeroed();
    let pidfd = match option(&socket, SO_PEERPIDFD, &mut pidfd) {
        // SAFETY: the kernel returned a new descriptor, and nothing else owns it.
        Ok(()) => unsafe { OwnedFd::from_raw_fd(pidfd.assume_init()) },
        Err(Errno::NOPROTOOPT) => pidfd_open(pid, PidfdFlags::empty())?,
        Err(error) => return Err(error),
    };
    Ok(Some((pid, pidfd)))
}

/// Returns whether the process of a pidfd has ended. While it has not, the files in `/proc` of its pid are its own.
pub fn has_ended(pidfd: impl AsFd) -> bool {
    let mut polled = [PollFd::new(&pidfd, PollFlags::IN)];
    poll(&mut polled, Some(&Timespec::default())) != Ok(0) // an error means that nothing is known about it
}

/// Receives one packet without waiting, with the pid of its sender. The socket must have SO_PASSCRED.
///
/// # Errors
/// `AGAIN` if there is none.
pub fn receive(socket: impl AsFd, buffer: &mut [u8]) -> Result<Packet, Errno> {
    let mut control = [0_u64; CONTROL_BYTES / 8]; // aligned as the kernel's headers need it
    let mut data = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: all fields of msghdr are integers and pointers, for which zero is valid.
    let mut header: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    header.msg_iov = &mut data;
    header.msg_iovlen = 1;
    header.msg_control = control.as_mut_ptr().cast();
    header.msg_controllen = CONTROL_BYTES as _;
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: the header points to `data` and `control`, which live longer than the call, with their sizes.
    let received = unsafe { libc::recvmsg(socket.as_fd().as_raw_fd(), &mut header, flags) };
    let len = usize::try_from(received).map_err(|_| last_error())?;
    // SAFETY: the kernel filled in the control part of this header.
    let sender = unsafe { sender(&header) };
    Ok(Packet { len, is_truncated: header.msg_flags & libc::MSG_TRUNC != 0, sender })
}

/// # Safety
/// The header is one that recvmsg(2) filled in, and its control buffer still exists.
unsafe fn sender(header: &libc::msghdr) -> Option<u32> {
    // SAFETY: the caller's promise.
    let first = unsafe { libc::CMSG_FIRSTHDR(header).as_ref() }?;
    if (first.cmsg_level, first.cmsg_type) != (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) {
        return None;
    }
    // SAFETY: the kernel writes a whole ucred behind a header of this type; the position may be unaligned.
    let credentials = unsafe { libc::CMSG_DATA(first).cast::<libc::ucred>().read_unaligned() };
    Some(credentials.pid.cast_unsigned())
}

fn option<T>(socket: impl AsFd, name: libc::c_int, value: &mut MaybeUninit<T>) -> Result<(), Errno> {
    let mut size = size_of::<T>() as libc::socklen_t;
    let socket = socket.as_fd().as_raw_fd();
    // SAFETY: the kernel writes at most `size` bytes to `value`.
    let outcome =
        unsafe { libc::getsockopt(socket, libc::SOL_SOCKET, name, value.as_mut_ptr().cast(), &mut size) };
    if outcome == 0 { Ok(()) } else { Err(last_error()) }
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, send, socketpair, sockopt};

    #[test]
    fn packet_has_pid_of_sender_and_end_has_none() {
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        sockopt::set_socket_passcred(&ours, true).unwrap();
        let (pid, pidfd) = connected_process(&ours).unwrap().unwrap();
        assert_eq!(pid, rustix::process::getpid());
        assert!(!has_ended(pidfd));
        let mut buffer = [0; 4];
        assert_eq!(receive(&ours, &mut buffer), Err(Errno::AGAIN));
        for (sent, len) in [(&b"abc"[..], 3), (b"", 0), (b"abcdef", 4)] {
            send(&theirs, sent, SendFlags::empty()).unwrap();
            let wanted = Packet { len, is_truncated: sent.len() > 4, sender: Some(std::process::id()) };
            assert_eq!(receive(&ours, &mut buffer), Ok(wanted));
        }
        drop(theirs);
        assert_eq!(receive(&ours, &mut buffer), Ok(Packet { len: 0, is_truncated: false, sender: None }));
    }
}
