//! Reads files and folders of devices. A device has tens of them, of which each driver has some.

use std::path::Path;

use crate::host::bounds::NAMES;
use crate::host::{Dir, KernelFile, ReadError};

/// Returns the names in a folder that begin with `prefix`, numbers in their order; empty if it does not exist.
pub fn names(folder: &Path, prefix: &str) -> Result<Vec<String>, ReadError> {
    let mut names = Vec::new();
    let each = |name: &std::ffi::OsStr, _| {
        names.extend(name.to_str().filter(|name| name.starts_with(prefix)).map(str::to_owned));
    };
    match Dir::open(folder).and_then(|dir| dir.for_each(NAMES.max, &mut Vec::new(), each)) {
        Err(error) if !error.is_gone() => return Err(error),
        _ => names.sort_by_key(|name| (name.len(), name.clone())),
    }
    Ok(names)
}

/// Reads the text of a file, without white space around it.
pub fn text(path: &Path) -> Result<String, ReadError> {
    let mut buffer = Vec::new();
    let text = KernelFile::open(path)?.read_once(&mut buffer).map(String::from_utf8_lossy)?;
    Ok(text.trim().to_owned())
}

/// Reads the number in a file. A number above `max` is no measurement.
pub fn number(path: &Path, max: u64) -> Result<u64, ReadError> {
    let value = crate::parse::number(text(path)?.as_bytes()).filter(|value| *value <= max);
    value.ok_or_else(|| ReadError::malformed(path.display().to_string()))
}

/// Returns the value of a read. A failed one is counted, and a missing file is not.
pub fn value<T>(read: Result<T, ReadError>, read_errors: &mut Vec<&'static str>) -> Option<T> {
    read.map_err(|error| read_errors.extend(error.reason_label())).ok()
}
