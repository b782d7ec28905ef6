//! Rows of the store, and the texts and log records made from them.
#![no_main]

libfuzzer_sys::fuzz_target!(|text: &str| memledger::otlp::event_invariants::stored(text));
