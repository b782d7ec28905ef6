//! The generated documents match the tables.

use crate::support::golden;

#[test]
fn metrics_md_matches_the_catalog() {
    golden("docs/metrics.md", &memledger::export::reference_docs::metrics());
}

#[test]
fn config_md_matches_the_settings() {
    golden("docs/config.md", &memledger::export::reference_docs::settings());
}
