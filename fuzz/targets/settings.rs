//! The settings file, the web configuration, values of settings, and the environment of containers.
#![no_main]

use memledger::config::laws;

libfuzzer_sys::fuzz_target!(|text: &str| {
    laws::web_config(text);
    laws::settings_file(text);
    laws::value(text);
    laws::environment(text);
});
