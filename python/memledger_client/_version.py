"""The version of the client, which is that of memledger."""

__version__ = "0.1.0"
