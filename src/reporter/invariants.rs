//! Properties of messages that hold for any bytes; the fuzzer calls the same function.

use super::message::{MAX_PACKET_BYTES, Message, TorchMemory};

/// Checks a packet.
pub fn message(packet: &[u8]) {
    let packet = &packet[..packet.len().min(MAX_PACKET_BYTES)];
    let Ok(message) = Message::parse(packet) else { return };
    assert_eq!(Message::parse(packet).ok().as_ref(), Some(&message));
    let is_plain = |name: &str| {
        (1..=64).contains(&name.len())
            && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_.:-".contains(&byte))
    };
    match message {
        Message::Hello(hello) => {
            assert!(hello.local_rank < 64 && hello.devices.len() <= 64);
            assert!(
                hello.devices.iter().flat_map(|(_, uuid)| uuid).all(|uuid| uuid.is_empty() || is_plain(uuid))
            );
        }
        Message::Sample(sample) => devices(&sample.devices),
        Message::Operation(tracked) => {
            assert!(is_plain(&tracked.component) && is_plain(&tracked.operation));
            devices(&tracked.devices);
        }
        Message::Records(records) => {
            for record in records {
                assert!(is_plain(&record.pair.0) && is_plain(&record.pair.1));
                assert!(record.bytes.into_iter().flatten().all(|bytes| bytes <= 1 << 50));
            }
        }
        Message::Step(step) => assert!(step.steps.max(step.samples.unwrap_or(0)) <= 1 << 50),
        Message::Settings(settings) => {
            assert!(settings.len() <= super::message::MAX_SETTINGS);
            assert!(
                settings.iter().all(|(name, value)| name.len() <= 64 && !value.contains(char::is_control))
            );
        }
        Message::ForgetPeaks => {}
        Message::Oom(oom) => {
            assert!(oom.snapshot.as_ref().is_none_or(|path| !path.contains(char::is_control)));
            assert!(oom.device.is_none_or(|device| device < 64));
            let numbers = [oom.tried, oom.total, oom.free, oom.allocated, oom.reserved, oom.inactive_split];
            // allocated and unallocated memory of a text are added up
            assert!(numbers.into_iter().flatten().all(|bytes| bytes <= 1 << 51));
            assert!(
                oom.operation
                    .is_none_or(|(component, operation)| is_plain(&component) && is_plain(&operation))
            );
        }
        Message::Cleaned(cleaned) => {
            let (before, after, milliseconds) = cleaned.outcome.unwrap_or_default();
            assert!(before.max(after) <= 64 << 50 && milliseconds <= 1 << 50);
        }
        Message::Ignored => {}
    }
}

fn devices(devices: &[TorchMemory]) {
    assert!(devices.len() <= 64);
    // so many processes can be added up without an overflow
    assert!(devices.iter().filter_map(|device| device.alloc.max(device.res)).all(|bytes| bytes <= 1 << 50));
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    fn packet() -> impl Strategy<Value = String> {
        let kind = prop::sample::select(vec!["hello", "sample", "operation", "records", "step", "oom"]);
        let field = prop::sample::select(vec![
            "\"v\":1",
            "\"v\":2",
            "\"n\":7",
            "\"rss\":-1",
            "\"component\":\"model\"",
            "\"of\":[[\"model\",\"forward\",7,1,null,3,4]]",
            "\"of\":[[\"mod el\",\"\",-7,1,null,3]]",
            "\"operation\":\"a b\"",
            "\"operation\":\"forward\"",
            "\"dev\":[{\"i\":0,\"alloc\":1}]",
            "\"dev\":[{\"i\":0},{\"i\":0}]",
            "\"dev\":7",
            "\"devices\":[{\"i\":1,\"uuid\":\"GPU-A\"}]",
            "\"local_rank\":63",
            "\"local_rank\":64",
            "\"lost\":18446744073709551615",
            "\"tried\":1099511627776",
            "\"operation\":[\"model\",\"forward\"]",
            "\"text\":\"CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 9 GiB total capacity\"",
            "\"uncaught\":true",
        ]);
        (kind, prop::collection::vec(field, 0..6)).prop_map(|(kind, fields)| {
            format!("{{\"t\":\"{kind}\",{}}}", fields.join(",")).replace(",}", "}")
        })
    }

    proptest! {
        #[test]
        fn messages_are_bounded_for_any_packet(text in packet(), bytes in prop::collection::vec(any::<u8>(), 0..300), at in 0_usize..300) {
            super::message(text.as_bytes());
            super::message(&bytes);
            let mut damaged = text.into_bytes();
            let at = at.min(damaged.len());
            damaged.splice(at..at, bytes.into_iter().take(3));
            super::message(&damaged);
        }
    }
}
