"""EAGLE heads against the contract's suite: chains and trees, for the suite's model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from pegboard.plugins.speculation.suite import SpeculatorContract
from pegboard.plugins.speculation.suite.checks import VOCAB
from pegboard.plugins.speculation.suite.model import HIDDEN
from tests.plugins.spec_eagle.heads import Head

SIZES: Mapping[str, Any] = {"hidden": HIDDEN, "target": HIDDEN, "vocab": VOCAB}
EAGLE = Head("LlamaForCausalLMEagle", layer="layers.0", more={"fc.bias": (HIDDEN,)}, **SIZES)
EAGLE3 = Head(draft_vocab=64, **SIZES)


class WithHead:
    """The provider reads `head`, with random weights."""

    head: ClassVar[Head]
    options: ClassVar[Mapping[str, Any]]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def checkpoint(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.options = {**cls.options, "draft": str(cls.head.write(tmp_path_factory.mktemp("head")))}


class TestEagleChains(WithHead, SpeculatorContract):
    provider = "eagle"
    head = EAGLE
    options = {"steps": 3}


@pytest.mark.full
class TestEagle3Chains(WithHead, SpeculatorContract):
    provider = "eagle"
    head = EAGLE3
    options = {"steps": 3}


class TestEagle3Trees(WithHead, SpeculatorContract):
    provider = "eagle"
    head = EAGLE3
    options = {"steps": 3, "topk": 3}
