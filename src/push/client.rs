//! One request to one endpoint, over gRPC or HTTP. A client is one connection and lives for one push.

use std::io::Write;
use std::sync::Arc;

use axum::body::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use prost::bytes::{Buf, BufMut};
use tonic::Status;
use tonic::client::Grpc;
use tonic::codec::{Codec, CompressionEncoding, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::http::uri::{PathAndQuery, Uri};
use tonic::codegen::http::{HeaderMap, HeaderValue, Request, header};
use tonic::metadata::MetadataMap;
use tonic::transport::{Channel, Endpoint};

use super::answer::{Answer, of_http, of_status, taken};
use super::chain;
use super::connect::Connector;
use crate::clock::Moment;
use crate::collect::pushed::Signal;
use crate::config::otlp::Target;

/// Most of an answer that is read.
const LONGEST_ANSWER: usize = 64 << 10;
const AGENT: &str = concat!("OTel-OTLP-Exporter-memledger/", env!("CARGO_PKG_VERSION"));

/// An open connection.
#[derive(Debug)]
pub struct Client {
    target: Arc<Target>,
    signal: Signal,
    wire: Wire,
}

#[derive(Debug)]
enum Wire {
    Grpc(Box<Grpc<Channel>>),
    Http(http1::SendRequest<Full<Bytes>>),
}

impl Client {
    /// Connects.
    ///
    /// # Errors
    /// For people.
    pub async fn open(target: &Arc<Target>, signal: Signal) -> Result<Self, String> {
        let connector = Connector::new(target);
        let wire = if target.grpc {
            Wire::Grpc(Box::new(grpc(target, connector).await?))
        } else {
            let connection = connector.connect().await.map_err(|error| chain(&error))?;
            let (sender, driver) = http1::handshake(connection).await.map_err(|error| chain(&error))?;
            tokio::spawn(driver); // it ends with the sender
            Wire::Http(sender)
        };
        Ok(Self { target: Arc::clone(target), signal, wire })
    }

    /// Sends one request. After [`Answer::Later`] the connection may be dead.
    ///
    /// # Errors
    /// The connection is dead; why, for people.
    pub async fn send(&mut self, body: Bytes) -> Result<Answer, String> {
        match &mut self.wire {
            Wire::Grpc(grpc) => {
                let path = PathAndQuery::from_static(match self.signal {
                    Signal::Metrics => "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
                    Signal::Logs => "/opentelemetry.proto.collector.logs.v1.LogsService/Export",
                });
                let headers: HeaderMap = self.target.headers.iter().cloned().collect();
                let mut request = tonic::Request::from_parts(
                    MetadataMap::from_headers(headers),
                    tonic::Extensions::default(),
                    body,
                );
                request.set_timeout(self.target.timeout);
                grpc.ready().await.map_err(|error| chain(&error))?;
                Ok(match grpc.unary(request, path, Raw).await {
                    Ok(response) => taken(response.get_ref()),
                    Err(status) => of_status(&status),
                })
            }
            Wire::Http(sender) => http(sender, &self.target, body).await,
        }
    }
}

async fn grpc(target: &Target, connector: Connector) -> Result<Grpc<Channel>, String> {
    let authority = target.endpoint.authority();
    let uri =
        |scheme: &str| format!("{scheme}://{authority}").parse::<Uri>().map_err(|error| error.to_string());
    let origin = uri(if target.endpoint.tls { "https" } else { "http" })?;
    // TLS is the connector's business, so that it is the same for HTTP; the endpoint is told of it by the origin
    let endpoint = Endpoint::from(uri("http")?).user_agent(AGENT).map_err(|error| chain(&error))?;
    let channel = endpoint.connect_with_connector(connector).await.map_err(|error| chain(&error))?;
    let grpc = Grpc::with_origin(channel, origin).max_decoding_message_size(LONGEST_ANSWER);
    Ok(match target.gzip {
        true => grpc.send_compressed(CompressionEncoding::Gzip).accept_compressed(CompressionEncoding::Gzip),
        false => grpc,
    })
}

async fn http(
    sender: &mut http1::SendRequest<Full<Bytes>>,
    target: &Target,
    body: Bytes,
) -> Result<Answer, String> {
    let body = if target.gzip { compressed(&body).map_err(|error| chain(&error))? } else { body };
    let mut request = Request::post(&target.endpoint.path)
        .header(header::HOST, target.endpoint.authority())
        .header(header::CONTENT_TYPE, "application/x-protobuf")
        .header(header::CONTENT_LENGTH, body.len())
        .header(header::USER_AGENT, AGENT)
        .body(Full::new(body))
        .map_err(|error| chain(&error))?;
    if target.gzip {
        request.headers_mut().insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    for (name, value) in &target.headers {
        request.headers_mut().insert(name, value.clone());
    }
    sender.ready().await.map_err(|error| chain(&error))?;
    let response = sender.send_request(request).await.map_err(|error| chain(&error))?;
    let (parts, body) = response.into_parts();
    let body = Limited::new(body, LONGEST_ANSWER).collect().await.map_err(|error| chain(&*error))?;
    Ok(of_http(parts.status, &parts.headers, &body.to_bytes(), Moment::now().unix_seconds()))
}

fn compressed(body: &[u8]) -> std::io::Result<Bytes> {
    let mut encoder = GzEncoder::new(Vec::with_capacity(body.len() / 8), Compression::fast());
    encoder.write_all(body)?;
    encoder.finish().map(Bytes::from)
}

/// Messages that are encoded already, and answers that are decoded elsewhere.
#[derive(Clone, Copy, Debug)]
struct Raw;

impl Codec for Raw {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Raw;
    type Decoder = Raw;

    fn encoder(&mut self) -> Raw {
        Raw
    }

    fn decoder(&mut self) -> Raw {
        Raw
    }
}

impl Encoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, message: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put(message);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(buffer.copy_to_bytes(buffer.remaining())))
    }
}
