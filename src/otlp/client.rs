//! Sends export requests over gRPC or HTTP. A client is one connection and lives for one export.

use std::sync::Arc;

use axum::body::Bytes;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::client::conn::http1;
use prost::bytes::{Buf, BufMut};
use tonic::Status;
use tonic::client::Grpc;
use tonic::codec::{Codec, CompressionEncoding, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::http::uri::{PathAndQuery, Uri};
use tonic::codegen::http::{HeaderMap, HeaderValue, Request, header};
use tonic::metadata::MetadataMap;
use tonic::transport::{Channel, Endpoint};

use super::FILE_PERMITS;
use super::response::{ExportResult, accepted, from_http, from_status, too_long};
use crate::clock::Timestamp;
use crate::config::otlp::OtlpTarget;
use crate::connect::{Connector, RemoteServer};
use crate::export::gzip;
use crate::stats::otlp_stats::OtlpSignal;
use crate::text::error_chain;

/// Largest response that is read, in bytes.
const MAX_RESPONSE_BYTES: usize = crate::host::bounds::OTLP_RESPONSE.max_bytes;
const USER_AGENT: &str = concat!("OTel-OTLP-Exporter-memledger/", env!("CARGO_PKG_VERSION"));

/// An open connection to an endpoint.
#[derive(Debug)]
pub struct OtlpClient {
    target: Arc<OtlpTarget>,
    signal: OtlpSignal,
    transport: Transport,
}

#[derive(Debug)]
enum Transport {
    Grpc(Box<Grpc<Channel>>),
    Http(http1::SendRequest<Full<Bytes>>),
}

impl OtlpClient {
    /// Connects to the endpoint.
    ///
    /// # Errors
    /// A message for people.
    pub async fn open(target: &Arc<OtlpTarget>, signal: OtlpSignal) -> Result<Self, String> {
        let connector = Connector::new(server(target, signal));
        let transport = if target.grpc {
            Transport::Grpc(Box::new(connect_grpc(target, connector).await?))
        } else {
            Transport::Http(connector.connect_http1().await?)
        };
        Ok(Self { target: Arc::clone(target), signal, transport })
    }

    /// Sends one request. After [`ExportResult::Retry`] the connection may be dead.
    ///
    /// # Errors
    /// The connection is dead; a message for people.
    pub async fn send(&mut self, body: Bytes) -> Result<ExportResult, String> {
        match &mut self.transport {
            Transport::Grpc(grpc) => {
                let path = PathAndQuery::from_static(match self.signal {
                    OtlpSignal::Metrics => "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
                    OtlpSignal::Logs => "/opentelemetry.proto.collector.logs.v1.LogsService/Export",
                    OtlpSignal::Traces => "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
                });
                let headers: HeaderMap = self.target.headers.iter().cloned().collect();
                let mut request = tonic::Request::from_parts(
                    MetadataMap::from_headers(headers),
                    tonic::Extensions::default(),
                    body,
                );
                request.set_timeout(self.target.timeout);
                grpc.ready().await.map_err(|error| error_chain(&error))?;
                Ok(match grpc.unary(request, path, Raw).await {
                    Ok(response) => accepted(response.get_ref()),
                    Err(status) => from_status(&status),
                })
            }
            Transport::Http(sender) => send_http(sender, &self.target, body).await,
        }
    }
}

fn server(target: &OtlpTarget, signal: OtlpSignal) -> RemoteServer {
    let endpoint = &target.endpoint;
    RemoteServer {
        tls: endpoint.tls,
        host: endpoint.host.clone(),
        authority: endpoint.authority(),
        timeout: target.timeout,
        certificate: target.certificate.clone(),
        client: target.client.clone(),
        http2: target.grpc,
        settings: "--otlp.certificate and --otlp.client-certificate",
        file_permit: &FILE_PERMITS[signal as usize],
    }
}

async fn connect_grpc(target: &OtlpTarget, connector: Connector) -> Result<Grpc<Channel>, String> {
    let authority = target.endpoint.authority();
    let uri =
        |scheme: &str| format!("{scheme}://{authority}").parse::<Uri>().map_err(|error| error.to_string());
    let origin = uri(if target.endpoint.tls { "https" } else { "http" })?;
    // the connector does TLS, as for HTTP, so tonic's endpoint is http; the requests name the real scheme by the origin
    let endpoint =
        Endpoint::from(uri("http")?).user_agent(USER_AGENT).map_err(|error| error_chain(&error))?;
    let channel = endpoint.connect_with_connector(connector).await.map_err(|error| error_chain(&error))?;
    let grpc = Grpc::with_origin(channel, origin).max_decoding_message_size(MAX_RESPONSE_BYTES);
    Ok(match target.gzip {
        true => grpc.send_compressed(CompressionEncoding::Gzip).accept_compressed(CompressionEncoding::Gzip),
        false => grpc,
    })
}

async fn send_http(
    sender: &mut http1::SendRequest<Full<Bytes>>,
    target: &OtlpTarget,
    body: Bytes,
) -> Result<ExportResult, String> {
    let body = if target.gzip { gzip(&body).map_err(|error| error_chain(&error))?.into() } else { body };
    let mut request = Request::post(&target.endpoint.path)
        .header(header::HOST, target.endpoint.authority())
        .header(header::CONTENT_TYPE, "application/x-protobuf")
        .header(header::CONTENT_LENGTH, body.len())
        .header(header::USER_AGENT, USER_AGENT)
        .body(Full::new(body))
        .map_err(|error| error_chain(&error))?;
    if target.gzip {
        request.headers_mut().insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    for (name, value) in &target.headers {
        request.headers_mut().insert(name, value.clone());
    }
    sender.ready().await.map_err(|error| error_chain(&error))?;
    let response = sender.send_request(request).await.map_err(|error| error_chain(&error))?;
    let (parts, body) = response.into_parts();
    let body = match Limited::new(body, MAX_RESPONSE_BYTES).collect().await {
        Ok(body) => body.to_bytes(),
        Err(error) if !error.is::<LengthLimitError>() => return Err(error_chain(&*error)),
        Err(_) if parts.status.is_success() => return Ok(too_long()),
        // an error needs no body: its status decides
        Err(_) => Bytes::new(),
    };
    Ok(from_http(parts.status, &parts.headers, &body, Timestamp::now().unix_seconds()))
}

/// A codec without encoding: requests are encoded, and responses decoded, elsewhere.
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

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::config::otlp::OtlpEndpoint;
    use crate::otlp::response::RejectKind;

    /// Returns the result of a request whose response has this status, and a body of this length.
    async fn result(status: &str, length: usize) -> Result<ExportResult, String> {
        let (client, mut server) = tokio::io::duplex(1 << 20);
        let (mut sender, driver) = http1::handshake(hyper_util::rt::TokioIo::new(client))
            .await
            .map_err(|error| error.to_string())?;
        tokio::spawn(driver);
        let head = format!("HTTP/1.1 {status}\r\nRetry-After: 7\r\nContent-Length: {length}\r\n\r\n");
        tokio::spawn(async move {
            let mut seen = vec![];
            while !seen.ends_with(b"\r\n\r\nbody") {
                assert!(server.read_buf(&mut seen).await.unwrap() > 0);
            }
            server.write_all(head.as_bytes()).await.unwrap();
            server.write_all(&vec![b'x'; length]).await.unwrap();
        });
        let target = OtlpTarget {
            endpoint: OtlpEndpoint { tls: false, host: "a".into(), port: 1, path: "/v1/metrics".into() },
            grpc: false,
            headers: vec![],
            gzip: false,
            timeout: std::time::Duration::from_secs(60),
            certificate: None,
            client: None,
        };
        send_http(&mut sender, &target, Bytes::from_static(b"body")).await
    }

    #[tokio::test]
    async fn status_decides_about_errors_with_long_bodies() {
        let long = 2 * MAX_RESPONSE_BYTES;
        for (status, wanted) in
            [("400", RejectKind::Content), ("404", RejectKind::Unsupported), ("500", RejectKind::Other)]
        {
            let found = result(status, long).await;
            assert!(
                matches!(&found, Ok(ExportResult::Rejected { kind, .. }) if *kind == wanted),
                "{status}: {found:?}"
            );
        }
        let busy = result("503", long).await;
        let after = Some(std::time::Duration::from_secs(7));
        assert!(matches!(&busy, Ok(ExportResult::Retry { after: found, .. }) if *found == after), "{busy:?}");
        assert_eq!(result("200", long).await, Ok(too_long()));
    }
}
