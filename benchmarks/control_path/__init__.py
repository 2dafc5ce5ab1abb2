"""The whole path of a request without an engine: HTTP, ingress, router, Serve calls, token channel, text, stream."""
