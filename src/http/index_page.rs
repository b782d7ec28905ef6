//! The page at `/`: version, links, and the memory of the running containers.

use std::fmt::Write;
use std::sync::Arc;

use super::snapshot_cache::{NoSnapshot, RenderedSnapshot};
use crate::catalog::FamilyId;
use crate::series::human_bytes;
use crate::snapshot::Snapshot;

const STYLE: &str = "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1b1f24}\
table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.3rem .8rem .3rem 0;border-bottom:1px solid #d8dee4}\
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}small{color:#57606a}\
@media(prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}a{color:#58a6ff}th,td{border-color:#30363d}small{color:#8b949e}}";

/// Rows of the table; the metrics have all containers.
const MAX_ROWS: usize = 50;

/// Renders the page.
pub fn page(telemetry_path: &str, newest: Result<Arc<RenderedSnapshot>, NoSnapshot>) -> String {
    let mut body = String::new();
    match newest {
        Err(reason) => drop(write!(body, "<p>No data: {reason}.</p>")),
        Ok(newest) => table(&newest, &mut body),
    }
    format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><title>memledger</title>\
         <meta name=\"viewport\" content=\"width=device-width\"><style>{STYLE}</style></head><body>\
         <h1>memledger</h1><p>Memory of containers on this GPU host. Version {}.</p>{body}\
         <ul><li><a href=\"{telemetry_path}\">Metrics</a></li>\
         <li><a href=\"/api/v1/containers\">Containers and their processes as JSON</a> \
         <small>(with a password or a client certificate, unless --web.enable-api is set)</small></li>\
         <li><a href=\"/api/v1/events\">OOM kills and container exits as JSON</a>, \
         <a href=\"/api/v1/runs\">what each run needed</a> \
         <small>(same access)</small>; why a container was killed or exited: \
         <code>memledger why NAME</code>, or <code>/api/v1/containers/NAME/why</code></li>\
         <li><a href=\"/-/ready\">Ready?</a> <a href=\"/-/healthy\">Healthy?</a></li></ul></body></html>\n",
        env!("CARGO_PKG_VERSION")
    )
}

fn table(newest: &RenderedSnapshot, body: &mut String) {
    let snapshot = newest.snapshot();
    let unreclaimable = by_container(snapshot, FamilyId::CONTAINER_MEMORY_UNRECLAIMABLE);
    let others = [
        FamilyId::CONTAINER_MEMORY_WORKING_SET,
        FamilyId::CONTAINER_MEMORY_EFFECTIVE_LIMIT,
        FamilyId::CONTAINER_GPU_MEMORY,
    ]
    .map(|family| by_container(snapshot, family));
    let mut rows: Vec<usize> = (0..snapshot.running).collect();
    rows.sort_by(|a, b| {
        let size = |number: usize| unreclaimable[number].unwrap_or(-1.0);
        size(*b).total_cmp(&size(*a))
    });
    let _ = write!(body, "<p>Running containers: {}.</p>", snapshot.running);
    if rows.is_empty() {
        return;
    }
    body.push_str(
        "<table><tr><th>Container</th><th class=n>Unreclaimable</th><th class=n>Working set</th>\
         <th class=n>Limit</th><th class=n>GPU memory</th></tr>",
    );
    let cell = |value: Option<f64>| value.map_or_else(|| "&ndash;".to_owned(), human_bytes);
    for number in rows.iter().copied().take(MAX_ROWS) {
        let name = escape(&snapshot.containers[number].identity.name);
        let _ = write!(body, "<tr><td>{name}</td><td class=n>{}</td>", cell(unreclaimable[number]));
        for values in &others {
            let _ = write!(body, "<td class=n>{}</td>", cell(values[number]));
        }
        body.push_str("</tr>");
    }
    body.push_str("</table>");
    if rows.len() > MAX_ROWS {
        let _ = write!(body, "<p><small>and {} more</small></p>", rows.len() - MAX_ROWS);
    }
}

/// Returns the sum of a family's rows for each running container; `None` where it has none.
fn by_container(snapshot: &Snapshot, family: FamilyId) -> Vec<Option<f64>> {
    let mut sums = vec![None; snapshot.running];
    for row in snapshot.family(family) {
        if let Some(sum) = sums.get_mut(row.container as usize) {
            *sum = Some(sum.unwrap_or(0.0) + row.value);
        }
    }
    sums
}

/// Escapes text for HTML: names of containers are untrusted.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
