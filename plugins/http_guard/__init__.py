"""Bounds on what clients may cost the HTTP server: connections, time, heads, bodies; and rules for web pages."""

from pegboard.core.interfaces.plugin import Plugin

plugin = Plugin(
    name="http_guard",
    version="0.1.0",
    summary="bounds connections, heads and bodies in number, size and time; keeps foreign web pages out",
    fields={"server": "pegboard.plugins.http_guard.options:GuardFields"},
    hooks=("pegboard.plugins.http_guard.guard:HttpGuardHooks",),
)
