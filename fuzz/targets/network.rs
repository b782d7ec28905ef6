//! Requests of clients, reports of programs from inside, and responses of OTLP endpoints.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    memledger::http::invariants::request(bytes);
    memledger::reporter::invariants::message(bytes);
    memledger::otlp::invariants::response(bytes);
});
