"""The synchronous client: sockets in the caller's thread, because a hop to another one costs more than a request."""
