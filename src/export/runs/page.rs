//! The report of a run as a page that needs no server: text, graphs as SVG, no script.

use std::fmt::Write;

use jiff::tz::TimeZone;

use super::{exit, graph, heading, report_rows};
use crate::export::PAGE_STYLE;
use crate::runs::RunRecord;
use crate::text::escape_html;

/// Returns the page of a run on this host, with the answer of `memledger why` where there is one. Times are in UTC.
pub fn page(run: &RunRecord, host: &str, why: Option<&str>) -> String {
    let heading = escape_html(&heading(run));
    let mut body =
        format!("<h1>{heading}</h1><p>{} on host {}.</p>", escape_html(&exit(run)), escape_html(host));
    if let Some(why) = why {
        let _ = write!(body, "<h2>Why it ended</h2><pre>{}</pre>", escape_html(why.trim_end()));
    }
    for (title, svg) in [("RAM", graph::ram(run)), ("VRAM", graph::vram(run))] {
        if let Some(svg) = svg {
            let _ = write!(body, "<h2>{title} over time</h2>{svg}");
        }
    }
    body.push_str("<h2>What it needed</h2><table>");
    // of a run that ended
    for (what, words) in report_rows(run, f64::INFINITY, &TimeZone::UTC) {
        let _ = write!(body, "<tr><th>{}</th><td>{}</td></tr>", escape_html(&what), escape_html(&words));
    }
    format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><title>{heading}</title>\
         <meta name=\"viewport\" content=\"width=device-width\"><style>{PAGE_STYLE}</style></head><body>{body}</table>\
         <p><small>memledger {}. Graphs have at most 60 samples; peaks are those of all samples.</small></p></body></html>\n",
        env!("CARGO_PKG_VERSION")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::export::runs::tests::run;

    #[test]
    fn page_escapes_names_and_loads_nothing() {
        let mut record = run("<script>alert(1)</script>", "32", 4 << 20);
        record.group = "a & b".into();
        let page = page(&record, "gpu<1>", Some("KILLED <now>\n"));
        assert!(page.contains("&lt;script&gt;") && !page.contains("<script"), "{page}");
        assert!(
            page.contains("a &amp; b")
                && page.contains("gpu&lt;1&gt;")
                && page.contains("KILLED &lt;now&gt;"),
            "{page}"
        );
        assert!(!page.contains("src=") && !page.contains("href="), "{page}");
    }
}
