//! Memory at each point that a program recorded: the `detailed_log` of its `memory_usage.json`. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Maximum number of records of a run: then every other one of each component and operation is dropped, and they are kept half as often.
const MAX_RECORDS: usize = 1_024;
/// Maximum number of components and operations that are counted.
const MAX_PAIRS: usize = 256;

type Pair = (Arc<str>, Arc<str>);

/// Memory at one point of a program, in bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "StoredRecord", into = "StoredRecord")]
pub struct OperationRecord {
    /// Component of the program.
    pub component: Arc<str>,
    /// Operation of the component.
    pub operation: Arc<str>,
    /// Unix time.
    pub at: f64,
    /// Resident memory, and PyTorch's allocated bytes, their peak, and its reserved bytes.
    pub bytes: [Option<u64>; 4],
}

/// A record as a list: there are many.
type StoredRecord = (Arc<str>, Arc<str>, f64, [Option<u64>; 4]);

impl From<StoredRecord> for OperationRecord {
    fn from((component, operation, at, bytes): StoredRecord) -> Self {
        Self { component, operation, at, bytes }
    }
}

impl From<OperationRecord> for StoredRecord {
    fn from(record: OperationRecord) -> Self {
        (record.component, record.operation, record.at, record.bytes)
    }
}

/// The records of a run, from the first to the newest.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct OperationLog {
    records: Vec<OperationRecord>,
    /// Records of each pair so far; one in `2^halved` is kept.
    counts: Vec<(Pair, u64)>,
    halved: u32,
    /// The newest record, if it was not kept: the end of a program is in the log.
    newest: Option<OperationRecord>,
}

impl OperationLog {
    /// Adds a record.
    pub fn add(&mut self, record: OperationRecord) {
        let pair = (Arc::clone(&record.component), Arc::clone(&record.operation));
        let place = self.counts.iter().position(|(known, _)| *known == pair);
        let number = match place {
            Some(place) => {
                self.counts[place].1 += 1;
                self.counts[place].1
            }
            None if self.counts.len() < MAX_PAIRS => {
                self.counts.push((pair, 0));
                0
            }
            None => return,
        };
        if !number.is_multiple_of(1 << self.halved) {
            self.newest = Some(record);
            return;
        }
        self.newest = None;
        self.records.push(record);
        if self.records.len() > MAX_RECORDS {
            self.halve();
        }
    }

    fn halve(&mut self) {
        let mut seen: BTreeMap<Pair, usize> = BTreeMap::new();
        self.records.retain(|record| {
            let count =
                seen.entry((Arc::clone(&record.component), Arc::clone(&record.operation))).or_default();
            *count += 1;
            *count % 2 == 1
        });
        self.halved += 1;
    }

    /// Adds the records of the same run that came after its exit was noticed: `later` has these alone, or all of the run.
    pub fn extend(&mut self, later: &Self) {
        let total = |log: &Self| log.counts.iter().map(|(_, last)| last + 1).sum::<u64>();
        if !self.records.is_empty() && self.records.first() == later.records.first() {
            if total(later) > total(self) {
                self.clone_from(later);
            }
            return;
        }
        let records = later.records.iter().chain(&later.newest);
        records.cloned().for_each(|record| self.add(record));
    }

    /// Returns the records, oldest first.
    pub fn into_records(self) -> Vec<OperationRecord> {
        let mut records = self.records;
        records.extend(self.newest);
        records.sort_by(|one, other| one.at.total_cmp(&other.at));
        records
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(operation: &str, at: u32) -> OperationRecord {
        let bytes = [Some(u64::from(at)), None, None, None];
        OperationRecord { component: "model".into(), operation: operation.into(), at: f64::from(at), bytes }
    }

    #[test]
    fn each_record_is_kept_and_of_too_many_those_from_the_first_to_the_newest() {
        let mut log = OperationLog::default();
        for number in 0..500 {
            log.add(record("before", 2 * number));
            log.add(record("after", 2 * number + 1));
        }
        let records = log.clone().into_records();
        assert_eq!(records.len(), 1_000);
        assert!(records.iter().enumerate().all(|(number, record)| record.at == number as f64));
        for number in 500..5_000 {
            log.add(record("before", 2 * number));
            log.add(record("after", 2 * number + 1));
        }
        let records = log.into_records();
        assert!((MAX_RECORDS / 2..=MAX_RECORDS + 1).contains(&records.len()), "{}", records.len());
        assert_eq!((records[0].at, records[records.len() - 1].at), (0.0, 9_999.0));
        let after = records.iter().filter(|record| &*record.operation == "after").count();
        assert!(after.abs_diff(records.len() / 2) <= 1, "each operation has its share: {after}");
    }

    #[test]
    fn records_after_the_exit_are_added_once() {
        let mut noticed = OperationLog::default();
        noticed.add(record("before", 1));
        let mut later = OperationLog::default();
        later.add(record("end", 2));
        let mut all = noticed.clone();
        all.add(record("end", 2));
        for other in [later, all] {
            let mut log = noticed.clone();
            log.extend(&other);
            let times: Vec<f64> = log.clone().into_records().iter().map(|record| record.at).collect();
            assert_eq!(times, [1.0, 2.0]);
            log.extend(&noticed);
            assert_eq!(log.into_records().len(), 2);
        }
    }

    #[test]
    fn record_is_stored_as_a_list() {
        let text = serde_json::to_string(&record("after", 7)).unwrap();
        assert_eq!(text, r#"["model","after",7.0,[7,null,null,null]]"#);
        assert_eq!(serde_json::from_str::<OperationRecord>(&text).unwrap(), record("after", 7));
    }
}
