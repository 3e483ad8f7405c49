"""The native HTTP surface."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="api_native",
    version="0.1.0",
    requires=("sessions_in_memory",),
    summary="native routes",
    providers=(
        Provider(
            contract="api",
            name="native",
            factory="pegboard.plugins.api_native.router:NativeRouter",
            config="pegboard.plugins.api_native.options:NativeOptions",
            summary="/generate, sessions, /encode, /health, /model_info, /server_info, and what operators ask for",
        ),
    ),
)
