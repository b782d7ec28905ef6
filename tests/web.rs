//! `--web.config.file`, and what the HTTP side bears: a real Prometheus, promtool, openssl and curl, and clients that behave
//! badly.
//!
//! Certificates are made anew for each test. Hashes have the least cost there is: what is tested is how many are computed.

mod crowd;
mod health;
mod limits;
mod passwords;
mod promtool;
mod reload;
mod scrape;
mod site;
mod slow;
mod tls;
mod two;
