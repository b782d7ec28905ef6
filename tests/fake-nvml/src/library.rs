//! The state of one loaded copy of the library: its state file, and the data that lasts between calls.
//!
//! Every call checks the file and reads it again if its inode, length or time of change differ. If a file does not parse,
//! the old state is kept and the error is printed once on stderr. Without a file the host has no GPUs.
//!
//! One lock guards all of it and is never locked while a call waits, so a hung symbol blocks no other call.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::{CStr, OsStr, OsString, c_void};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::gpu::Gpu;
use crate::script::{self, Scenes};
use crate::state::State;

/// A state in the form that calls use.
#[derive(Default)]
pub(crate) struct Loaded {
    pub(crate) state: State,
    pub(crate) gpus: Vec<Arc<Gpu>>,
    scenes: Scenes,
}

impl Loaded {
    fn new(state: State) -> Result<Self, String> {
        let gpus = state.gpus.iter().cloned().map(Arc::new).collect();
        let scenes = script::expand(&state)?;
        Ok(Self { state, gpus, scenes })
    }
}

/// The identity of one version of the state file.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    length: u64,
    modified: (i64, i64),
}

/// An event set: its registered GPUs, each with the mask of its kinds.
pub(crate) type Registrations = Vec<(usize, u64)>;

pub(crate) struct Library {
    state_file: PathBuf,
    calls_file: PathBuf,
    stamp: Option<Stamp>,
    loaded: Arc<Loaded>,
    /// Successful `nvmlInit` calls without their `nvmlShutdown`.
    pub(crate) initialised: u32,
    /// Steps used up, by symbol and GPU.
    taken: HashMap<(&'static str, usize), usize>,
    calls: BTreeMap<&'static str, u64>,
    /// The `seq` of every event delivered.
    pub(crate) delivered: BTreeSet<u64>,
    pub(crate) event_sets: BTreeMap<usize, Registrations>,
}

/// Returns the state of this loaded copy, locked.
pub(crate) fn library() -> MutexGuard<'static, Library> {
    static LIBRARY: OnceLock<Mutex<Library>> = OnceLock::new();
    let library = LIBRARY.get_or_init(|| Mutex::new(Library::beside(&own_path())));
    library.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs when the library is unloaded, and at the end of the process.
extern "C" fn at_exit() {
    if library().current().state.hang_at_exit {
        loop {
            std::thread::park();
        }
    }
}

#[used]
#[unsafe(link_section = ".fini_array")]
static AT_EXIT: extern "C" fn() = at_exit;

/// Returns the path from which the loader loaded this code.
fn own_path() -> PathBuf {
    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    // SAFETY: dladdr only compares the address with the loaded objects, and writes to `info`, which outlives
    // the call.
    let found = unsafe { libc::dladdr(own_path as *const c_void, &mut info) } != 0;
    if !found || info.dli_fname.is_null() {
        return PathBuf::new();
    }
    // SAFETY: dladdr found the object, and its name is a C string that the loader keeps as long as the object
    // is loaded.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    PathBuf::from(OsStr::from_bytes(name.to_bytes()))
}

/// Appends to a path, without replacing its extension.
pub(crate) fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    PathBuf::from(name)
}

impl Library {
    fn beside(path: &Path) -> Self {
        Self {
            state_file: beside(path, ".json"),
            calls_file: beside(path, ".calls.json"),
            stamp: None,
            loaded: Arc::default(),
            initialised: 0,
            taken: HashMap::new(),
            calls: BTreeMap::new(),
            delivered: BTreeSet::new(),
            event_sets: BTreeMap::new(),
        }
    }

    /// Counts a call and returns the state that it sees.
    pub(crate) fn enter(&mut self, symbol: &'static str) -> Arc<Loaded> {
        let loaded = self.current();
        if loaded.state.count_calls {
            *self.calls.entry(symbol).or_default() += 1;
            let written = replace(&self.calls_file, self.calls_json().as_bytes());
            self.complain_on_error(written);
        }
        loaded
    }

    /// Returns the current state of the file.
    pub(crate) fn current(&mut self) -> Arc<Loaded> {
        let refreshed = self.refresh();
        self.complain_on_error(refreshed);
        Arc::clone(&self.loaded)
    }

    /// Returns the GPU for this call of `symbol`: the next step of its script, or the GPU of the state file.
    pub(crate) fn take_step(
        &mut self,
        loaded: &Loaded,
        symbol: &'static str,
        gpu: usize,
    ) -> Option<Arc<Gpu>> {
        let Some(steps) = loaded.scenes.get(symbol).and_then(|by_gpu| by_gpu.get(&gpu)) else {
            return loaded.gpus.get(gpu).cloned();
        };
        let taken = self.taken.entry((symbol, gpu)).or_default();
        let step = steps.get(*taken).or_else(|| steps.last()).cloned();
        *taken += 1;
        step
    }

    /// Reverts the last [`Library::take_step`]: its call only read the length of the list.
    pub(crate) fn give_step_back(&mut self, symbol: &'static str, gpu: usize) {
        if let Some(taken) = self.taken.get_mut(&(symbol, gpu)) {
            *taken = taken.saturating_sub(1);
        }
    }

    pub(crate) fn calls_json(&self) -> String {
        // a map of strings to numbers can always be serialized
        serde_json::to_string(&self.calls).unwrap_or_default()
    }

    fn refresh(&mut self) -> io::Result<()> {
        let mut file = match File::open(&self.state_file) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                if self.stamp.take().is_some() {
                    self.replace_state(Loaded::default());
                }
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        let metadata = file.metadata()?;
        let stamp = Stamp {
            inode: metadata.ino(),
            length: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
        };
        if self.stamp == Some(stamp) {
            return Ok(());
        }
        let mut json = Vec::new();
        file.read_to_end(&mut json)?;
        self.stamp = Some(stamp);
        let loaded = State::from_json(&json).and_then(Loaded::new).map_err(io::Error::other)?;
        self.replace_state(loaded);
        Ok(())
    }

    fn replace_state(&mut self, loaded: Loaded) {
        self.loaded = Arc::new(loaded);
        self.taken.clear();
    }

    fn complain_on_error(&self, result: io::Result<()>) {
        if let Err(error) = result {
            eprintln!("fake-nvml: {}: {error}", self.state_file.display());
        }
    }
}

/// Writes a file under another name and renames it, so that a reader sees the old or the new one, never a part.
///
/// The new file is always younger than the one it replaces, also within one tick of the kernel's clock: with the same
/// length and a reused inode number, both would otherwise look the same.
pub(crate) fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let draft = beside(path, &format!(".{}", std::process::id()));
    fs::write(&draft, content)?;
    if let Ok(old) = fs::metadata(path).and_then(|metadata| metadata.modified()) {
        let new = File::options().write(true).open(&draft)?;
        if new.metadata()?.modified()? <= old {
            new.set_modified(old + std::time::Duration::from_micros(1))?;
        }
    }
    fs::rename(&draft, path)
}
