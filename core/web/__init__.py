"""Between the HTTP protocol and the routers: keys, limits, cross-origin rules, TLS, the request log, documents."""
