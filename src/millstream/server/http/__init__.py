"""The HTTP door: JSON over HTTP, NDJSON streams, WebSocket, the dashboard and /metrics, all on one port.

Every endpoint is declared once (endpoints.py) and the router, the OpenAPI document, the reference and the table of who
may call what are read off these declarations.  What an endpoint does is a call of the broker; nothing is decided here.
"""
