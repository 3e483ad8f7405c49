"""The conformance suite of KVPool."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pegboard.conformance.attention.batches import make_layer
from pegboard.conformance.kv_pool.groups import KVPoolGroupTests
from pegboard.conformance.kv_pool.latents import KVPoolLatentTests
from pegboard.conformance.kv_pool.releasing import KVPoolReleaseTests
from pegboard.conformance.properties import properties
from pegboard.core.interfaces.kv_pool import KVPool, KVPoolContext
from pegboard.core.interfaces.layers import LayerSpec

LAYERS = (make_layer(4, 2, 8), make_layer(4, 1, 16, 4, layer_id=3), make_layer(6, 3, 8, layer_id=1))
"""They differ in their heads and dimensions, and their ids have a gap."""

PAGES, PAGE = 5, 4

EIGHT_BIT = (torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, *EIGHT_BIT)

SCALES = {LAYERS[0].layer_id: (0.5, 4.0), LAYERS[1].layer_id: (2.0, 0.25), LAYERS[2].layer_id: (1.0, 8.0)}
"""Of keys and values: powers of two, so that dividing by them rounds nothing; all different."""

Slots = Sequence[int]


class KVPoolContract(KVPoolLatentTests, KVPoolReleaseTests, KVPoolGroupTests):
    """What attention backends, runners and the pipeline count on. Everything is compared to the bit.

    A pool that does not keep KV in 8 bits says so in `supports`; the tests of those types are skipped then.
    """

    contract = "kv_pool"

    @pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
    def device(self, request: pytest.FixtureRequest) -> torch.device:
        """Each test runs on the CPU, where the pool supports it, and on a GPU, where there is one."""
        return torch.device(request.param)

    def make(
        self, device: torch.device, dtype: torch.dtype = torch.float32, layers: tuple[LayerSpec, ...] = LAYERS
    ) -> KVPool:
        """Return a pool of PAGES pages of PAGE tokens. Skips where the pool does not support that."""
        computed = torch.float32 if dtype in EIGHT_BIT else None
        pool: KVPool = self.build(KVPoolContext(PAGES, PAGE, layers, dtype, device, compute_dtype=computed))
        return pool

    def numbers(self, pool: KVPool, layer: LayerSpec, count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return k and v of so many tokens, as a layer has them: float32 for an 8-bit pool, exact in its type."""
        draw = torch.Generator().manual_seed(seed + 100 * layer.layer_id)
        dtype, device = pool.keys(layer.layer_id).dtype, pool.keys(layer.layer_id).device
        shapes = [(count, layer.num_kv_heads, dim) for dim in (layer.qk_head_dim, layer.v_head_dim)]
        k, v = (torch.randn(shape, generator=draw).to(dtype).to(device) for shape in shapes)
        return (k.float(), v.float()) if dtype in EIGHT_BIT else (k, v)

    def buffers(self, pool: KVPool) -> list[torch.Tensor]:
        """Return K and V of all layers."""
        return [one(layer.layer_id) for layer in LAYERS for one in (pool.keys, pool.values)]

    def fill(self, pool: KVPool) -> list[torch.Tensor]:
        """Write something to all slots; copies of the buffers."""
        every = torch.arange(pool.num_slots, device=self.buffers(pool)[0].device)
        for layer in LAYERS:
            pool.write(layer.layer_id, every, *self.numbers(pool, layer, pool.num_slots))
        return [buffer.clone() for buffer in self.buffers(pool)]

    # Memory.

    def test_buffers_have_the_shape_of_their_layers(self, device: torch.device) -> None:
        """Slots, heads, dimensions, in one piece: a backend views them as pages."""
        pool = self.make(device)
        assert pool.page_size == PAGE
        assert pool.num_slots == (PAGES + 1) * PAGE
        for layer in LAYERS:
            for buffer, dim in (
                (pool.keys(layer.layer_id), layer.qk_head_dim),
                (pool.values(layer.layer_id), layer.v_head_dim),
            ):
                assert tuple(buffer.shape) == (pool.num_slots, layer.num_kv_heads, dim)
                assert buffer.is_contiguous()
                assert buffer.device.type == device.type

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_bytes_are_known_before_and_after(self, dtype: torch.dtype, device: torch.device) -> None:
        """The pipeline finds out how many pages memory has room for by what a token takes."""
        pool = self.make(device, dtype)
        held = sum(buffer.nbytes for buffer in self.buffers(pool))
        assert all(buffer.dtype == dtype for buffer in self.buffers(pool))
        assert held <= pool.nbytes
        assert pool.nbytes == self.provider_class().bytes_per_token(LAYERS, dtype) * pool.num_slots

    def test_buffers_are_no_copies(self, device: torch.device) -> None:
        """Backends and runners write through what they were given, and keep where it is."""
        pool = self.make(device)
        given = self.buffers(pool)
        for number, buffer in enumerate(given):
            buffer[7] = number + 1.5
        self.fill(pool)
        for number, (old, new) in enumerate(zip(given, self.buffers(pool), strict=True)):
            assert old.data_ptr() == new.data_ptr(), "a buffer moved"
            old[9] = -number - 1.5
            assert bool((new[9] == -number - 1.5).all()), "a buffer is a copy"

    def test_layers_have_memory_of_their_own(self, device: torch.device) -> None:
        pool = self.make(device)
        for number, buffer in enumerate(self.buffers(pool)):
            buffer.fill_(number + 1.0)
        for number, buffer in enumerate(self.buffers(pool)):
            assert bool((buffer == number + 1.0).all()), "two buffers have memory in common"

    @pytest.mark.parametrize("dtype", [torch.float32, *EIGHT_BIT], ids=str)
    def test_page_zero_begins_finite(self, dtype: torch.dtype, device: torch.device) -> None:
        """Padding rows read what padding rows wrote, and before the first one what was there."""
        pool = self.make(device, dtype)
        assert all(bool(buffer[:PAGE].float().isfinite().all()) for buffer in self.buffers(pool))

    @pytest.mark.parametrize("seconds", [0.0, 60.0])
    def test_prepare(self, seconds: float, device: torch.device) -> None:
        """It may be called before the first write, and says how many slots are provided for."""
        pool = self.make(device)
        provided = pool.prepare(seconds)
        assert 0 <= provided <= pool.num_slots
        assert seconds == 0.0 or provided == pool.num_slots, "a small pool takes no minute"
        assert all(bool(buffer[:PAGE].isfinite().all()) for buffer in self.buffers(pool))
        for buffer, wanted in zip(self.buffers(pool), self.fill(pool), strict=True):
            assert torch.equal(buffer, wanted)

    def test_no_layers(self, device: torch.device) -> None:
        """Those of a model all of whose layers keep states: it has slots, and takes no memory."""
        pool = self.make(device, layers=())
        assert type(pool).bytes_per_token((), torch.float32) == 0
        assert pool.nbytes == 0
        assert pool.num_slots == (PAGES + 1) * PAGE
        assert pool.prepare(0.0) == pool.num_slots
        pool.move(*(torch.tensor([slot], device=device) for slot in (4, 5)))

    # Writing.

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("slots", [[9, 4, 23], [20, 21], [4], []], ids=str)
    def test_a_write_reaches_its_slots_alone(self, slots: Slots, dtype: torch.dtype, device: torch.device) -> None:
        pool = self.make(device, dtype)
        wanted = self.fill(pool)
        at = torch.tensor(slots, dtype=torch.int64, device=device)
        k, v = self.numbers(pool, LAYERS[1], len(slots), seed=1)
        pool.write(LAYERS[1].layer_id, at, k, v)
        wanted[2][at], wanted[3][at] = k.to(dtype), v.to(dtype)
        for buffer, expected in zip(self.buffers(pool), wanted, strict=True):
            assert torch.equal(_bits(buffer), _bits(expected))

    def test_a_write_leaves_its_arguments_alone(self, device: torch.device) -> None:
        pool = self.make(device)
        slots = torch.tensor([9, 4], device=device)
        k, v = self.numbers(pool, LAYERS[0], 2)
        before = k.clone(), v.clone()
        pool.write(0, slots, k, v)
        pool.keys(0).zero_()
        assert torch.equal(k, before[0])
        assert torch.equal(v, before[1])
        assert slots.tolist() == [9, 4]

    def test_views_are_written(self, device: torch.device) -> None:
        """As a fused projection gives them: their rows are not neighbours."""
        pool = self.make(device)
        k, v = self.numbers(pool, LAYERS[0], 3)
        fused = torch.cat([k.flatten(1), v.flatten(1)], 1)
        views = [one.view(3, 2, 8) for one in torch.split(fused, 16, 1)]
        pool.write(0, torch.tensor([5, 22, 8], device=device), *views)
        assert torch.equal(pool.keys(0)[[5, 22, 8]], k)
        assert torch.equal(pool.values(0)[[5, 22, 8]], v)

    # Eight bits.

    def scaled(self, device: torch.device, dtype: torch.dtype) -> KVPool:
        """Return a pool with SCALES."""
        pool = self.make(device, dtype)
        for layer_id, scales in SCALES.items():
            pool.set_scales(layer_id, *scales)
        return pool

    def test_scales_are_one_at_first(self, device: torch.device) -> None:
        for dtype in (torch.float32, *EIGHT_BIT):
            pool = self.make(device, dtype)
            assert {pool.scales(layer.layer_id) for layer in LAYERS} == {(1.0, 1.0)}

    @pytest.mark.parametrize("dtype", EIGHT_BIT, ids=str)
    def test_scales_are_those_that_were_set(self, dtype: torch.dtype, device: torch.device) -> None:
        pool = self.scaled(device, dtype)
        assert {layer.layer_id: pool.scales(layer.layer_id) for layer in LAYERS} == SCALES

    @pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf], ids=str)
    def test_wrong_scales_are_refused(self, scale: float, device: torch.device) -> None:
        pool = self.make(device, torch.float8_e4m3fn)
        for pair in ((scale, 1.0), (1.0, scale)):
            with pytest.raises(ValueError, match=r"\S"):
                pool.set_scales(0, *pair)
        assert pool.scales(0) == (1.0, 1.0)

    def test_other_types_are_not_scaled(self, device: torch.device) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            with pytest.raises(ValueError, match=r"\S"):
                self.make(device, dtype).set_scales(0, 1.0, 1.0)

    @pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("dtype", EIGHT_BIT, ids=str)
    def test_a_write_is_scaled(self, dtype: torch.dtype, computed: torch.dtype, device: torch.device) -> None:
        """Divided by the layer's scale, K by K's and V by V's, then rounded to the nearest number, ties to even."""
        pool = self.scaled(device, dtype)
        at = torch.tensor([6, 21, 13], device=device)
        for layer in LAYERS:
            k, v = (one.to(computed) for one in self.numbers(pool, layer, len(at), seed=3))
            k = k * 1.0625  # not exact any more, and in e4m3 often half-way
            pool.write(layer.layer_id, at, k, v)
            for buffer, number, scale in zip(_pair(pool, layer), (k, v), SCALES[layer.layer_id], strict=True):
                wanted = (number.double() / scale).float().to(dtype)
                assert torch.equal(_bits(buffer)[at], _bits(wanted)), f"layer {layer.layer_id}"

    @pytest.mark.parametrize("scale", [0.013, 3.7], ids=str)
    def test_any_scale(self, scale: float, device: torch.device) -> None:
        """The nearest number that the type holds, but for what rounding the quotient to float32 changes."""
        pool = self.make(device, torch.float8_e4m3fn)
        at = torch.arange(pool.num_slots, device=device)
        k, v = self.numbers(pool, LAYERS[0], pool.num_slots, seed=4)
        pool.set_scales(0, scale, 2 * scale)
        pool.write(0, at, k, v)
        for buffer, number, by in ((pool.keys(0), k, scale), (pool.values(0), v, 2 * scale)):
            exact = number.double() / by
            half_step = torch.maximum(exact.abs() * 2**-4, torch.full_like(exact, 2**-10))
            assert bool(((buffer.double() - exact).abs() <= half_step * (1 + 1e-6)).all())

    @pytest.mark.parametrize("dtype", EIGHT_BIT, ids=str)
    def test_what_is_too_large_is_clamped(self, dtype: torch.dtype, device: torch.device) -> None:
        """Behind the scale; a cast alone gives NaN or infinity, by type and version. NaN stays NaN."""
        pool = self.make(device, dtype)
        most = torch.finfo(dtype).max
        pool.set_scales(0, 2.0, 0.5)
        at, size = torch.tensor([10, 11], device=device), LAYERS[0].qk_head_dim
        one = torch.tensor([2 * most, 2.5 * most, -3 * most, math.inf, -math.inf, math.nan, 1.0, 0.0], device=device)
        pool.write(0, at, one.expand(2, 2, size), (one / 4).expand(2, 2, size))
        wanted = torch.tensor([most, most, -most, most, -most, math.nan, 0.5, 0.0], device=device)
        for buffer in _pair(pool, LAYERS[0]):
            found = buffer[at].float()
            assert torch.equal(found.nan_to_num(nan=-1.25), wanted.nan_to_num(nan=-1.25).expand_as(found))

    # Moving.

    def check_move(self, sources: Slots, targets: Slots, device: torch.device, dtype: torch.dtype) -> None:
        pool = self.make(device, dtype)
        wanted = self.fill(pool)
        was = [buffer.clone() for buffer in wanted]
        arguments = [torch.tensor(one, dtype=torch.int64, device=device) for one in (sources, targets)]
        pool.move(*arguments)
        assert [one.tolist() for one in arguments] == [list(sources), list(targets)]
        was, wanted = [_bits(one) for one in was], [_bits(one) for one in wanted]
        for old, expected in zip(was, wanted, strict=True):
            for source, target in zip(sources, targets, strict=True):
                expected[target] = old[source]
        for layer, buffer, expected in zip(range(2 * len(LAYERS)), self.buffers(pool), wanted, strict=True):
            wrong = (_bits(buffer) != expected).flatten(1).any(1).nonzero().flatten().tolist()
            name = f"{'values' if layer % 2 else 'keys'} of layer {LAYERS[layer // 2].layer_id}"
            assert not wrong, f"{name}: slots {wrong} are wrong after moving {list(sources)} to {list(targets)}"

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *EIGHT_BIT], ids=str)
    @pytest.mark.parametrize(
        ("sources", "targets"),
        [([20, 6, 9], [4, 5, 8]), ([7], [19]), ([], []), ([11, 11], [4, 5])],
        ids=["apart", "one", "none", "twice"],
    )
    def test_moves(self, sources: Slots, targets: Slots, dtype: torch.dtype, device: torch.device) -> None:
        """K and V of all layers; what they are moved from stays as it was."""
        self.check_move(sources, targets, device, dtype)

    @pytest.mark.parametrize(
        ("sources", "targets"),
        [([5, 6, 7, 8], [4, 5, 6, 7]), ([4, 5, 6, 7], [5, 6, 7, 8]), ([4, 9], [9, 4]), ([4, 5], [4, 5])],
        ids=["down", "up", "swapped", "in place"],
    )
    def test_all_sources_are_read_first(self, sources: Slots, targets: Slots, device: torch.device) -> None:
        """Slots may be both: those of an accepted path move up by a few."""
        self.check_move(sources, targets, device, torch.float32)

    @properties(max_examples=30)
    @given(data=st.data())
    def test_any_move(self, data: st.DataObject) -> None:
        slots = st.integers(0, (PAGES + 1) * PAGE - 1)
        targets = data.draw(st.lists(slots, unique=True), "targets")
        sources = data.draw(st.lists(slots, min_size=len(targets), max_size=len(targets)), "sources")
        self.check_move(sources, targets, torch.device("cpu"), torch.float32)


def _bits(buffer: torch.Tensor) -> torch.Tensor:
    """Return what can be compared: 8-bit floats as bytes, others as they are."""
    return buffer.view(torch.uint8) if buffer.dtype in EIGHT_BIT else buffer


def _pair(pool: KVPool, layer: LayerSpec) -> tuple[torch.Tensor, torch.Tensor]:
    return pool.keys(layer.layer_id), pool.values(layer.layer_id)
