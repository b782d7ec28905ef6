//! `--web.config.file` and the limits of the HTTP server: with a real Prometheus, promtool, openssl and curl, and with
//! misbehaving clients.
//!
//! Each test makes its own certificates. Password hashes have the lowest cost: the tests check how many are computed.

mod idle_connections;
mod health;
mod limits;
mod passwords;
mod promtool;
mod reload;
mod scrape;
mod site;
mod slow;
mod tls;

pub(crate) use site::exchange;
