//! The cgroup of a process.

use super::{Dir, ReadError};
use crate::parse::process::{Stat, cgroup_path};

/// Returns the path of a process in the hierarchy that has the memory controller, from its directory in procfs.
///
/// # Errors
/// [`ReadError::Gone`] also if it is exiting and cgroup v1 shows it in the root already: its cgroup is not known any more, while
/// it may still hold devices and sockets.
pub fn read(dir: &Dir, cgroup_v1: bool, buffer: &mut Vec<u8>) -> Result<String, ReadError> {
    let cgroup = cgroup_path(dir.file("cgroup")?.read_once(buffer)?, cgroup_v1);
    let cgroup = String::from_utf8_lossy(cgroup.ok_or_else(|| ReadError::malformed("cgroup"))?).into_owned();
    if cgroup_v1 && cgroup == "/" {
        let stat = Stat::parse(dir.file("stat")?.read_once(buffer)?);
        if stat.ok_or_else(|| ReadError::malformed("stat"))?.is_exiting {
            return Err(ReadError::Gone("the cgroup of an exiting process".into()));
        }
    }
    Ok(cgroup)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exiting_process_in_the_root_of_v1_has_no_known_cgroup() {
        let folder = tempfile::tempdir().unwrap();
        let read = |v1: bool, path: &str, flags: u32| {
            let stat = format!("7 (python) R 1 1 1 0 -1 {flags} {}70 0\n", "0 ".repeat(12));
            std::fs::write(folder.path().join("stat"), stat).unwrap();
            let controller = if v1 { "3:memory" } else { "0:" };
            std::fs::write(folder.path().join("cgroup"), format!("{controller}:{path}\n")).unwrap();
            read(&Dir::open(folder.path()).unwrap(), v1, &mut Vec::new()).map_err(|error| error.is_gone())
        };
        assert_eq!(read(true, "/docker/a", 0x4), Ok("/docker/a".to_owned()));
        assert_eq!(read(true, "/", 0x0040_0000), Ok("/".to_owned()), "a process of the host");
        assert_eq!(read(true, "/", 0x0040_0004), Err(true));
        assert_eq!(read(false, "/", 0x4), Ok("/".to_owned()), "v2 keeps the path");
    }
}
