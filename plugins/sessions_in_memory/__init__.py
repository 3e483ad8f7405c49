"""Sessions, kept as token ids in the memory of the API process."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="sessions_in_memory",
    version="0.1.0",
    summary="conversations that the server remembers",
    providers=(
        Provider(
            contract="session_store",
            name="in_memory",
            factory="pegboard.plugins.sessions_in_memory.store:InMemorySessions",
            config="pegboard.plugins.sessions_in_memory.options:SessionStoreOptions",
            summary="trees of turns as token ids in the API process; they outlive the scheduler process",
        ),
    ),
)
