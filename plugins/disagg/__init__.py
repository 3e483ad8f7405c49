"""Prefill and decode in servers of their own."""

from pegboard.core.interfaces.plugin import BodyField, Plugin, Provider, Requirement

plugin = Plugin(
    name="disagg",
    version="0.1.0",
    other_servers="pegboard.plugins.disagg:other_servers.yaml",
    summary="prompts are computed on one server, and answers written on another",
    requires=("kv_handoff",),
    providers=(
        Provider(
            contract="admission_gate",
            name="disagg",
            factory="pegboard.plugins.disagg.gate:DisaggGate",
            config="pegboard.plugins.disagg.options:DisaggOptions",
            summary="computes a prompt for a decode server, or brings its KV from a prefill server",
            provides=frozenset({"holds", "brings_kv"}),
            body=(
                BodyField("bootstrap_host", str, meaning="where the prefill server of this request is"),
                BodyField("bootstrap_port", int, meaning="the port on which its gate listens"),
                BodyField("bootstrap_room", int, meaning="the number that both servers know this request by"),
            ),
            requires=(Requirement("kv_transfer", None, "KV travels between two servers"),),
        ),
    ),
)
