"""Every built-in provider passes its contract's suite; see builtins.py. Those that compute are in the next file."""

from __future__ import annotations

from pegboard.conformance.subject import installed_registry
from tests.conformance.builtins import CASES, OWN, classes

globals().update(classes(__name__, compute=False))


def test_no_row_is_stale() -> None:
    """Each plugin of the tables is installed, and each row names a provider of it."""
    known: dict[str, set[str]] = {}
    registry = installed_registry()
    for contract in registry.contracts:
        for record in registry.providers(contract):
            known.setdefault(record.plugin.name, set()).add(record.name)
    assert set(OWN) <= set(known)
    for plugin, rows in CASES.items():
        assert {key.split()[0] for key in rows} <= known[plugin]
