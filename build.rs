//! Compiles the revision and the compiler's version into the binary, for `memledger_build_info`, and the Python client, which
//! `serve` writes into `--reporter.directory`. Places the functions that are called beside each other in optimized builds.

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

/// Has the linker place the functions of `deploy/layout/functions.txt` beside each other, in that order.
///
/// A fifth of the program's code is called while it serves, spread over all of it, and the kernel maps 64 KiB around each page that is
/// touched. A linker script does it because every linker of ELF knows one: GNU ld, lld, and that of zig, which has no option for an order.
fn order_functions() {
    const LIST: &str = "deploy/layout/functions.txt";
    println!("cargo::rerun-if-changed={LIST}");
    let variable = |name| std::env::var(name).expect("set by cargo");
    // PROFILE is also that of profiles that inherit from it. With flags of one's own there are other names, and perhaps a linker that reads
    // no scripts.
    let is_placed = variable("PROFILE") == "release"
        && variable("CARGO_CFG_TARGET_OS") == "linux"
        && variable("CARGO_ENCODED_RUSTFLAGS").contains("symbol-mangling-version=v0")
        && !std::env::var("RUSTC_LINKER").is_ok_and(|linker| linker.ends_with("mold"));
    if !is_placed {
        return;
    }
    let mut text = "SECTIONS {\n  .text.called : {\n".to_owned();
    for symbol in std::fs::read_to_string(LIST).expect("it is part of the source").lines() {
        writeln!(text, "    *(.text.{symbol})").expect("memory");
    }
    text.push_str("  }\n} INSERT BEFORE .text;\n");
    let script = Path::new(&variable("OUT_DIR")).join("functions.ld");
    std::fs::write(&script, text).expect("OUT_DIR is writable");
    println!("cargo::rustc-link-arg-bin=memledger=-Wl,-T,{}", script.display());
}

fn main() {
    embed_python_client();
    order_functions();
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
