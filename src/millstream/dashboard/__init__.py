"""The dashboard: static files that talk to the HTTP API and to nothing else.  No build step, nothing from elsewhere."""
