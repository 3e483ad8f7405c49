"""A socket listens before anything is loaded, or says what to do."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pegboard.core.interfaces.errors import PegboardError
from pegboard.toolkit.http.listening import exposure, listen


@dataclass(frozen=True)
class At:
    host: str = "127.0.0.1"
    port: int = 0


def test_a_taken_port() -> None:
    with listen(At()) as first:
        port = first.getsockname()[1]
        remedy = rf"cannot listen on 127\.0\.0\.1:{port}: .*; stop what uses it, or choose another port"
        with pytest.raises(PegboardError, match=remedy):
            listen(At(port=port))


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_another_machines_address(host: str) -> None:
    with pytest.raises(PegboardError, match=f"server.host: '{host}' is not an address of this machine"):
        listen(At(host))


def test_only_what_is_open_to_all_is_pointed_out() -> None:
    with listen(At()) as private, listen(At("0.0.0.0")) as public:
        assert exposure(At(), private, keyed=False) is None
        assert exposure(At("0.0.0.0"), public, keyed=True) is None
        assert "no key is set" in str(exposure(At("0.0.0.0"), public, keyed=False))
