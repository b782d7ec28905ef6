"""Attacks the socket for reports from inside. Arguments: the socket, and the attack."""
import array
import json
import os
import random
import socket
import sys
import time

PATH, ATTACK = sys.argv[1:]
HELLO = {"v": 1, "t": "hello", "pid": 1, "container": "another", "local_rank": 0, "devices": []}
STEP = {"t": "step", "n": 1 << 40, "samples": 1 << 40}


def connect():
    """Returns a new connection. Retries: the queue of connections may be full for a moment."""
    while True:
        new = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            new.connect(PATH)
            return new
        except OSError:
            new.close()
            time.sleep(0.001)


def send(connection, message):
    """Sends without waiting, and returns whether the kernel accepted it."""
    packet = message if isinstance(message, bytes) else json.dumps(message).encode()
    try:
        connection.send(packet, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        return True
    except OSError:
        return False


def tracked(component, operation):
    return {"t": "operation", "component": component, "operation": operation, "rss": 7}


def garbage():
    """Sends packets that are no messages, and names that would be invalid labels."""
    random.seed(7)
    packets = [b"", b"\0" * 16384, b"x" * 16385, b"[" * 16000, b'{"t":' * 3000, b"\xff\xfe", b"null", b'{"t":"sample"}']
    packets += [{"t": "hello", "v": 2}, {**HELLO, "local_rank": 64}, {**HELLO, "local_rank": -1}]
    packets += [tracked('a",container_name="another', "x"), tracked("a\n# HELP", "x"), tracked("\u202e", "x"), tracked("a" * 65, "x")]
    packets += [{"t": "sample", "dev": [{"i": 0, "alloc": value}]} for value in (-1, 1.5, 1 << 63, 1 << 64, "1", None)]
    packets += [tracked("a", f"operation{number}") for number in range(70)]
    while True:
        connection = connect()
        send(connection, b"before the hello")
        send(connection, HELLO)
        for number in range(16):
            send(connection, {**HELLO, "devices": [{"i": each, "uuid": random.randbytes(30).hex()} for each in range(64)]})
            send(connection, {"t": "sample", "dev": [{"i": random.randrange(1 << 32), "alloc": 1, "ooms": 1}]})
        for packet in packets:
            send(connection, packet)
            send(connection, random.randbytes(random.randrange(300)))
            yield
        yield


def flood():
    """Sends valid messages over one connection as fast as it accepts them."""
    connection = connect()
    send(connection, HELLO)
    while True:
        for _ in range(1000):
            send(connection, {"t": "sample", "dev": [{"i": number, "alloc": 1} for number in range(60)]})
        yield


def connections():
    """A hundred processes keep a connection each, and one opens ten thousand, at most 50 at a time."""
    for _ in range(100):
        if os.fork() == 0:
            connection = connect()
            send(connection, HELLO)
            while True:
                time.sleep(1000)
    open_connections = []
    for number in range(10_000):
        open_connections.append(connect())
        if len(open_connections) > 50:
            open_connections.pop(0).close()
        if number % 100 == 0:
            yield
    print("connected", flush=True)
    while True:
        yield


def ooms():
    """Twenty processes report forged errors as fast as they can."""
    text = "CUDA out of memory. Tried to allocate " + "9" * 400 + ".00 GiB. GPU 99 has a total capacity of 1e999 GiB\x1b[2J"
    error = {"t": "oom", "i": 0, "uuid": "GPU-a", "tried": 1 << 60, "total": 1, "operation": ["a", "b"], "skipped": 1 << 40, "ago_ms": 1 << 40}
    for _ in range(20):
        if os.fork() == 0:
            connection, number = connect(), 0
            send(connection, HELLO)
            while True:
                number += 1
                send(connection, {**error, "n": number, "uncaught": number % 2 == 0})
                send(connection, {"t": "oom", "n": number, "text": text, "uncaught": True})
                time.sleep(0.0005)
    while True:
        yield


def inherited():
    """A child writes to its parent's connection, and sends descriptors with it."""
    connection = connect()
    send(connection, HELLO)
    send(connection, {"t": "step", "n": 3})
    if os.fork() == 0:
        while True:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
            try:
                connection.sendmsg([json.dumps(STEP).encode()], rights, socket.MSG_DONTWAIT)
            except OSError:
                time.sleep(0.01)
    while True:
        yield


def foreign_cgroup():
    """Reports from a cgroup whose name is the id of another container."""
    connection = connect()
    send(connection, HELLO)
    send(connection, {"t": "step", "n": 3})
    while True:
        yield


ATTACKS = {"garbage": garbage, "flood": flood, "connections": connections, "ooms": ooms, "inherited": inherited, "foreign_cgroup": foreign_cgroup}
attack = ATTACKS[ATTACK]()
next(attack)
print("ready", flush=True)
for _ in attack:
    time.sleep(0.002)
