"""The protocol over REST: an ASGI application, and the server that runs it within limits."""
