//! The generated documents are what the tables say.

use crate::support::golden;

#[test]
fn docs_metrics_is_the_catalog() {
    golden("docs/metrics.md", &memledger::export::markdown::metrics());
}

#[test]
fn docs_config_is_the_table_of_settings() {
    golden("docs/config.md", &memledger::export::markdown::settings());
}
