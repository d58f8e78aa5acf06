"""Webhooks without I/O: where they may go, what is sent, how it is signed, and what an answer means."""
