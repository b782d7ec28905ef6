"""An OTLP receiver for the tests, on Python's grpcio and the protocol's own Python messages.

It shares no code with memledger. It accepts gRPC and HTTP, optionally with TLS, records what it received, and misbehaves on
demand. It reads commands from standard input and writes responses to standard output, both as lines of JSON:

  {"do": "behave", "as": NAME, ...}   ok | count, which records only the number of points per timestamp |
                                       grpc CODE [retry] | http STATUS [retry_after] | hang | partial N | warn | refuse_when TEXT
  {"do": "take"}, {"do": "peek"}      what was received since the last take: requests, points, records, spans, and when it rejected
  {"do": "stop"}, {"do": "start"}     closes the ports, reopens the same ones, which are reserved meanwhile

usage: receiver.py [CERTIFICATE KEY [CLIENT_CA]]
"""

import gzip
import json
import socket
import ssl
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
from google.protobuf import any_pb2, duration_pb2
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2 as logs
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2_grpc as logs_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as traces
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as traces_grpc

CODES = {code.name: code for code in grpc.StatusCode}


def plain(value):
    """Converts an AnyValue to JSON."""
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain(one) for one in value.array_value.values]
    if kind == "kvlist_value":
        return pairs(value.kvlist_value.values)
    return getattr(value, kind) if kind else None


def pairs(attributes):
    found = {}
    for pair in attributes:
        assert pair.key not in found, f"{pair.key} is duplicated"
        found[pair.key] = plain(pair.value)
    return found


def points_of(request):
    for resource in request.resource_metrics:
        who = pairs(resource.resource.attributes)
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                kind = metric.WhichOneof("data")
                data = getattr(metric, kind)
                for point in data.data_points:
                    yield {
                        "resource": who,
                        "scope": [scope.scope.name, scope.scope.version],
                        "name": metric.name,
                        "unit": metric.unit,
                        "description": metric.description,
                        "kind": kind,
                        "monotonic": kind == "sum" and data.is_monotonic,
                        "temporality": data.aggregation_temporality if kind == "sum" else 0,
                        "attributes": pairs(point.attributes),
                        "value": point.as_double,
                        "start": point.start_time_unix_nano,
                        "time": point.time_unix_nano,
                    }


def records_of(request):
    for resource in request.resource_logs:
        who = pairs(resource.resource.attributes)
        for scope in resource.scope_logs:
            for record in scope.log_records:
                yield {
                    "resource": who,
                    "event": record.event_name,
                    "time": record.time_unix_nano,
                    "observed": record.observed_time_unix_nano,
                    "severity": record.severity_text,
                    "body": plain(record.body),
                    "attributes": pairs(record.attributes),
                }


def spans_of(request):
    for resource in request.resource_spans:
        who = pairs(resource.resource.attributes)
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield {
                    "resource": who,
                    "scope": [scope.scope.name, scope.scope.version],
                    "name": span.name,
                    "kind": span.kind,
                    "trace": span.trace_id.hex(),
                    "id": span.span_id.hex(),
                    "parent": span.parent_span_id.hex(),
                    "start": span.start_time_unix_nano,
                    "end": span.end_time_unix_nano,
                    "attributes": pairs(span.attributes),
                    "events": len(span.events),
                }


# the list of what was received of each signal, and how its items are read
ITEMS = {"metrics": ("points", points_of), "logs": ("records", records_of), "traces": ("spans", spans_of)}


class Reject(Exception):
    def __init__(self, code, message, retry=None):
        self.code, self.message, self.retry = code, message, retry


class Page(Exception):
    """A response with status 200 of something that is not an OTLP receiver, such as an ingress."""

    def __init__(self, kind, body):
        self.kind, self.body = kind, body.encode()


class State:
    """What was received, and how to behave. Shared by all ports."""

    def __init__(self):
        self.lock = threading.Lock()
        self.released = threading.Event()
        self.behaviour = {"as": "ok"}
        self.new()

    def new(self):
        self.taken = {"requests": [], "points": [], "records": [], "spans": [], "times": {}, "rejected": [], "attempts": 0}

    def behave(self, how):
        with self.lock:
            self.behaviour = how
            self.released.set()
            self.released = threading.Event()

    def take(self):
        with self.lock:
            taken = self.taken
            self.new()
            return taken

    def receive(self, signal, wire, size, headers, message):
        """Handles a request. Returns the number of rejected items, or raises Reject."""
        with self.lock:
            how, released = self.behaviour, self.released
            self.taken["attempts"] += 1
        if how["as"] == "hang":
            released.wait()
            raise Reject("UNAVAILABLE", "hung")
        if how["as"] == "page":
            raise Page(how["type"], how["body"])
        if how["as"] in ("grpc", "http"):
            code = how.get("code", how.get("status"))
            with self.lock:
                self.taken["rejected"].append(time.monotonic())
            raise Reject(code, how.get("message", "on demand"), how.get("retry"))
        if how["as"] == "count" and signal == "metrics":
            return self.count(message, wire, size, headers)
        name, items_of = ITEMS[signal]
        found = list(items_of(message))
        if how["as"] == "refuse_when" and any(how["text"] in json.dumps(one) for one in found):
            raise Reject(how.get("code", "INVALID_ARGUMENT"), "not this one")
        with self.lock:
            self.taken["requests"].append(
                {
                    "signal": signal,
                    "wire": wire,
                    "size": size,
                    "items": len(found),
                    "headers": headers,
                    "at": time.monotonic(),
                }
            )
            self.taken[name].extend(found)
        if how["as"] == "long_response" and len(found) > how.get("over", 0):
            return -1
        if how["as"] == "warn":
            return -2
        return how["rejected"] if how["as"] == "partial" else 0

    def count(self, message, wire, size, headers):
        times = Counter(
            point.time_unix_nano
            for resource in message.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            for point in getattr(metric, metric.WhichOneof("data")).data_points
        )
        with self.lock:
            items = sum(times.values())
            request = {"signal": "metrics", "wire": wire, "size": size, "items": items, "headers": headers}
            self.taken["requests"].append(request)
            for at, count in times.items():
                self.taken["times"][str(at)] = self.taken["times"].get(str(at), 0) + count
        return 0


