"""The HTTP side of the server: connections, the protocol, and what every route shares (keys, limits, documents)."""
