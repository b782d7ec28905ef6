//! The body of an answer, which is under way until it is sent.
//!
//! It is handed to hyper in small pieces, each a copy: hyper takes the next one when it has sent most of those before, so that
//! the body, and with it the request's place and the text, which may be megabytes, live until all but a little is on its way.
//! Handed over whole, the body would end at once, and a slow reader would hold memory that nobody counts.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::body::{Body, Bytes, HttpBody};
use hyper::body::{Frame, SizeHint};

use super::pulse::Sending;

/// Bytes of a piece. Of HTTP/2 each stream may hold one that nobody reads, until the connection is idle for too long or old.
pub const PIECE_BYTES: usize = 4 << 10;

/// The body.
pub struct Answer {
    body: Body,
    rest: Bytes,
    _sending: Sending,
}

impl Answer {
    /// This body.
    pub fn new(body: Body, sending: Sending) -> Self {
        Self { body, rest: Bytes::new(), _sending: sending }
    }
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = self.get_mut();
        while this.rest.is_empty() {
            match ready!(Pin::new(&mut this.body).poll_frame(context)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => this.rest = data,
                    Err(other) => return Poll::Ready(Some(Ok(other))),
                },
                end => return Poll::Ready(end),
            }
        }
        let piece = this.rest.split_to(PIECE_BYTES.min(this.rest.len()));
        let piece = Bytes::copy_from_slice(&piece);
        if this.rest.is_empty() {
            this.rest = Bytes::new(); // an empty rest holds the whole text too
        }
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (rest, body) = (self.rest.len() as u64, self.body.size_hint());
        let mut hint = SizeHint::new();
        hint.set_lower(rest + body.lower());
        if let Some(upper) = body.upper() {
            hint.set_upper(rest + upper);
        }
        hint
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;
    use crate::clock::Moment;
    use crate::serve::pulse::Pulse;

    #[test]
    fn it_comes_in_pieces_whose_sum_is_the_text_and_says_its_length_at_each() {
        let text: Vec<u8> = (0..100_000_u32).map(|number| number as u8).collect();
        let now = Moment::now();
        let sending = Pulse::new(now).begin(now).made(None, now);
        let mut answer = Answer::new(Body::from(text.clone()), sending);
        let (mut got, mut context) = (Vec::new(), Context::from_waker(Waker::noop()));
        while !answer.is_end_stream() {
            assert_eq!(answer.size_hint().exact(), Some((text.len() - got.len()) as u64));
            let Poll::Ready(Some(Ok(frame))) = Pin::new(&mut answer).poll_frame(&mut context) else {
                panic!("it waits");
            };
            let piece = frame.into_data().unwrap();
            assert!(piece.len() <= PIECE_BYTES);
            got.extend_from_slice(&piece);
        }
        assert!(got == text);
        assert!(matches!(Pin::new(&mut answer).poll_frame(&mut context), Poll::Ready(None)));
    }
}
