//! Bytes that the commits of one kill write.

use super::*;

/// Returns how many bytes this thread has written to files.
fn written_bytes() -> u64 {
    let counters = std::fs::read_to_string("/proc/thread-self/io").unwrap();
    counters.lines().find_map(|line| line.strip_prefix("wchar: ")?.parse().ok()).unwrap()
}

fn labels(number: usize) -> Identity {
    Identity { name: format!("train-{number}").into(), ..Identity::default() }
}

fn container_rows(number: usize, image: &str, batch: &mut WriteBatch) {
    let container =
        ContainerState { identity: labels(number), image: image.into(), ..ContainerState::default() };
    batch.put(StateKind::Container, format!("{number:064x}"), &container);
    batch.put(StateKind::Counters, labels(number), &ContainerCounters::default());
}

#[test]
fn one_kill_beside_a_hundred_containers_writes_few_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = open(dir.path()).store;
    let mut all = changes((1..=50).map(|id| exit(id, id as f64, "train", 'a')));
    (0..100).for_each(|number| container_rows(number, "registry.example/team/train:1.2", &mut all));
    store.commit(&all).unwrap();
    let before = written_bytes();
    // noticed, with the owner; and settled
    for (owner, records) in [
        (KillOwner::Pending, 1),
        (KillOwner::Container(ContainerRef { started: Some(1.0), ..subject("train", 'a') }), 2),
    ] {
        let mut batch = changes([kill(51, 100.0, owner)]);
        batch.put(StateKind::Total, "host_oom_kills", &1);
        batch.put(StateKind::Total, "oom_kills_without_record", &0);
        container_rows(7, &records.to_string(), &mut batch);
        match records {
            1 => batch.put(StateKind::PendingKill, 51, &PersistedKill::default()),
            _ => batch.remove(StateKind::PendingKill, 51),
        }
        let accounting = AccountingCheckpoint { records, ..AccountingCheckpoint::default() };
        batch.put(StateKind::Accounting, "", &accounting);
        batch.put(StateKind::RuntimeCursor, "docker", &(records as f64));
        store.commit(&batch).unwrap();
    }
    let written = written_bytes() - before; // each page twice, to the journal as it was
    assert!(written < 80_000, "{written} bytes");
}
