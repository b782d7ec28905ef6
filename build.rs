//! Compiles the revision and the compiler's version into the binary, for `memledger_build_info`, and the Python client, which
//! `serve` writes into `--reporter.directory`.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

fn output(program: &str, arguments: &[&str]) -> Option<String> {
    let output =
        Command::new(program).args(arguments).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}

/// Returns the Python files below a directory, without tests.
fn python_files(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).expect("python/ is part of the source").flatten() {
        let path = entry.path();
        let name = entry.file_name();
        if path.is_dir() && name != "tests" && name != "__pycache__" {
            found.extend(python_files(&path));
        } else if path.extension().is_some_and(|extension| extension == "py") || name == "py.typed" {
            found.push(path);
        }
    }
    found.sort();
    found
}

fn embed_python_client() {
    let root = Path::new(&std::env::var("CARGO_MANIFEST_DIR").expect("set by cargo")).join("python");
    let mut table = "const PYTHON_FILES: &[(&str, &str)] = &[\n".to_owned();
    for path in python_files(&root) {
        let name = path.strip_prefix(&root).expect("it is below");
        writeln!(table, "    ({name:?}, include_str!({path:?})),").expect("memory");
        println!("cargo::rerun-if-changed={}", path.display()); // not the directory, in which Python caches bytecode
    }
    table.push_str("];\n");
    let out = Path::new(&std::env::var("OUT_DIR").expect("set by cargo")).join("python_files.rs");
    std::fs::write(out, table).expect("OUT_DIR is writable");
}

fn main() {
    embed_python_client();
    // set where there is no git repository, as in the build of the image
    let given = std::env::var("MEMLEDGER_REVISION").ok().filter(|revision| !revision.is_empty());
    let revision = given.or_else(|| output("git", &["rev-parse", "--short=12", "HEAD"]));
    let revision = revision.unwrap_or_else(|| "unknown".to_owned());
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned());
    let version = output(&rustc, &["--version"]).unwrap_or_default();
    let version = version.split(' ').nth(1).unwrap_or("unknown");
    println!("cargo::rustc-env=MEMLEDGER_REVISION={revision}");
    println!("cargo::rustc-env=MEMLEDGER_RUSTC={version}");
    println!("cargo::rerun-if-env-changed=MEMLEDGER_REVISION");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=.git/logs/HEAD");
}
