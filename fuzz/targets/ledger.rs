//! Rows of the store, and what is told of them.
#![no_main]

libfuzzer_sys::fuzz_target!(|text: &str| memledger::export::laws::stored(text));
