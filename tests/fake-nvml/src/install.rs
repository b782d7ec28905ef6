//! Installs the library in a directory of its own, for one test.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::{env, fs, io};

use crate::library::{beside, replace};
use crate::state::State;

/// A copy of the library with a state file beside it.
///
/// It owns no files: the owner of the directory removes them.
#[derive(Clone, Debug)]
pub struct FakeNvml {
    library: PathBuf,
    missing_symbols: BTreeSet<String>,
}

impl FakeNvml {
    /// Copies the library to `dir/libnvidia-ml.so.1` and writes its state.
    ///
    /// The library is the `libfake_nvml.so` that cargo built beside the running test; a dev-dependency on
    /// this crate makes cargo build it.
    ///
    /// # Errors
    /// The library is missing, the state does not pass [`State::check`], or a file cannot be written.
    pub fn install(dir: &Path, state: &State) -> io::Result<Self> {
        let fake =
            Self { library: dir.join("libnvidia-ml.so.1"), missing_symbols: state.missing_symbols.clone() };
        fake.set(state)?;
        let mut library = fs::read(built_library()?)?;
        for symbol in &state.missing_symbols {
            hide_symbol(&mut library, symbol);
        }
        replace(&fake.library, &library)?;
        Ok(fake)
    }

    /// Returns the path of the installed library, for `lib_path` or dlopen. Its directory can be `LD_LIBRARY_PATH`.
    pub fn path(&self) -> &Path {
        &self.library
    }

    /// Replaces the whole state atomically. The next call of any symbol uses it, and scripts restart.
    ///
    /// # Errors
    /// The state does not pass [`State::check`], its missing symbols are not those of the installed copy, or
    /// the file cannot be written.
    pub fn set(&self, state: &State) -> io::Result<()> {
        state.check().map_err(|what| io::Error::new(io::ErrorKind::InvalidInput, what))?;
        if state.missing_symbols != self.missing_symbols {
            let what = "missing_symbols cannot change after the library was installed";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        replace(&beside(&self.library, ".json"), &serde_json::to_vec_pretty(state)?)
    }

    /// Returns the calls of each symbol in the process that loaded the library last; empty before the first call and
    /// while no state had `count_calls`. A call counts when it begins, so a hung one counts too.
    ///
    /// # Errors
    /// The file of counts exists but cannot be read.
    pub fn calls(&self) -> io::Result<BTreeMap<String, u64>> {
        match fs::read(beside(&self.library, ".calls.json")) {
            Ok(json) => Ok(serde_json::from_slice(&json)?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeMap::new()),
            Err(error) => Err(error),
        }
    }
}

/// Returns the path of the cdylib that cargo built: in `deps` beside the running test, or one directory above.
fn built_library() -> io::Result<PathBuf> {
    let test = env::current_exe()?;
    let directories = test.ancestors().skip(1).take(2);
    let candidates =
        directories.flat_map(|dir| ["deps/libfake_nvml.so", "libfake_nvml.so"].map(|name| dir.join(name)));
    let tried: Vec<PathBuf> = candidates.collect();
    tried.iter().find(|path| path.is_file()).cloned().ok_or_else(|| {
        let what =
            format!("no libfake_nvml.so among {tried:?}: build fake-nvml, or make it a dev-dependency");
        io::Error::new(io::ErrorKind::NotFound, what)
    })
}

/// Renames a symbol in the string tables of a library, so that dlsym does not find it.
///
/// The hash of the old name still leads to the entry, whose name then differs; the new name is never looked up.
fn hide_symbol(library: &mut [u8], symbol: &str) {
    let name = format!("\0{symbol}\0").into_bytes();
    let mut from = 0;
    while let Some(found) = library[from..].windows(name.len()).position(|window| window == name) {
        library[from + found + 1] = b'~';
        from += found + name.len() - 1;
    }
}
