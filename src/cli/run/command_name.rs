//! The name of a run, from its command.

use std::ffi::OsString;
use std::path::Path;

use crate::discover::run::record::{MAX_NAME, is_name};

/// Room for a number behind a name.
const MAX_NUMBER: usize = 8;
/// Suffixes of scripts, which interpreters and launchers take among their arguments.
const SCRIPTS: [&str; 3] = ["py", "sh", "ipynb"];

/// Checks a name that the user chose: that of a container.
pub fn checked(text: &str) -> Result<String, String> {
    match is_name(text) {
        true => Ok(text.to_owned()),
        false => Err(format!(
            "expected letters, digits, `_`, `.` and `-`, at most {MAX_NAME}, the first a letter or digit"
        )),
    }
}

/// Returns a name for a command: of its script (`torchrun train.py`: train), of its module (`python -m pkg.train`), or of its program.
/// Nothing else of a command line: it may contain secrets.
pub fn of(arguments: &[OsString]) -> String {
    let words: Vec<&str> = arguments.iter().map(|word| word.to_str().unwrap_or_default()).collect();
    // code, not a file, is behind -c
    let is_code = |at: usize| at > 0 && words[at - 1].starts_with('-') && words[at - 1].ends_with('c');
    let is_path =
        |word: &str| word.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_./~+-".contains(&byte));
    let paths = words.iter().enumerate().filter(|(at, word)| !is_code(*at) && is_path(word));
    let mut paths = paths.map(|(_, word)| Path::new(word));
    let script = paths.find(|path| {
        path.extension().is_some_and(|extension| SCRIPTS.iter().any(|script| extension == *script))
    });
    let stem = |path: &Path| path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
    let module = words.iter().position(|word| *word == "-m").and_then(|at| words.get(at + 1));
    let module = module.filter(|module| is_path(module)).map(|module| (*module).to_owned());
    let program = || Path::new(words.first()?).file_name().map(|name| name.to_string_lossy().into_owned());
    let name = sanitized(&script.and_then(stem).or(module).or_else(program).unwrap_or_default());
    if name.is_empty() { "run".to_owned() } else { name }
}

/// Returns the name, with a number behind it while another run has it.
pub fn unused(name: &str, is_taken: impl Fn(&str) -> bool) -> String {
    if !is_taken(name) {
        return name.to_owned();
    }
    let name = &name[..name.len().min(MAX_NAME - MAX_NUMBER)];
    let mut numbered = (2_u32..).map(|number| format!("{name}-{number}"));
    numbered.find(|name| !is_taken(name)).unwrap_or_else(|| name.to_owned())
}

/// Returns the text with `-` for what a name cannot have, and without what it cannot begin with.
fn sanitized(text: &str) -> String {
    let allowed = |c: char| if c.is_ascii_alphanumeric() || "_.-".contains(c) { c } else { '-' };
    let name: String = text.chars().map(allowed).collect();
    let name = name.trim_start_matches(['_', '.', '-']);
    name.chars().take(MAX_NAME - MAX_NUMBER).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_is_named_after_its_script_module_or_program() {
        for (command, name) in [
            ("python train.py --lr 0.1", "train"),
            ("/usr/bin/python3 -u src/train_gpt.py", "train_gpt"),
            ("torchrun --nproc_per_node 8 train.py", "train"),
            ("accelerate launch --config_file a.yaml run/fit.py", "fit"),
            ("python -m pkg.train --x 1", "pkg.train"),
            ("bash scripts/all.sh", "all"),
            ("./a.out", "a.out"),
            ("/opt/my prog/tool", "tool"),
            ("python", "python"),
            ("--", "run"),
            ("bash -c KEY=0123/x.py", "bash"),
            ("bash -lc x.py", "bash"),
            ("python KEY=0123 train.py", "train"),
        ] {
            let arguments: Vec<OsString> = match command {
                "/opt/my prog/tool" => vec![command.into()],
                _ => command.split(' ').map(Into::into).collect(),
            };
            assert_eq!(of(&arguments), name, "{command}");
        }
    }

    #[test]
    fn second_run_of_a_name_gets_a_number() {
        assert_eq!(unused("train", |_| false), "train");
        assert_eq!(unused("train", |name| ["train", "train-2"].contains(&name)), "train-3");
    }

    #[test]
    fn name_that_no_container_could_have_is_rejected() {
        for name in ["train_1.a-b", &"x".repeat(64)] {
            assert_eq!(checked(name), Ok(name.to_owned()));
        }
        assert_eq!(unused(&"x".repeat(64), |name| name.len() == 64), format!("{}-2", "x".repeat(56)));
        for name in ["", "-x", "a b", "a/b", "ä", &"x".repeat(65)] {
            assert!(checked(name).is_err(), "{name}");
        }
    }
}
