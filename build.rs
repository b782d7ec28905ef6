//! Puts the revision and the compiler's version into the binary, for `memledger_build_info`.

use std::process::Command;

fn output(program: &str, arguments: &[&str]) -> Option<String> {
    let output =
        Command::new(program).args(arguments).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}

fn main() {
    // given where there is no git to ask, as in the image's build
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
