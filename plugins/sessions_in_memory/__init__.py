"""Sessions, kept as token ids in the memory of the API process; and the contract of such stores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.interfaces.contract import Cardinality, Contract
from pegboard.core.interfaces.plugin import Plugin, Provider

if TYPE_CHECKING:
    from pegboard.plugins.sessions_in_memory.api import SessionStore, SessionStoreContext

SESSION_STORE: Contract[SessionStore, SessionStoreContext] = Contract(
    "session_store",
    "server.sessions",
    Cardinality.ONE,
    "pegboard.plugins.sessions_in_memory.api:SessionStore",
    "remembers conversations, so that a request brings only what is new",
    suite="pegboard.plugins.sessions_in_memory.suite:SessionStoreContract",
    api_side=True,
    section="pegboard.plugins.sessions_in_memory.options:SessionsSection",
    default="in_memory",
)

plugin = Plugin(
    name="sessions_in_memory",
    version="0.1.0",
    summary="conversations that the server remembers",
    contracts=(SESSION_STORE,),
    providers=(
        Provider(
            contract="session_store",
            name="in_memory",
            factory="pegboard.plugins.sessions_in_memory.store:InMemorySessions",
            config="pegboard.plugins.sessions_in_memory.options:SessionStoreOptions",
            summary="trees of turns as token ids in the API process; they outlive the scheduler process",
        ),
    ),
    hooks=("pegboard.plugins.sessions_in_memory.hooks:SessionHooks",),
)
