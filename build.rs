//! Compiles the revision and the compiler's version into the binary, for `memledger_build_info`, and the Python client, which
//! `serve` writes into `--reporter.directory`. Orders the functions of optimized builds.

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

/// Places the functions of `deploy/layout/functions.txt` in a section of their own, in that order: those that run are contiguous then.
///
/// A quarter of the code runs while memledger serves. Spread over all of it, it keeps nearly all resident, because the kernel maps 64 KiB
/// around each page that is read. A linker script does it, which GNU ld, lld and zig's linker read; zig's has no option for an order.
fn order_functions() {
    const LIST: &str = "deploy/layout/functions.txt";
    println!("cargo::rerun-if-changed={LIST}");
    println!("cargo::rerun-if-env-changed=RUSTC_LINKER");
    println!("cargo::rerun-if-env-changed=LD_PRELOAD");
    let variable = |name| std::env::var(name).unwrap_or_default();
    // PROFILE is `release` in all profiles that inherit from it
    if variable("PROFILE") != "release" || variable("CARGO_CFG_TARGET_OS") != "linux" {
        return;
    }
    let flags = variable("CARGO_ENCODED_RUSTFLAGS");
    let has_other_names = !flags.contains("symbol-mangling-version=v0");
    // mold and gold read no such scripts
    let has_other_linker = ["fuse-ld=", "linker-flavor", "linker="].iter().any(|flag| flags.contains(flag))
        || [variable("RUSTC_LINKER"), variable("LD_PRELOAD")]
            .iter()
            .any(|path| path.contains("mold") || path.contains("gold"));
    if has_other_names || has_other_linker {
        let reason =
            if has_other_names { "RUSTFLAGS replaces .cargo/config.toml" } else { "another linker is set" };
        println!(
            "cargo::warning=functions are not ordered, so that more of memledger's code stays in memory: {reason}"
        );
        return;
    }
    let mut text = "SECTIONS {\n  .text.called : {\n".to_owned();
    for symbol in std::fs::read_to_string(LIST).expect("it is part of the source").lines() {
        // LLVM gives what it takes for cold, as the growth of a table, a prefix of its own
        writeln!(text, "    *(.text.{symbol} .text.unlikely.{symbol})").expect("memory");
    }
    text.push_str("  }\n} INSERT BEFORE .text;\n");
    let script = Path::new(&variable("OUT_DIR")).join("functions.ld");
    std::fs::write(&script, text).expect("OUT_DIR is writable");
    // two arguments: -Wl would split the path at a comma
    println!("cargo::rustc-link-arg-bin=memledger=-T");
    println!("cargo::rustc-link-arg-bin=memledger={}", script.display());
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
