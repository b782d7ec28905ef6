//! What clients send to memledger, and what OTLP endpoints answer it.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    memledger::serve::laws::request(bytes);
    memledger::push::laws::answer(bytes);
});
