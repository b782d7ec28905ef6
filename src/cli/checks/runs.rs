//! The check of the directory in which `memledger run` records runs for all users.

use std::os::unix::fs::MetadataExt;

use super::Check;
use super::directory::owner_and_mode;
use crate::config::Config;

pub(super) const NAME: &str = "runs";
const LOST: &str =
    "memledger serve has the runs of its own user alone; those of others are shown by their ids, without end";
/// Every user may make a directory in it.
const OPEN: u32 = 0o1777;

/// Checks whether every user can record runs where `serve` reads them.
pub fn run_check(config: &Config) -> Check {
    let Some(spool) = &config.run.spool else {
        let fix = "--run.spool=/var/lib/memledger-runs: see docs/bare-hosts.md";
        return Check::none(NAME, "off (--run.spool is empty)", LOST, fix).detail();
    };
    let place = spool.display();
    match std::fs::symlink_metadata(spool) {
        Ok(found) if found.is_dir() && found.mode() & 0o7777 == OPEN => {
            let runs = crate::discover::run::spool::read(spool, &config.host_paths).len();
            Check::good(NAME, format!("{runs} recorded in {place}, for all users"))
        }
        Ok(_) => {
            let found = format!("{place} is not open to all users ({})", owner_and_mode(spool));
            Check::none(NAME, found, LOST, format!("as root: chmod 1777 {place}"))
        }
        Err(_) => {
            let found = format!("no directory {place}; memledger serve creates it, as root");
            let fix = "start `memledger serve` as root; in a container, mount a directory of the host there";
            Check::none(NAME, found, LOST, fix)
        }
    }
    .detail()
}
