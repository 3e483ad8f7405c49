"""The imitation is called as the original is."""

from __future__ import annotations

import json
from functools import reduce

import pytest

from tests.plugins.attn_flashinfer import fake_flashinfer
from tests.plugins.attn_flashinfer.record_signatures import SIGNATURES, of_function

RECORDED = json.loads(SIGNATURES.read_text())


@pytest.mark.parametrize("name", RECORDED)
def test_signature(name: str) -> None:
    """Names, order, kinds and defaults are those of the pinned wheel."""
    found: object = reduce(getattr, name.split("."), fake_flashinfer)
    assert callable(found)
    assert of_function(found) == RECORDED[name]
