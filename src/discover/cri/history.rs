//! The past of containers of pods: the runtime keeps the last ended container of each name until the pod is removed.

use std::collections::HashMap;

use tokio::time::timeout_at;

use super::convert::{Sandbox, complete, record};
use super::messages::{Container, ContainerState, ContainerStatus, ContainerStatusResponse};
use super::{CriClient, CriError, SocketSearch, find, unix_seconds};
use crate::config::{CriSettings, Filter};
use crate::discover::history::{ExistingContainer, HistoryQuery, RuntimeHistory, TIMEOUT};
use crate::discover::{ConnectionState, ContainerRecord, EventKind, RuntimeKind};

/// Reads what the kubelet's runtime knows of the past; `None` if there is none.
pub async fn history(
    settings: &CriSettings,
    filter: &Filter,
    query: HistoryQuery<'_>,
) -> Option<RuntimeHistory> {
    let mut history = RuntimeHistory { runtime: RuntimeKind::Cri, ..RuntimeHistory::default() };
    let client = match timeout_at(query.deadline, find(settings)).await {
        Ok(SocketSearch::Runtime(_, client)) => client,
        // a default socket without pods, or that may not be opened, is not known to be a runtime of pods
        Ok(SocketSearch::Nothing { connection, .. }) if connection != ConnectionState::Down => return None,
        Ok(SocketSearch::Nothing { why, .. }) => {
            history.error = Some(why);
            return Some(history);
        }
        Err(_) if !settings.is_explicit => return None,
        Err(_) => {
            history.error = Some("it does not respond: restart the container runtime".to_owned());
            return Some(history);
        }
    };
    if let Err(error) = read(&client, settings, filter, query, &mut history).await {
        history.error = Some(error.to_string());
    }
    Some(history)
}

async fn read(
    client: &CriClient,
    settings: &CriSettings,
    filter: &Filter,
    query: HistoryQuery<'_>,
    history: &mut RuntimeHistory,
) -> Result<(), CriError> {
    let lists = async { tokio::try_join!(client.sandboxes(), client.containers()) };
    let timed_out = CriError::Timeout("ListContainers", TIMEOUT);
    let (sandboxes, containers) = timeout_at(query.deadline, lists).await.unwrap_or(Err(timed_out))?;
    let sandboxes: HashMap<String, Sandbox> = sandboxes
        .into_iter()
        .filter_map(|sandbox| Some((sandbox.id.clone(), Sandbox::read(sandbox, settings)?)))
        .collect();
    let mut wanted: Vec<(Container, ContainerRecord)> = containers
        .into_iter()
        .filter_map(|container| {
            let record = record(&container, sandboxes.get(&container.pod_sandbox_id), filter)?;
            Some((container, record))
        })
        .collect();
    let rank = |record: &ContainerRecord| {
        query.rank(record.id.as_str(), |wanted| wanted.rsplit('/').next() == Some(&*record.spec.name))
    };
    wanted.sort_by_cached_key(|(container, record)| (rank(record), std::cmp::Reverse(container.created_at)));
    for (_, record) in &wanted {
        history.events.push(record.event(query.since, EventKind::Exists));
    }
    let status = |(container, record): (Container, ContainerRecord)| async move {
        let status = client.status(&container.id, true, std::time::Duration::from_secs(1)).await;
        (container, record, status)
    };
    history.unread = query
        .each(wanted, status, |(container, record, status)| match status {
            Ok(response) => {
                read_status(&container, record, &response, filter, history);
                true
            }
            Err(error) => error.is_gone(),
        })
        .await;
    Ok(())
}

fn read_status(
    container: &Container,
    mut record: ContainerRecord,
    response: &ContainerStatusResponse,
    filter: &Filter,
    history: &mut RuntimeHistory,
) {
    let started = complete(&mut record, response, filter);
    let status = response.status.as_ref();
    let is_running = container.state == ContainerState::Running as i32;
    if let Some(at) = record.started {
        history.events.push(record.event(at, EventKind::Running { pid: started.pid }));
        let finished = status.and_then(|status| Some((unix_seconds(status.finished_at)?, status)));
        history.events.extend(finished.map(|(at, status)| {
            let oom_flag = Some(status.reason == "OOMKilled");
            record.event(at, EventKind::Ended { exit_code: Some(status.exit_code.into()), oom_flag })
        }));
    }
    history.containers.push(ExistingContainer {
        id: record.id.clone(),
        runtime: RuntimeKind::Cri,
        restarts: record.spec.pod.as_ref().map(|pod| pod.attempt.into()),
        named: record.spec,
        is_running,
        first_process: None,
        has_lost_process: false,
        started: record.started,
        ended: status.and_then(|status| unix_seconds(status.finished_at)),
        start_error: status.and_then(ContainerStatus::start_error),
        log_path: status.filter(|status| !status.log_path.is_empty()).map(|status| (&status.log_path).into()),
        limit_bytes: status.and_then(ContainerStatus::memory_limit),
    });
}
