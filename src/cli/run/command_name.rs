//! The name of a run, from its command.

use std::ffi::OsString;
use std::path::Path;

/// Maximum length of a name.
const MAX_LENGTH: usize = 64;
/// Suffixes of scripts, which interpreters and launchers take among their arguments.
const SCRIPTS: [&str; 3] = ["py", "sh", "ipynb"];

/// Checks a name that the user chose: that of a container.
pub fn checked(text: &str) -> Result<String, String> {
    match sanitized(text) == text && !text.is_empty() && text.len() <= MAX_LENGTH {
        true => Ok(text.to_owned()),
        false => Err(format!(
            "expected letters, digits, `_`, `.` and `-`, at most {MAX_LENGTH}, the first a letter or digit"
        )),
    }
}

/// Returns a name for a command: of its script (`torchrun train.py`: train), of its module (`python -m pkg.train`), or of its program.
pub fn of(arguments: &[OsString]) -> String {
    let words: Vec<&str> = arguments.iter().filter_map(|word| word.to_str()).collect();
    let script = words.iter().map(Path::new).find(|path| {
        path.extension().is_some_and(|extension| SCRIPTS.iter().any(|script| extension == *script))
    });
    let stem = |path: &Path| path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
    let module = || words.iter().position(|word| *word == "-m").and_then(|at| words.get(at + 1));
    let program = || Path::new(words.first()?).file_name().map(|name| name.to_string_lossy().into_owned());
    let found = script.and_then(stem).or_else(|| module().map(|name| (*name).to_owned())).or_else(program);
    let name = sanitized(&found.unwrap_or_default());
    if name.is_empty() { "run".to_owned() } else { name }
}

/// Returns the name, with a number behind it while another run has it.
pub fn unused(name: &str, is_taken: impl Fn(&str) -> bool) -> String {
    let numbered = (2_u32..).map(|number| format!("{name}-{number}"));
    let mut names = std::iter::once(name.to_owned()).chain(numbered);
    names.find(|name| !is_taken(name)).unwrap_or_else(|| name.to_owned())
}

/// Returns the text with `-` for what a name cannot have, and without what it cannot begin with.
fn sanitized(text: &str) -> String {
    let allowed = |c: char| if c.is_ascii_alphanumeric() || "_.-".contains(c) { c } else { '-' };
    let name: String = text.chars().map(allowed).collect();
    let name = name.trim_start_matches(['_', '.', '-']);
    name.chars().take(MAX_LENGTH - 8).collect() // room for a number
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
        assert_eq!(checked("train_1.a-b"), Ok("train_1.a-b".to_owned()));
        for name in ["", "-x", "a b", "a/b", "ä", &"x".repeat(65)] {
            assert!(checked(name).is_err(), "{name}");
        }
    }
}
