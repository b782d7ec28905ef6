//! A response made of pages of the ledger, so that one of any length costs the memory of a page.

use std::sync::Arc;

use axum::body::Body;
use axum::response::Response;
use futures_util::{StreamExt, stream};

use super::{HttpState, Rejected, json};
use crate::export::events::json_page;

/// Responds with `{"NAME":[...]}`. `read` reads rows of JSON on a blocking thread, at a cursor or from the beginning, and returns the cursor
/// of the next page: that is read when the client has received most of the page before it. An error in the first page has a status of its
/// own; a later one aborts the response.
pub async fn respond<C: Send + 'static>(
    shared: Arc<HttpState>,
    name: &'static str,
    read: impl Fn(Option<C>) -> Result<(Vec<String>, Option<C>), Rejected> + Clone + Send + Sync + 'static,
) -> Result<Response, Response> {
    let page = async move |at: Option<C>| {
        let read = read.clone();
        let page = move || {
            let is_first = at.is_none();
            let (rows, next) = read(at)?;
            Ok((json_page(name, &rows, is_first, next.is_none()), next))
        };
        shared.read_ledger(page).await
    };
    let (first, next) = page(None).await?;
    let rest = stream::try_unfold((page, next), async |(page, at)| {
        let Some(at) = at else { return Ok(None) };
        let failed = |answer: Response| format!("reading the ledger failed: {}", answer.status());
        let (text, next) = page(Some(at)).await.map_err(failed).map_err(std::io::Error::other)?;
        Ok(Some((text, (page, next))))
    });
    let first = stream::once(std::future::ready(Ok::<_, std::io::Error>(first)));
    Ok(json(Body::from_stream(first.chain(rest))))
}
