"""The gate that lets a session's turns run one after the other."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="gate_session",
    version="0.1.0",
    summary="a session's turns in the order in which they came",
    providers=(
        Provider(
            contract="admission_gate",
            name="session",
            factory="pegboard.plugins.gate_session.gate:SessionGate",
            config="pegboard.plugins.gate_session.options:SessionGateOptions",
            summary="a turn waits until the earlier turns of its session have ended",
        ),
    ),
)