STATE = State()


def export_response(signal, rejected):
    kinds = {
        "metrics": (metrics.ExportMetricsServiceResponse, "rejected_data_points"),
        "logs": (logs.ExportLogsServiceResponse, "rejected_log_records"),
        "traces": (traces.ExportTraceServiceResponse, "rejected_spans"),
    }
    kind, field = kinds[signal]
    response = kind()
    if rejected == -2:
        response.partial_success.error_message = "use a newer path"
    elif rejected < 0:  # accepted, with a message that is longer than any exporter reads
        response.partial_success.error_message = "x" * (128 << 10)
    elif rejected:
        setattr(response.partial_success, field, rejected)
        response.partial_success.error_message = "some are too old"
    return response


class Service:
    def __init__(self, signal):
        self.signal = signal

    def Export(self, request, context):
        headers = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
        try:
            rejected = STATE.receive(self.signal, "grpc", request.ByteSize(), headers, request)
        except Reject as rejection:
            if rejection.retry is not None:
                context.set_trailing_metadata((("grpc-status-details-bin", details(rejection)),))
            context.abort(CODES[rejection.code], rejection.message)
        return export_response(self.signal, rejected)


def details(rejection):
    """google.rpc.Status with RetryInfo, written by hand: field 1 code, 2 message, 3 details; RetryInfo's field 1."""
    seconds = duration_pb2.Duration(seconds=rejection.retry).SerializeToString()
    info = any_pb2.Any(
        type_url="type.googleapis.com/google.rpc.RetryInfo", value=bytes([0x0A, len(seconds)]) + seconds
    ).SerializeToString()
    return bytes([0x08, CODES[rejection.code].value[0], 0x1A, len(info)]) + info


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    KINDS = {
        "/v1/metrics": ("metrics", metrics.ExportMetricsServiceRequest),
        "/v1/logs": ("logs", logs.ExportLogsServiceRequest),
        "/v1/traces": ("traces", traces.ExportTraceServiceRequest),
    }

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path not in self.KINDS or self.headers["Content-Type"] != "application/x-protobuf":
            return self.reply(404, b"no such path")
        if self.headers["Content-Encoding"] == "gzip":
            body = gzip.decompress(body)
        signal, kind = self.KINDS[self.path]
        headers = {key.lower(): value for key, value in self.headers.items()}
        try:
            rejected = STATE.receive(signal, "http", len(body), headers, kind.FromString(body))
        except Page as page:
            return self.reply(200, page.body, kind=page.kind)
        except Reject as rejection:
            status = rejection.code if isinstance(rejection.code, int) else 400
            more = [] if rejection.retry is None else [("Retry-After", str(rejection.retry))]
            return self.reply(status, rejection.message.encode(), more)
        self.reply(200, export_response(signal, rejected).SerializeToString())

    def reply(self, status, body, more=(), kind="application/x-protobuf"):
        self.send_response(status)
        for name, value in more:
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Ports:
    def __init__(self, tls):
        self.tls = tls
        # Bound and never listening: keeps the ports while the servers are stopped, and lets only them listen.
        self.reserved = [socket.socket(), socket.socket()]
        for each in self.reserved:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind(("127.0.0.1", 0))
        self.grpc_port, self.http_port = (each.getsockname()[1] for each in self.reserved)

    def start(self):
        # with the default limit of 4 MiB, above which gRPC itself rejects requests
        self.grpc = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
        metrics_grpc.add_MetricsServiceServicer_to_server(Service("metrics"), self.grpc)
        logs_grpc.add_LogsServiceServicer_to_server(Service("logs"), self.grpc)
        traces_grpc.add_TraceServiceServicer_to_server(Service("traces"), self.grpc)
        address = f"localhost:{self.grpc_port}"
        if self.tls:
            read = lambda path: open(path, "rb").read()
            authorities = read(self.tls[2]) if len(self.tls) > 2 else None
            credentials = grpc.ssl_server_credentials(
                [(read(self.tls[1]), read(self.tls[0]))], authorities, authorities is not None
            )
            self.grpc_port = self.grpc.add_secure_port(address, credentials)
        else:
            self.grpc_port = self.grpc.add_insecure_port(address)
        self.grpc.start()
        ThreadingHTTPServer.daemon_threads = True
        self.http = ThreadingHTTPServer(("localhost", self.http_port), Handler)
        self.http_port = self.http.server_port
        if self.tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.tls[0], self.tls[1])
            if len(self.tls) > 2:
                context.load_verify_locations(self.tls[2])
                context.verify_mode = ssl.CERT_REQUIRED
            self.http.socket = context.wrap_socket(self.http.socket, server_side=True)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def stop(self):
        self.grpc.stop(None).wait()
        self.http.shutdown()
        self.http.server_close()


def write(value):
    print(json.dumps(value), flush=True)


def main():
    ports = Ports(sys.argv[1:])
    ports.start()
    write({"grpc": ports.grpc_port, "http": ports.http_port})
    for line in sys.stdin:
        command = json.loads(line)
        match command["do"]:
            case "behave":
                STATE.behave(command)
                write({})
            case "peek":
                write(STATE.taken)
            case "take":
                write(STATE.take())
            case "stop":
                ports.stop()
                write({})
            case "start":
                ports.start()
                write({})


main()
