//! Bytes that the commits of one kill write.

use super::*;

/// Returns how many bytes this thread has written to files.
fn written_bytes() -> u64 {
    let counters = std::fs::read_to_string("/proc/thread-self/io").unwrap();
    counters.lines().find_map(|line| line.strip_prefix("wchar: ")?.parse().ok()).unwrap()
}

fn labels(number: usize) -> ContainerLabels {
    ContainerLabels { container_name: format!("train-{number}").into(), ..ContainerLabels::default() }
}

fn container_rows(number: usize, batch: &mut WriteBatch) {
    let container = ContainerState {
        name: labels(number),
        image: "registry.example/team/train:1.2".into(),
        ..ContainerState::default()
    };
    batch.containers.insert(ContainerId::new(&format!("{number:064x}")), Some(container));
    batch.container_counters.insert(labels(number), Some(ContainerCounters::default()));
}

#[test]
fn one_kill_beside_a_hundred_containers_writes_few_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = open(dir.path()).store;
    let mut all = changes((1..=50).map(|id| exit(id, id as f64, "train", 'a')));
    (0..100).for_each(|number| container_rows(number, &mut all));
    store.commit(&all).unwrap();
    let before = written_bytes();
    // noticed, with the owner; and settled
    for (owner, records) in [
        (KillOwner::Pending, 1),
        (KillOwner::Container(ContainerRef { started: Some(1.0), ..subject("train", 'a') }), 2),
    ] {
        let mut batch = changes([kill(51, 100.0, owner)]);
        batch.totals.extend([(Total::Host, 1), (Total::Gaps, 0)]);
        container_rows(7, &mut batch);
        batch
            .containers
            .values_mut()
            .flatten()
            .for_each(|state| state.image = format!("{records}").as_str().into());
        batch.pending_kills.insert(51, (records == 1).then(PersistedKill::default));
        let mut accounting = AccountingCheckpoint::default();
        accounting.records = records;
        batch.accounting = Some(accounting);
        batch.runtime_cursors.insert("docker".into(), records as f64);
        store.commit(&batch).unwrap();
    }
    let written = written_bytes() - before; // each page twice, to the journal as it was
    assert!(written < 80_000, "{written} bytes");
}
