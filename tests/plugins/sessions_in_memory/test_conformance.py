"""The built-in store keeps the contract."""

from __future__ import annotations

from pegboard.plugins.sessions_in_memory.suite import SessionStoreContract


class TestInMemory(SessionStoreContract):
    provider = "in_memory"


class TestSmall(SessionStoreContract):
    provider = "in_memory"
    options = {"max_sessions": 3, "max_session_tokens": 100}
