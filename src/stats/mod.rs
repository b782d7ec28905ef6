//! What the HTTP server, the OTLP export and the reports of runs count, which each cycle writes into its series.

pub mod http_stats;
pub mod otlp_stats;
pub mod report_stats;
