"""Names and sizes that client and server must agree on beside the messages themselves."""

from __future__ import annotations

SESSION_HEADER = "dqkv-session"
"""Metadata of a call that says whose it is: the session in hexadecimal."""

HANDLE_NBYTES = 16
"""A region's handle."""

GREETING = b"\x01"
"""What a client sends to the region socket, with one descriptor."""
SECRET_NBYTES = 16
"""A ticket, or a session, as the region socket answers: one after the other."""
