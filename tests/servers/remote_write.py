"""Writes samples by Prometheus' remote write 1.0, with the few bytes of protobuf and snappy that it needs.

Staleness markers can be written, which no importer of Prometheus or VictoriaMetrics takes.
"""
import struct
import urllib.request

# The NaN that Prometheus and VictoriaMetrics take for the end of a series.
STALE_BYTES = struct.pack("<Q", 0x7FF0000000000002)


def varint(number):
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes(found) + bytes([number])


def field(number, body):
    """A length-delimited field."""
    return varint(number << 3 | 2) + varint(len(body)) + body


def time_series(labels, samples):
    pairs = b"".join(field(1, field(1, name.encode()) + field(2, value.encode())) for name, value in sorted(labels.items()))
    points = b"".join(
        field(2, b"\x09" + (STALE_BYTES if value is None else struct.pack("<d", value)) + b"\x10" + varint(int(at * 1000)))
        for at, value in samples
    )
    return field(1, pairs + points)


def snappy(body):
    """The block format, with literals alone: larger than it need be, and valid."""
    parts = [varint(len(body))]
    for at in range(0, len(body), 65536):
        part = body[at : at + 65536]
        parts += [bytes([61 << 2]), struct.pack("<H", len(part) - 1), part]
    return b"".join(parts)


def encode(series):
    """Returns the body of a request for [(labels, [(Unix time, value; None for a staleness marker)])]."""
    return snappy(b"".join(time_series(labels, samples) for labels, samples in series))


def write(url, series):
    """Writes series in one request."""
    send(url, encode(series))


def send(url, body):
    headers = {"Content-Encoding": "snappy", "Content-Type": "application/x-protobuf", "X-Prometheus-Remote-Write-Version": "0.1.0"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60):
        pass
