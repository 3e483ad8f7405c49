"""What is below a prefix cache with tiers, and configs that make no sense of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.errors import ConfigError, OutOfMemory
from pegboard.core.interfaces.sampling import SamplingParams

PROMPT = list(range(10, 74))
SHORT = SamplingParams(temperature=0.0, max_new_tokens=2, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=2)


def config(model: Path, cache: str = "hiradix", **memory: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(model), "dtype": "float32", "device": "cpu"},
        "log_level": "error",
        "prefix_cache": {"use": cache},
        "memory": {"page_size": 16, "max_total_tokens": 512, **memory},
    }


def test_a_storage_needs_a_cache_that_makes_use_of_it(model: Path, tmp_path: Path) -> None:
    storage = [{"use": "files", "dir": str(tmp_path)}]
    with pytest.raises(ConfigError, match=r"memory.storage: the prefix cache 'radix' .*host_tier.* or remove"):
        Engine.from_config(config(model, "radix", storage=storage))


def test_a_storage_that_no_gate_asks_is_told_of(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = [{"use": "files", "dir": str(tmp_path)}]
    told = "memory.storage is written, but never read: add a gate that asks the storages (gates: [prefetch])"
    for gates, warnings in (([], [told]), (["prefetch"], [])):
        caplog.clear()
        with Engine.from_config({**config(model, storage=storage), "gates": gates}):
            assert [one.message for one in caplog.records if one.message.startswith("memory.storage")] == warnings


def test_a_host_that_the_cache_does_not_use_is_told_of(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Engine.from_config(config(model, "radix", host={"max_total_tokens": 1024})):
        (told,) = [one.message for one in caplog.records if "memory.host" in one.message]
    assert told.startswith("memory.host.max_total_tokens: no effect, for the prefix cache 'radix' keeps nothing on the")
    caplog.clear()
    for options in (config(model, "radix"), config(model, host={"max_total_tokens": 1024})):
        with Engine.from_config(options):
            assert not [one for one in caplog.records if "no effect" in one.message]


def test_blocks_are_whole_pages(model: Path, tmp_path: Path) -> None:
    storage = [{"use": "files", "dir": str(tmp_path)}]
    with pytest.raises(ConfigError, match=r"memory.storage_block: .* 40 tokens .* pages of 16 .*make it 48"):
        Engine.from_config(config(model, storage=storage, storage_block=40))


def test_a_host_pool_that_does_not_fit_is_refused(model: Path) -> None:
    with pytest.raises(OutOfMemory, match=r"host pool of .* GiB are available; lower memory.host.max_total_tokens to"):
        Engine.from_config(config(model, host={"max_total_tokens": 10**12}))


def test_an_unset_host_pool_holds_twice_what_the_device_does(model: Path) -> None:
    with Engine.from_config(config(model)) as engine:
        assert engine.stats()["tiers"]["host_free_tokens"] == 1024


def test_one_tier_tells_nothing_of_tiers(model: Path) -> None:
    with Engine.from_config(config(model, "radix")) as engine:
        assert "tiers" not in engine.stats()


def test_an_answer_says_where_its_cached_tokens_lay(model: Path) -> None:
    with Engine.from_config(config(model)) as engine:
        first = engine.generate([PROMPT], SHORT)[0]
        scheduler = engine.built.scheduler
        while scheduler.busy:
            scheduler.step()
        scheduler.components.memory.cache.evict(10_000)
        again, third = (engine.generate([PROMPT], SHORT)[0] for _ in range(2))
        stats = engine.stats()
    assert first.token_ids == again.token_ids == third.token_ids
    assert [(one.cached_tokens, one.cached_host) for one in (first, again, third)] == [(0, 0), (48, 48), (48, 0)]
    assert (stats["cached_tokens"], stats["cached_host_tokens"], stats["cached_storage_tokens"]) == (96, 48, 0)
    assert stats["tiers"]["loaded_bytes_total"] > 0
