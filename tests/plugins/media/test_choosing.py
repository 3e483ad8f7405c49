"""Who deals with a model's media, and what operators are told where there is no one."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch

from pegboard.conformance.stage import stage_context
from pegboard.core.config.compose import compose
from pegboard.core.config.select import Selection
from pegboard.core.interfaces.model_family import ModelContext
from pegboard.core.registry.registry import Registry
from pegboard.plugins.media.choosing import choose_media
from pegboard.plugins.media.options import MediaSection
from tests.plugins.mm_qwen_vl.models import config

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vision_config": {}}


@pytest.mark.parametrize("without", ["", "PIL", "av"])
@pytest.mark.parametrize("sees", [True, False])
def test_a_missing_library_is_warned_of_where_the_model_would_use_it(
    sees: bool, without: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_config = config("qwen3") if sees else LLAMA
    resolved = compose(data={"model": {"path": str(tmp_path)}}, env={}, registry=Registry.discover())
    selection = Selection(resolved)
    if without:
        monkeypatch.setitem(sys.modules, without, None)
    caplog.set_level(logging.WARNING)
    model = ModelContext(tmp_path, hf_config, torch.float32, torch.device("cpu"))
    ctx = stage_context(
        model=model,
        find=lambda contract, about: (found := selection.find(contract, about)) and found.build(about),
        missing=selection.missing,
    )
    assert (choose_media(ctx, MediaSection()) is not None) == (sees and without != "PIL")
    if sees and without == "PIL":
        [line] = caplog.messages
        assert "served for text alone" in line
        assert "media_processor qwen_vl: PIL is not installed; to install it: pip install 'pegboard[images]'" in line
    else:
        assert not caplog.messages
