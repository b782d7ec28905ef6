//! One line of `/proc/PID/mountinfo`. Bytes: a mount point may contain any.

/// A mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mount<'a> {
    /// Its mount point, with the kernel's octal escapes.
    pub mount_point: &'a [u8],
    /// The type of its file system.
    pub fs_type: &'a [u8],
}

/// Returns the mount with this id.
///
/// The fields of a line: id, parent, device, root, mount point, options, any number of tags, `-`, type, source, options.
pub fn find(mountinfo: &[u8], id: u64) -> Option<Mount<'_>> {
    super::lines(mountinfo).find_map(|line| {
        let mut fields = line.split(|&b| b == b' ');
        if super::number(fields.next()?)? != id {
            return None;
        }
        let mount_point = fields.nth(3)?;
        let fs_type = fields.skip_while(|field| field != b"-").nth(1)?;
        Some(Mount { mount_point, fs_type })
    })
}

/// Returns major and minor number of the device that is mounted there, by the last of these mounts, which hides the others.
pub fn device_at(mountinfo: &[u8], mount_point: &[u8]) -> Option<(u32, u32)> {
    let devices = super::lines(mountinfo).filter_map(|line| {
        let mut fields = line.split(|&b| b == b' ').skip(2);
        let device = fields.next()?;
        if fields.nth(1)? != mount_point {
            return None;
        }
        let mut numbers = device.split(|&b| b == b':').map(|part| u32::try_from(super::number(part)?).ok());
        Some((numbers.next()??, numbers.next()??))
    });
    devices.last()
}

/// A device, by its major and minor number, and the size of its file system in bytes.
pub type SizedDevice = ((u32, u32), u64);

/// Returns what is mounted there, by the last of these mounts: `None` if nothing is, `Some(None)` if it is no tmpfs with a size limit.
pub fn tmpfs_at(mountinfo: &[u8], mount_point: &[u8]) -> Option<Option<SizedDevice>> {
    device_at(mountinfo, mount_point).map(|device| Some((device, size_at(mountinfo, mount_point)?)))
}

fn size_at(mountinfo: &[u8], mount_point: &[u8]) -> Option<u64> {
    let is_there = |line: &&[u8]| line.split(|&b| b == b' ').nth(4) == Some(mount_point);
    let line = super::lines(mountinfo).filter(is_there).last()?;
    let mut fields = line.split(|&b| b == b' ').skip_while(|field| *field != b"-");
    if fields.nth(1)? != b"tmpfs" {
        return None;
    }
    let size = fields.nth(1)?.split(|&b| b == b',').find_map(|option| option.strip_prefix(b"size="))?;
    let (number, unit) = match size.split_last()? {
        (b'k', number) => (number, 1024),
        _ => (size, 1),
    };
    super::number(number)?.checked_mul(unit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn skips_any_number_of_tags() {
        let text = b"22 1 0:21 / /proc rw - proc proc rw\n25 24 0:23 / /dev/shm rw,nosuid shared:4 master:1 - tmpfs shm rw\n26 25 0:1 / /a\\040b rw - ext4 /dev/x rw\n";
        assert_eq!(find(text, 25), Some(Mount { mount_point: b"/dev/shm", fs_type: b"tmpfs" }));
        assert_eq!(find(text, 26), Some(Mount { mount_point: b"/a\\040b", fs_type: b"ext4" }));
        assert_eq!(find(text, 2), None);
    }

    #[test]
    fn last_mount_at_a_place_is_the_one_that_is_seen() {
        let text = b"25 24 0:23 / /dev/shm rw - tmpfs tmpfs rw\n30 25 0:27 / /dev/shm rw shared:2 - tmpfs tmpfs rw\n\
            31 24 0:28 / /dev/shm/a rw - tmpfs tmpfs rw\n32 24 x:1 / /odd rw - tmpfs tmpfs rw\n";
        assert_eq!(device_at(text, b"/dev/shm"), Some((0, 27)));
        assert_eq!(device_at(text, b"/odd"), None);
        assert_eq!(device_at(text, b"/dev"), None);
    }

    #[test]
    fn size_of_a_tmpfs_is_an_option_of_its_file_system() {
        let text = b"25 24 0:23 / /dev/shm rw,nosuid shared:4 - tmpfs shm rw,size=65536k,inode64\n\
            26 24 0:24 / /run rw - tmpfs tmpfs rw\n27 24 0:25 / /a rw,size=1k - ext4 /dev/x rw,size=1k\n\
            28 24 0:26 / /b rw - tmpfs tmpfs rw,size=512\n29 24 0:27 / /c rw - tmpfs tmpfs rw,size=99999999999999999999k\n";
        assert_eq!(tmpfs_at(text, b"/dev/shm"), Some(Some(((0, 23), 64 << 20))));
        assert_eq!(tmpfs_at(text, b"/b"), Some(Some(((0, 26), 512))));
        for without in [&b"/run"[..], b"/a", b"/c"] {
            assert_eq!(tmpfs_at(text, without), Some(None));
        }
        assert_eq!(tmpfs_at(text, b"/dev"), None);
    }

    proptest! {
        #[test]
        fn finds_any_mount(ids in proptest::collection::hash_set(1_u64..100_000, 1..5), point in "/[!-~]{0,30}",
            tags in proptest::collection::vec("(shared|master):[0-9]{1,3}", 0..4), fs_type in "[a-z0-9.]{1,10}") {
            let tags: String = tags.iter().map(|tag| format!("{tag} ")).collect();
            let line = |id: &u64| format!("{id} 1 0:21 / {point} rw {tags}- {fs_type} none rw\n");
            let text: String = ids.iter().map(line).collect();
            let wanted = Mount { mount_point: point.as_bytes(), fs_type: fs_type.as_bytes() };
            prop_assert!(ids.iter().all(|id| find(text.as_bytes(), *id) == Some(wanted)));
            prop_assert_eq!(find(text.as_bytes(), 100_000), None);
        }

        #[test]
        fn never_panics_on_any_bytes(bytes: Vec<u8>, id: u64) {
            let _ = find(&bytes, id);
            let _ = device_at(&bytes, b"/dev/shm");
            let _ = tmpfs_at(&bytes, b"/dev/shm");
        }
    }
}
