//! The mount table in `/proc/PID/mountinfo`. Bytes: a mount point may contain any.

/// A mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mount<'a> {
    id: u64,
    device: &'a [u8],
    /// Its mount point, with the kernel's octal escapes.
    pub mount_point: &'a [u8],
    /// The type of its file system.
    pub fs_type: &'a [u8],
    /// The options of its file system.
    options: &'a [u8],
}

impl<'a> Mount<'a> {
    /// Parses a line: id, parent, device, root, mount point, options, any number of tags, `-`, type, source, options.
    fn parse(line: &'a [u8]) -> Option<Self> {
        let mut fields = line.split(|&b| b == b' ');
        let (id, device, mount_point) = (super::number(fields.next()?)?, fields.nth(1)?, fields.nth(1)?);
        let mut of_file_system = fields.skip_while(|field| field != b"-").skip(1);
        let (fs_type, options) = (of_file_system.next()?, of_file_system.nth(1).unwrap_or_default());
        Some(Self { id, device, mount_point, fs_type, options })
    }

    /// Returns major and minor number of its device.
    pub fn device(&self) -> Option<(u32, u32)> {
        let mut numbers =
            self.device.split(|&b| b == b':').map(|part| u32::try_from(super::number(part)?).ok());
        Some((numbers.next()??, numbers.next()??))
    }

    /// Returns the size of a tmpfs in bytes; `None` if it has no limit, or is no tmpfs.
    pub fn tmpfs_size(&self) -> Option<u64> {
        let mut options = self.options.split(|&b| b == b',').filter(|_| self.fs_type == b"tmpfs");
        let size = options.find_map(|option| option.strip_prefix(b"size="))?;
        let (number, unit) = match size.split_last()? {
            (b'k', number) => (number, 1024),
            _ => (size, 1),
        };
        super::number(number)?.checked_mul(unit)
    }
}

/// Returns the mount with this id.
pub fn find(mountinfo: &[u8], id: u64) -> Option<Mount<'_>> {
    super::lines(mountinfo).filter_map(Mount::parse).find(|mount| mount.id == id)
}

/// Returns what is mounted there: the last of these mounts, which hides the others.
pub fn at<'a>(mountinfo: &'a [u8], mount_point: &[u8]) -> Option<Mount<'a>> {
    super::lines(mountinfo).filter_map(Mount::parse).filter(|mount| mount.mount_point == mount_point).last()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn skips_any_number_of_tags() {
        let text = b"22 1 0:21 / /proc rw - proc proc rw\n25 24 0:23 / /dev/shm rw,nosuid shared:4 master:1 - tmpfs shm rw\n26 25 0:1 / /a\\040b rw - ext4 /dev/x rw\n";
        let found = |id| find(text, id).map(|mount| (mount.mount_point, mount.fs_type));
        assert_eq!(found(25), Some((&b"/dev/shm"[..], &b"tmpfs"[..])));
        assert_eq!(found(26), Some((&b"/a\\040b"[..], &b"ext4"[..])));
        assert_eq!(found(2), None);
    }

    #[test]
    fn last_mount_at_a_place_is_the_one_that_is_seen() {
        let text = b"25 24 0:23 / /dev/shm rw - tmpfs tmpfs rw\n30 25 0:27 / /dev/shm rw shared:2 - tmpfs tmpfs rw\n\
            31 24 0:28 / /dev/shm/a rw - tmpfs tmpfs rw\n32 24 x:1 / /odd rw - tmpfs tmpfs rw\n";
        assert_eq!(at(text, b"/dev/shm").unwrap().device(), Some((0, 27)));
        assert_eq!(at(text, b"/odd").unwrap().device(), None);
        assert_eq!(at(text, b"/dev"), None);
    }

    #[test]
    fn size_of_a_tmpfs_is_an_option_of_its_file_system() {
        let text = b"25 24 0:23 / /dev/shm rw,nosuid shared:4 - tmpfs shm rw,size=65536k,inode64\n\
            26 24 0:24 / /run rw - tmpfs tmpfs rw\n27 24 0:25 / /a rw,size=1k - ext4 /dev/x rw,size=1k\n\
            28 24 0:26 / /b rw - tmpfs tmpfs rw,size=512\n29 24 0:27 / /c rw - tmpfs tmpfs rw,size=99999999999999999999k\n";
        let size = |place| at(text, place).unwrap().tmpfs_size();
        assert_eq!((size(b"/dev/shm"), size(b"/b")), (Some(64 << 20), Some(512)));
        assert_eq!([&b"/run"[..], b"/a", b"/c"].map(size), [None; 3]);
    }

    proptest! {
        #[test]
        fn finds_any_mount(ids in proptest::collection::hash_set(1_u64..100_000, 1..5), point in "/[!-~]{0,30}",
            tags in proptest::collection::vec("(shared|master):[0-9]{1,3}", 0..4), fs_type in "[a-z0-9.]{1,10}") {
            let tags: String = tags.iter().map(|tag| format!("{tag} ")).collect();
            let line = |id: &u64| format!("{id} 1 0:21 / {point} rw {tags}- {fs_type} none rw\n");
            let text: String = ids.iter().map(line).collect();
            let is_wanted = |mount: Mount<'_>| (mount.mount_point, mount.fs_type) == (point.as_bytes(), fs_type.as_bytes());
            prop_assert!(ids.iter().all(|id| find(text.as_bytes(), *id).is_some_and(is_wanted)));
            prop_assert_eq!(find(text.as_bytes(), 100_000), None);
        }

        #[test]
        fn never_panics_on_any_bytes(bytes: Vec<u8>, id: u64) {
            let _ = find(&bytes, id);
            let _ = at(&bytes, b"/dev/shm").map(|mount| (mount.device(), mount.tmpfs_size()));
        }
    }
}
