//! Responses of Docker and Podman (JSON), and of CRI and the kubelet (protobuf).
#![no_main]

use memledger::discover::{cri, docker};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    docker::invariants::response(bytes);
    cri::invariants::response(bytes);
});
