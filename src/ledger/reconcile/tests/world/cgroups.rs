//! The cgroups of the world: their counters, and what a cycle samples in them.

use std::path::PathBuf;
use std::sync::Arc;

use super::{NAMES, TrueKill, World};
use crate::attribute::roles::Role;
use crate::clock::Timestamp;
use crate::discover::{Cgroup, Container, ContainerSpec, Identity, Inventory};
use crate::ledger::exchange::CycleReport;
use crate::ledger::sources::cgroup_oom_events::CounterReading;
use crate::runs::usage::{ContainerUsage, ProcessUsage};

impl World {
    /// Returns the cgroup of a container, relative to the root.
    pub fn cgroup(&self, container: usize) -> String {
        let id = Self::id(container);
        match self.outer.filter(|outer| *outer != container) {
            Some(outer) => format!("docker/{}/docker/{}", Self::id(outer).as_str(), id.as_str()),
            None => format!("docker/{}", id.as_str()),
        }
    }

    fn inode(container: usize, run: usize) -> u64 {
        (container * 100 + run) as u64
    }

    fn is_running(&self, container: usize, run: usize, at: u64) -> bool {
        let run = &self.runs[container][run];
        run.start <= at && run.end.is_none_or(|end| at < end)
    }

    /// Returns the number of kills that a cgroup has counted then.
    fn counted(&self, container: usize, run: usize, at: u64) -> u64 {
        let is_around =
            |inner: usize| self.sources.hierarchical && self.outer == Some(container) && inner != container;
        let is_counted = |owner: (usize, usize)| owner == (container, run) || is_around(owner.0);
        let own = self.kills.iter().filter(|kill| kill.at <= at && kill.owner.is_some_and(is_counted));
        own.map(|kill| 1 + u64::from(kill.repeated.is_some_and(|repeated| repeated <= at))).sum()
    }

    /// Returns the counters of the cgroups that exist then. `is_known`: a container inside another one is known; otherwise its
    /// cgroup is a part of the outer one's.
    pub fn readings(
        &self,
        at: u64,
        first_sweep: u64,
        is_known: impl Fn(usize) -> bool,
    ) -> Vec<CounterReading> {
        let mut readings = Vec::new();
        for (container, runs) in self.runs.iter().enumerate().filter(|_| self.sources.cgroups) {
            let outer = self.outer.filter(|outer| *outer != container && !is_known(container));
            if outer.is_some() && self.sources.hierarchical {
                continue; // the outer counter includes it
            }
            for number in (0..runs.len()).filter(|number| self.is_running(container, *number, at)) {
                readings.push(CounterReading {
                    id: Self::id(outer.unwrap_or(container)),
                    path: self.cgroup(container).into(),
                    inode: Self::inode(container, number),
                    kills: self.counted(container, number, at),
                    fresh: runs[number].start > first_sweep,
                });
            }
        }
        readings
    }

    /// Returns whether a container runs then.
    pub fn is_alive(&self, container: usize, at: u64) -> bool {
        (0..self.runs[container].len()).any(|run| self.is_running(container, run, at))
    }

    /// Returns what a cycle samples then: the containers that the runtime reported so far, and their processes.
    pub fn cycle(&self, begin: Timestamp, at: u64) -> CycleReport {
        let mut report = CycleReport {
            at: self.clocks(begin, at),
            inventory: Arc::default(),
            containers: vec![],
            host_memory: None,
            gpus: vec![],
        };
        let mut inventory =
            Inventory { runtimes: vec![(self.sources.kind.runtime(), true)], ..Inventory::default() };
        for (container, runs) in self.runs.iter().enumerate() {
            let is_listed = |run: &usize| {
                self.is_running(container, *run, at) && runs[*run].start + self.sources.runtime_lag <= at
            };
            let Some(run) = (0..runs.len()).find(is_listed) else { continue };
            inventory.containers.push(Arc::new(self.listed(begin, container, run)));
            let processes = self.processes(container, run, at);
            report.containers.push(Arc::new(ContainerUsage { processes, ..ContainerUsage::default() }));
        }
        report.inventory = Arc::new(inventory);
        report
    }

    fn listed(&self, begin: Timestamp, container: usize, run: usize) -> Container {
        let is_named = self.nameless != Some(container);
        let (id, name) = (Self::id(container), Self::name(container));
        let name = if is_named { &name } else { id.short() };
        let spec = Arc::new(ContainerSpec { image: "image".into(), ..ContainerSpec::default() });
        let started = self.clocks(begin, self.runs[container][run].start).unix_seconds();
        Container {
            id: id.clone(),
            runtime: self.sources.kind.runtime(),
            spec: if is_named { spec } else { Arc::default() },
            started: is_named.then_some(started),
            cgroup: Some(Arc::new(Cgroup {
                path: PathBuf::from(self.cgroup(container)),
                inode: Some(Self::inode(container, run)),
                below: vec![],
                is_truncated: false,
            })),
            nested: self.outer.is_some_and(|outer| outer != container),
            ..Container::known_by_name(Identity::named(name))
        }
    }

    /// Returns the processes of a run: the first one, and those that will be killed.
    fn processes(&self, container: usize, run: usize, at: u64) -> Vec<ProcessUsage> {
        let victims = self.kills.iter().filter(|kill| kill.owner == Some((container, run)));
        let is_first = |kill: &&TrueKill| kill.main && kill.trace.teardown == 0;
        let main = victims.clone().find(is_first).map_or(2, |kill| kill.trace.name);
        let children = victims.filter(|kill| !is_first(kill) && kill.at + kill.trace.teardown > at);
        let first = (self.runs[container][run].pid, main);
        let all = std::iter::once(first).chain(children.map(|kill| (kill.pid, kill.trace.name)));
        let process = |(pid, name): (u32, usize)| ProcessUsage {
            pid,
            ppid: 1,
            comm: NAMES[name].into(),
            role: Role::Other,
            python: false,
            memory: crate::collect::process::ResidentMemory::default(),
            pss_bytes: None,
            program: None,
        };
        all.map(process).collect()
    }
}
