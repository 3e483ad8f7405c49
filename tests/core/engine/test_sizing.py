"""How much KV memory there is, with a pool of plain numbers."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from pegboard.core.config.compose import compose
from pegboard.core.engine import sizing
from pegboard.core.interfaces.errors import ConfigError, OutOfMemory
from pegboard.core.interfaces.layers import KVGroupSpec, KVKind
from pegboard.toolkit.cache.group_sizes import GroupSizes

PER_TOKEN = 1000
FREE = 100_000 * PER_TOKEN


class Choice:
    """A provider of pools that takes 1,000 bytes per token in float32 and builds what it was asked for."""

    class cls:  # noqa: N801
        @staticmethod
        def bytes_per_token(layers: object, dtype: torch.dtype) -> int:
            return PER_TOKEN * dtype.itemsize // 4

    def build(self, ctx: Any) -> Any:
        return ctx


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "free_bytes", lambda device: FREE)


def size(context: int = 512, kv_dtype: torch.dtype | None = None, **memory: Any) -> sizing.KVMemory:
    config = compose((), data={"model": {"path": "x"}, "memory": memory}).engine
    model = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)
    spec = SimpleNamespace(layers=(), max_context_len=context, kv_groups=(KVGroupSpec(KVKind.FULL, ()),))
    about: tuple[Any, Any, Any, Any] = (Choice(), config, model, spec)
    return sizing.make_memory(*about, sizing.count_pages(*about, kv_dtype=kv_dtype), kv_dtype=kv_dtype)


def test_the_config_decides() -> None:
    found = size(max_total_tokens=1000, page_size=16)
    assert (found.num_pages, found.max_context_len) == (62, 512)
    assert cast(Any, found.pool).num_pages == 62


def test_a_share_of_what_is_free_otherwise() -> None:
    assert size(page_size=16).num_pages == FREE * sizing.CPU_POOL_SHARE // PER_TOKEN // 16


def test_what_a_token_takes_depends_on_the_type_of_kv() -> None:
    """Where memory decides, 8 bits hold four times the tokens of float32 and twice those of bfloat16."""
    kinds = (None, torch.bfloat16, torch.float8_e4m3fn)
    full, half, quarter = (size(page_size=16, kv_dtype=kv).num_pages for kv in kinds)
    assert (half // 2, quarter // 4) == (full, full)
    pool = cast(Any, size(max_total_tokens=64, kv_dtype=torch.float8_e5m2).pool)
    assert (pool.dtype, pool.compute_dtype) == (torch.float8_e5m2, torch.float32)


def test_a_context_that_does_not_fit_is_cut_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert size(context=4096, max_total_tokens=1000, page_size=16).max_context_len == 992
    assert "limited to that, not to the model's 4096" in caplog.text


def test_less_than_a_page_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"memory.max_total_tokens: 10 tokens hold no page of 16"):
        size(max_total_tokens=10, page_size=16)


def test_more_than_is_free_is_refused_with_the_most_that_fits() -> None:
    with pytest.raises(OutOfMemory, match=r"lower memory.max_total_tokens to at most 100000"):
        size(max_total_tokens=100_001, page_size=1)
    assert size(max_total_tokens=100_000, page_size=1).num_pages == 100_000


@pytest.mark.parametrize(("count", "fits"), [(9, True), (10_000_000, False)])
def test_a_row_table_that_does_not_fit_is_refused(count: int, fits: bool) -> None:
    config = compose((), data={"model": {"path": "x"}, "scheduler": {"max_running_requests": count}}).engine
    if fits:
        assert sizing.make_rows(config, torch.device("cpu"), 100).host.shape == (count + 1, 100)
    else:
        with pytest.raises(OutOfMemory, match=r"scheduler.max_running_requests"):
            sizing.make_rows(config, torch.device("cpu"), 100)


@pytest.mark.parametrize(
    ("device", "gib", "scheduler", "chunk"),
    [
        ("cpu", 0, {}, 512),
        ("cuda", 80, {}, 2048),
        ("cuda", 80, {"mixed_chunk": True}, 2048),
        ("cuda", 80, {"mixed_chunk": False}, 8192),
        ("cuda", 24, {"mixed_chunk": False}, 2048),
        ("cuda", 180, {"mixed_chunk": False}, 4096),
        ("cuda", 80, {"chunked_prefill_size": 100}, 100),
        ("cuda", 80, {"chunked_prefill_size": 0}, None),
    ],
)
def test_chunks_go_by_the_device(
    monkeypatch: pytest.MonkeyPatch, device: str, gib: int, scheduler: dict[str, Any], chunk: int | None
) -> None:
    about = SimpleNamespace(total_memory=gib * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    config = compose((), data={"model": {"path": "x"}, "scheduler": scheduler}).engine
    assert sizing.chunk_size(config, torch.device(device)) == chunk


@pytest.mark.parametrize(("mixed", "chunk"), [(None, 8192), (False, 8192), (True, 2048)])
def test_chunks_of_prefills_that_are_split(monkeypatch: pytest.MonkeyPatch, mixed: bool | None, chunk: int) -> None:
    """No decodes share their batches, unless the config says so."""
    about = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    config = compose((), data={"model": {"path": "x"}, "scheduler": {"mixed_chunk": mixed}}).engine
    assert sizing.chunk_size(config, torch.device("cuda"), splits=True) == chunk


@pytest.mark.parametrize(("chunk", "most"), [(None, None), (512, 512), (64, 116)])
def test_the_tokens_of_a_step(chunk: int | None, most: int | None) -> None:
    """Of 100 decodes and a page of 16 tokens at least."""
    data = {"model": {"path": "x"}, "scheduler": {"max_running_requests": 100}, "memory": {"page_size": 16}}
    assert sizing.most_new_tokens(compose((), data=data).engine, chunk) == most


# ---- groups ---------------------------------------------------------------------------------------------------------


SIZES = GroupSizes(page_bytes=(16, 80), typical=256, most=(34,), step=32)
"""One layer that keeps all tokens and five with a window of 512, pages of 16 tokens, requests of 4,096 tokens."""


def test_groups_have_room_for_as_many_typical_requests() -> None:
    (pages,) = SIZES.further(256 * 40)
    assert pages == 40 * 34 + 32


def test_one_request_and_a_step_fit_into_each_group() -> None:
    assert SIZES.further(100) == (34 + 32,)
    assert SIZES.further(20) == (20,), "no more than all tokens take"


def test_memory_is_used_up() -> None:
    pages = SIZES.fitting(10**7, 0)
    assert SIZES.nbytes(pages) <= 10**7 < SIZES.nbytes(pages + 1)


def test_where_no_layer_keeps_all_tokens_slots_of_the_first_group_take_nothing() -> None:
    sizes = GroupSizes(page_bytes=(0, 80), typical=256, most=(34,), step=32)
    assert sizes.fitting(10**7, 512) == 512
    pages = sizes.fitting(10**5, 10**6)
    assert sizes.nbytes(pages) <= 10**5 < sizes.nbytes(pages + 256)


def test_with_windows_the_same_memory_holds_more_requests() -> None:
    """Arithmetic of the ratio: 6 layers of 256 pages each, or 256 + 5 x 34."""
    one_group = GroupSizes(page_bytes=(96,), typical=256, most=(), step=32)
    bytes_ = one_group.nbytes(256 * 40)
    assert SIZES.fitting(bytes_, 0) / 256 / 40 > 3.4
