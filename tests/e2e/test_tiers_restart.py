"""What a server has left in files is found by the next one, and by none that may not."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.engine.engine import Engine, GenerateOutput
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
PROMPTS = [[(7 * number + step * step) % 250 + 3 for step in range(400)] for number in range(6)]


@pytest.fixture(scope="module")
def model(checkpoints: Path) -> Path:
    return tiny_checkpoint(checkpoints, "llama", num_hidden_layers=2)


def answers(
    model: Path, folder: Path, salts: Sequence[str] = ("",), *, page_size: int = 16, dtype: str = "float32"
) -> tuple[list[GenerateOutput], dict[str, Any]]:
    """What an engine that begins with these files answers, once under each salt; and its figures when all is written.

    The wait for storages has no limit of time, so that a busy machine changes nothing.
    """
    config = {
        "model": {"path": str(model), "dtype": dtype, "device": "cpu", "context_length": 512},
        "log_level": "error",
        "prefix_cache": {"use": "hiradix"},
        "memory": {
            "page_size": page_size,
            "max_total_tokens": 1024,
            "host": {"max_total_tokens": 8192},
            "storage": [{"use": "files", "dir": str(folder)}],
        },
        "gates": [{"use": "prefetch", "policy": "wait_complete"}],
    }
    outputs = []
    with Engine.from_config(config) as engine:
        for salt in salts:
            requests = [GenerateRequest(prompt=prompt, sampling=GREEDY, cache_salt=salt) for prompt in PROMPTS]
            outputs += engine.run(requests)
        scheduler = engine.built.scheduler
        while scheduler.busy:
            scheduler.step()
        stats = engine.stats()
        assert scheduler.components.memory.idle_error() is None
        scheduler.components.memory.cache.check()
    assert stats["plugin_failures"] == stats["book_errors"] == 0
    return outputs, stats


@pytest.mark.parametrize("page_size", [16, 1])
def test_a_restarted_server_finds_what_the_one_before_has_kept(model: Path, tmp_path: Path, page_size: int) -> None:
    before, first = answers(model, tmp_path / "kv")
    after, second = answers(model, tmp_path / "kv", page_size=page_size)
    assert [one.token_ids for one in before] == [one.token_ids for one in after]
    assert first["cached_storage_tokens"] == 0
    # Whole blocks of 64 tokens, whatever the page size.
    assert [one.cached_storage for one in after] == [384] * len(PROMPTS)
    assert second["cached_storage_tokens"] == 384 * len(PROMPTS)


def test_salts_share_nothing_in_any_tier_nor_after_a_restart(model: Path, tmp_path: Path) -> None:
    outputs, stats = answers(model, tmp_path / "kv", ("", "alice", "bob"))
    assert stats["cached_tokens"] == 0, "a prefix is shared by two salts"
    again, stats = answers(model, tmp_path / "kv", ("bob", "carol"))
    count = len(PROMPTS)
    assert [one.cached_storage for one in again] == [384] * count + [0] * count
    assert [one.cached_tokens for one in again[count:]] == [0] * count
    assert len({tuple(one.token_ids) for one in outputs + again}) <= count


def test_models_share_nothing_in_one_folder(model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    weights = next(other.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 0x40  # in the last tensor, which has fewer bytes than are looked at
    weights.write_bytes(data)
    folder = tmp_path / "kv"
    answers(model, folder)
    for stranger, dtype in ((other, "float32"), (model, "bfloat16")):
        _, stats = answers(stranger, folder, dtype=dtype)
        assert stats["cached_tokens"] == 0
    _, stats = answers(model, folder)
    assert stats["cached_storage_tokens"] == 384 * len(PROMPTS), "the others have removed what was not theirs"
