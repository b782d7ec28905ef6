//! What one loaded copy of the library remembers: its state file, and the little that lives between two
//! calls.
//!
//! The file is looked at on every call and read again when its inode, length or time of change differ. A file
//! that does not parse leaves the state as it was and is complained about once, on stderr. No file is a host
//! without GPUs.
//!
//! One lock guards it all and is never held while a call waits, so a hung symbol blocks nobody else.

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

/// A state as the calls use it.
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

/// What tells one version of the state file from the next.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    length: u64,
    modified: (i64, i64),
}

/// An event set: the GPUs registered with it, each with the mask of its kinds.
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

/// The one of this loaded copy, locked.
pub(crate) fn library() -> MutexGuard<'static, Library> {
    static LIBRARY: OnceLock<Mutex<Library>> = OnceLock::new();
    let library = LIBRARY.get_or_init(|| Mutex::new(Library::beside(&own_path())));
    library.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Run when the library is unloaded, and at the end of the process.
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

/// The file that this code was loaded from, as the loader was given it.
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

/// `path` with more characters at its end, not in place of its extension.
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

    /// The state as its file has it now.
    pub(crate) fn current(&mut self) -> Arc<Loaded> {
        let refreshed = self.refresh();
        self.complain_on_error(refreshed);
        Arc::clone(&self.loaded)
    }

    /// The GPU as this call of `symbol` sees it: the next step of its script, or the GPU of the state file.
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

    /// Takes back the last [`Library::take_step`]: its call has only asked how long the list is.
    pub(crate) fn give_step_back(&mut self, symbol: &'static str, gpu: usize) {
        if let Some(taken) = self.taken.get_mut(&(symbol, gpu)) {
            *taken = taken.saturating_sub(1);
        }
    }

    pub(crate) fn calls_json(&self) -> String {
        // A map of plain strings to numbers always has a JSON form.
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

/// Writes a file under another name and renames it, so that a reader sees the old or the new one, never a
/// part.
///
/// The new file is younger than the one it replaces, also when both are written within one tick of the
/// kernel's clock: with the same length, and an inode number that was free again, they would else look the
/// same.
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
