"""The hook of sessions: the store that the config names, for the APIs of the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pegboard.core.interfaces.hooks import hookimpl
from pegboard.plugins.sessions_in_memory import SESSION_STORE
from pegboard.plugins.sessions_in_memory.api import SessionStoreContext

if TYPE_CHECKING:
    from pegboard.core.interfaces.choosing import Chooser


class SessionHooks:
    """Builds the session store of the server, which APIs find with `sessions_of`."""

    @hookimpl
    def api_services(self, chooser: Chooser) -> Mapping[str, object]:
        return {SESSION_STORE.name: chooser.choose(SESSION_STORE, SessionStoreContext())}
