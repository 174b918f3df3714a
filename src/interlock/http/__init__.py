"""The HTTP transport: connections, exchanges, the request cache and ASGI. It knows no route of Interlock."""
