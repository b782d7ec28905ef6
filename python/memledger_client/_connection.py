"""The connection to memledger: a Unix socket that carries one JSON object per packet.

Every call returns at once. What cannot be sent is dropped and counted in ``lost``; a connection that cannot be made is tried
again later, at growing intervals.
"""

import errno
import json
import os
import socket
import time
from typing import Any, Dict, List, Optional

#: Where containers mount memledger's directory by default.
DEFAULT_DIRECTORY = "/run/memledger-reporter"
SOCKET_NAME = "reporter.sock"
#: memledger drops longer packets.
MAX_PACKET_BYTES = 16 * 1024
#: Seconds between two attempts to connect, at first and at most.
FIRST_RETRY_SECONDS = 0.5
MAX_RETRY_SECONDS = 30.0


def directory() -> str:
    """Returns memledger's directory: from the environment, else the one that this package is in, else the default.

    Empty if the environment has an empty one, which switches reporting off.
    """
    configured = os.environ.get("MEMLEDGER_REPORTER_DIRECTORY")
    if configured is not None:
        return configured
    parent = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if os.path.exists(os.path.join(parent, SOCKET_NAME)):
        return parent
    return DEFAULT_DIRECTORY


class Connection:
    """A connection that is made when needed and made again when lost. Not thread-safe: its owner has a lock."""

    def __init__(self) -> None:
        #: Messages that could not be sent since the program started.
        self.lost = 0
        self._socket: Optional[socket.socket] = None
        self._retry_seconds = FIRST_RETRY_SECONDS
        self._next_attempt = 0.0

    def is_open(self) -> bool:
        """Returns whether there is a connection, as far as is known."""
        return self._socket is not None

    def connect(self) -> bool:
        """Connects, if it is time for an attempt. Returns True if a new connection was made."""
        now = time.monotonic()
        if self._socket is not None or now < self._next_attempt:
            return False
        # programs that lost the same memledger do not all come back at the same moment
        self._next_attempt = now + self._retry_seconds * (0.5 + os.urandom(1)[0] / 512)
        self._retry_seconds = min(2 * self._retry_seconds, MAX_RETRY_SECONDS)
        new = None
        try:
            new = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            new.setblocking(False)
            new.connect(os.path.join(directory(), SOCKET_NAME))
        except OSError:  # absent, stopped, busy, or no descriptor is left
            if new is not None:
                new.close()
            return False
        self._socket = new
        return True

    def mark_accepted(self) -> None:
        """Ends the back-off: memledger answered. Before, it may close the connection at once, as one too many."""
        self._retry_seconds = FIRST_RETRY_SECONDS

    def send(self, message: Dict[str, Any]) -> bool:
        """Sends one message. Returns False if it was dropped."""
        packet = json.dumps(message, separators=(",", ":")).encode()
        if self._socket is None or len(packet) > MAX_PACKET_BYTES:
            self.lost += 1
            return False
        try:
            self._socket.send(packet, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            return True
        except OSError as error:
            self.lost += 1
            if error.errno not in (errno.EAGAIN, errno.ENOBUFS, errno.EINTR):
                self.close()
            return False

    def receive(self) -> List[Dict[str, Any]]:
        """Returns the messages that are there. Whatever is not a JSON object is ignored."""
        messages: List[Dict[str, Any]] = []
        while self._socket is not None and len(messages) < 16:
            try:
                packet = self._socket.recv(MAX_PACKET_BYTES, socket.MSG_DONTWAIT)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EINTR):
                    self.close()
                break
            if not packet:
                self.close()
                break
            try:
                message = json.loads(packet.decode())
            except (ValueError, RecursionError):
                message = None
            messages.append(message if isinstance(message, dict) else {})
        return messages

    def close(self) -> None:
        """Closes the connection; a later ``connect`` makes a new one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
