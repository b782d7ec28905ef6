//! The settings file, the web configuration, values of settings, and the environment of containers.
#![no_main]

use memledger::config::invariants;

libfuzzer_sys::fuzz_target!(|text: &str| {
    invariants::web_config(text);
    invariants::settings_file(text);
    invariants::value(text);
    invariants::environment(text);
});
