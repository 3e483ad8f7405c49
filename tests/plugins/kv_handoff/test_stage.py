"""What moves KV: the regions that it sees, and when it is built. And the stage, as any other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from pegboard.conformance.stage import stage_context
from pegboard.core.config.compose import compose
from pegboard.core.config.select import Selection
from pegboard.core.interfaces.contract import Contract
from pegboard.core.interfaces.errors import ConfigError
from pegboard.core.interfaces.kv_pool import KVPoolContext
from pegboard.core.interfaces.layers import LayerSpec
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.kv_handoff.api.transfer import KVTransferContext
from pegboard.plugins.kv_handoff.hooks import HandoffHooks
from pegboard.plugins.kv_handoff.regions import regions_of
from pegboard.plugins.kv_handoff.stage import KVHandoff
from pegboard.plugins.kv_handoff.suite.rig import ranges
from pegboard.plugins.memory_paged.pool import MHAPool
from pegboard.plugins.transfer_inproc.transfer import InprocTransfer

LAYERS = (
    LayerSpec(layer_id=3, num_heads=4, num_kv_heads=2, qk_head_dim=8, v_head_dim=16, scale=1.0),
    LayerSpec(layer_id=1, num_heads=4, num_kv_heads=1, qk_head_dim=32, v_head_dim=8, scale=1.0),
)


def pool(dtype: torch.dtype = torch.bfloat16) -> MHAPool:
    return MHAPool(NoOptions(), KVPoolContext(9, 4, LAYERS, dtype, torch.device("cpu")))


def stage(use: str = "inproc") -> KVHandoff:
    """A stage whose context builds what a config chooses, once."""
    selection = Selection(compose(data={"model": {"path": "x"}, "kv_transfer": {"use": use}}, env={}))
    made: list[Any] = []

    def provider(contract: Contract[Any, Any], ctx: Any) -> Any:
        if not made:
            made.append(selection.choose(contract, ctx).build(ctx))
        return made[0]

    [made_stage] = HandoffHooks().pipeline_stages(
        stage_context(config=SimpleNamespace(gates=("x",)), provider=provider)
    )
    assert isinstance(made_stage, KVHandoff)
    return made_stage


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_regions_are_keys_and_values_layer_by_layer(dtype: torch.dtype) -> None:
    made = pool(dtype)
    regions = regions_of(made)
    buffers = [made.keys(3), made.values(3), made.keys(1), made.values(1)]
    assert [one.nbytes for one in regions] == [one.nbytes for one in buffers]
    assert [one.address for one in regions] == [one.data_ptr() for one in buffers]
    assert [one.slot_bytes for one in regions] == [count * dtype.itemsize for count in (16, 32, 32, 8)]
    assert [(one.heads, one.device) for one in regions] == [(2, "cpu"), (2, "cpu"), (1, "cpu"), (1, "cpu")]
    for one, buffer in zip(regions, buffers, strict=True):
        assert one.buffer is not None
        slot = slice(7 * one.slot_bytes, 8 * one.slot_bytes)
        buffer[7] = 1.5
        assert bytes(one.buffer[slot]) == buffer[7].view(torch.uint8).numpy().tobytes()
        one.buffer[slot] = bytes(one.slot_bytes)
        assert not buffer[7].any()


def test_regions_of_a_device_have_no_buffer() -> None:
    class OnMeta:
        layer_ids = (0,)

        def buffers(self, layer_id: int) -> tuple[torch.Tensor, ...]:
            return (torch.empty(8, 2, 4, device="meta"),) * 2

    regions = regions_of(cast("Any", OnMeta()))
    assert [(one.device, one.buffer, one.slot_bytes) for one in regions] == [("meta", None, 32)] * 2


def test_it_is_built_once_and_when_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[KVTransferContext] = []
    init = InprocTransfer.__init__

    def note(self: InprocTransfer, options: Any, ctx: KVTransferContext) -> None:
        built.append(ctx)
        init(self, options, ctx)

    monkeypatch.setattr(InprocTransfer, "__init__", note)
    handoff = stage()
    assert not built
    engine = handoff.transfer(pool())
    assert handoff.transfer(pool()) is engine
    assert len(built) == 1
    assert [one.nbytes for one in built[0].regions] == [one.nbytes for one in regions_of(pool())]
    engine.close()


def test_one_that_does_not_work_here_says_so_when_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InprocTransfer, "supports", classmethod(lambda cls, options, ctx: "no luck"))
    with pytest.raises(ConfigError, match=r"kv_transfer\.use: inproc .* cannot be used: no luck"):
        stage().transfer(pool())


def test_two_engines_read_each_others_pools() -> None:
    one, other = pool(), pool()
    source, reader = stage().transfer(one), stage().transfer(other)
    for layer in (1, 3):
        one.keys(layer)[:] = layer
        one.values(layer)[:] = 10 + layer
        other.keys(layer)[:] = 0
        other.values(layer)[:] = 0
    reader.connect("peer", "", source.describe())
    source.allow(5)
    slot = ranges([(0, 32, 32), (3, 16, 16)])
    reader.read("peer", 5, slot, slot)
    assert [news.state.value for news in reader.poll()] == ["done"]
    assert other.keys(3)[:, 0, 0].tolist() == [0, 3] + [0] * 38
    assert other.values(1)[:, 0, 0].tolist() == [0, 11] + [0] * 38
    for engine in (source, reader):
        engine.close()
