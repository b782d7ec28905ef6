//! What the HTTP server and the OTLP export count, which each cycle writes into its series.

pub mod http_stats;
pub mod otlp_stats;
