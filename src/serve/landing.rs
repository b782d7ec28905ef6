//! The page at `/`: what this is, and who holds the memory right now.

use std::fmt::Write;
use std::sync::Arc;

use super::published::{Newest, NoSnapshot};
use crate::catalog::Id;
use crate::series::human_bytes;
use crate::snapshot::Snapshot;

const STYLE: &str = "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1b1f24}\
table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.3rem .8rem .3rem 0;border-bottom:1px solid #d8dee4}\
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}small{color:#57606a}\
@media(prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}a{color:#58a6ff}th,td{border-color:#30363d}small{color:#8b949e}}";

/// Rows of the table at most; the metrics have all.
const MOST_ROWS: usize = 50;

/// The page.
pub fn page(telemetry_path: &str, newest: Result<Arc<Newest>, NoSnapshot>) -> String {
    let mut body = String::new();
    match newest {
        Err(reason) => drop(write!(body, "<p>No figures: {reason}.</p>")),
        Ok(newest) => table(&newest, &mut body),
    }
    format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><title>memledger</title>\
         <meta name=\"viewport\" content=\"width=device-width\"><style>{STYLE}</style></head><body>\
         <h1>memledger</h1><p>Who holds the memory of this GPU host. Version {}.</p>{body}\
         <ul><li><a href=\"{telemetry_path}\">Metrics</a></li>\
         <li><a href=\"/api/v1/containers\">Containers and their processes as JSON</a> \
         <small>(from this host or with a password, unless --web.enable-api)</small></li>\
         <li><a href=\"/api/v1/events\">OOM kills and ends of containers as JSON</a> \
         <small>(likewise)</small>; why one ended or lost a process: \
         <code>memledger why NAME</code>, or <code>/api/v1/containers/NAME/why</code></li>\
         <li><a href=\"/-/ready\">Ready?</a> <a href=\"/-/healthy\">Healthy?</a></li></ul></body></html>\n",
        env!("CARGO_PKG_VERSION")
    )
}

fn table(newest: &Newest, body: &mut String) {
    let snapshot = newest.snapshot();
    let unreclaimable = by_container(snapshot, Id::CONTAINER_MEMORY_UNRECLAIMABLE);
    let others =
        [Id::CONTAINER_MEMORY_WORKING_SET, Id::CONTAINER_MEMORY_EFFECTIVE_LIMIT, Id::CONTAINER_GPU_MEMORY]
            .map(|family| by_container(snapshot, family));
    let mut rows: Vec<usize> = (0..snapshot.running).collect();
    rows.sort_by(|a, b| {
        let size = |number: usize| unreclaimable[number].unwrap_or(-1.0);
        size(*b).total_cmp(&size(*a))
    });
    let _ = write!(body, "<p>Containers that run: {}.</p>", snapshot.running);
    if rows.is_empty() {
        return;
    }
    body.push_str(
        "<table><tr><th>Container</th><th class=n>Cannot be reclaimed</th><th class=n>Working set</th>\
         <th class=n>Limit</th><th class=n>GPU memory</th></tr>",
    );
    let cell = |value: Option<f64>| value.map_or_else(|| "&ndash;".to_owned(), human_bytes);
    for number in rows.iter().copied().take(MOST_ROWS) {
        let name = escape(&snapshot.containers[number].identity.name);
        let _ = write!(body, "<tr><td>{name}</td><td class=n>{}</td>", cell(unreclaimable[number]));
        for values in &others {
            let _ = write!(body, "<td class=n>{}</td>", cell(values[number]));
        }
        body.push_str("</tr>");
    }
    body.push_str("</table>");
    if rows.len() > MOST_ROWS {
        let _ = write!(body, "<p><small>and {} more</small></p>", rows.len() - MOST_ROWS);
    }
}

/// The sum of a family's rows for each running container; `None` where it has none.
fn by_container(snapshot: &Snapshot, family: Id) -> Vec<Option<f64>> {
    let mut sums = vec![None; snapshot.running];
    for row in snapshot.family(family) {
        if let Some(sum) = sums.get_mut(row.container as usize) {
            *sum = Some(sum.unwrap_or(0.0) + row.value);
        }
    }
    sums
}

/// A container's name is somebody else's text.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
