//! The page at `/`: version, links, and the memory of the running containers.

use std::fmt::Write;

use super::snapshot_cache::NoSnapshot;
use crate::export::PAGE_STYLE;
use crate::overview::Overview;
use crate::overview::table::{CONTAINERS, Cells, GPUS, Kind, host_line};
use crate::text::escape_html;

/// Rows of the table; the metrics have all containers.
const MAX_ROWS: usize = 50;

/// Renders the page.
pub fn page(telemetry_path: &str, overview: Result<Overview, NoSnapshot>) -> String {
    let mut body = String::new();
    match overview {
        Err(reason) => drop(write!(body, "<p>No data: {reason}.</p>")),
        Ok(overview) => containers(&overview, &mut body),
    }
    format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><title>memledger</title>\
         <meta name=\"viewport\" content=\"width=device-width\"><style>{PAGE_STYLE}</style></head><body>\
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

fn containers(overview: &Overview, body: &mut String) {
    let _ = write!(body, "<p>Running containers: {}.</p>", overview.containers.len());
    if !overview.containers.is_empty() {
        let shown = &overview.containers[..overview.containers.len().min(MAX_ROWS)];
        table(&Cells::of(&CONTAINERS, shown, overview.at, 0), body);
        if overview.containers.len() > MAX_ROWS {
            let _ = write!(body, "<p><small>and {} more</small></p>", overview.containers.len() - MAX_ROWS);
        }
    }
    if !overview.gpus.is_empty() {
        table(&Cells::of(&GPUS, &overview.gpus, overview.at, 0), body);
    }
    let _ = write!(body, "<p>{}</p>", escape_html(&host_line(&overview.host)));
}

fn table(cells: &Cells, body: &mut String) {
    let class = |kind: Kind| if kind == Kind::Number { " class=n" } else { "" };
    body.push_str("<table><tr>");
    for (title, kind) in &cells.columns {
        let _ = write!(body, "<th{}>{title}</th>", class(*kind));
    }
    for row in &cells.rows {
        body.push_str("</tr><tr>");
        for (cell, (_, kind)) in row.iter().zip(&cells.columns) {
            let _ = write!(body, "<td{}>{}</td>", class(*kind), escape_html(cell));
        }
    }
    body.push_str("</tr></table>");
}
