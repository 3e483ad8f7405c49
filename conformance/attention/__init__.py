"""The conformance suite of AttentionBackend."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pegboard.conformance.attention.base import DECODES, RAGGED, TOLERANCES
from pegboard.conformance.attention.batches import AttentionRig, Lens, make_layer
from pegboard.conformance.attention.chunks import AttentionChunkTests
from pegboard.conformance.attention.common_prefix import AttentionPrefixTests
from pegboard.conformance.attention.eight_bit import AttentionEightBitTests
from pegboard.conformance.attention.fixed_extends import AttentionFixedExtendTests
from pegboard.conformance.attention.latents import AttentionLatentTests
from pegboard.conformance.attention.trees import AttentionTreeTests
from pegboard.conformance.covering import covering
from pegboard.conformance.properties import properties
from pegboard.conformance.suite import capability, lacks
from pegboard.core.interfaces.attention import AttentionBackend
from pegboard.core.interfaces.forward import ForwardMode

_SHAPES = covering(
    itertools.product(
        (torch.float32, torch.float16, torch.bfloat16),
        ((64, 64), (80, 80), (128, 128), (96, 64)),
        ((4, 4), (9, 3), (32, 2)),
        (1, 16),
    )
)
"""dtype, (dimension of q and k, of v), (heads, KV heads), page size."""


class AttentionContract(
    AttentionTreeTests,
    AttentionFixedExtendTests,
    AttentionEightBitTests,
    AttentionPrefixTests,
    AttentionLatentTests,
    AttentionChunkTests,
):
    """Against attention written out in float64, over pages in any order.

    Every slot that a request does not own holds NaN in all of these tests: page 0, free pages, the rest of the last
    page, and new tokens' slots until they are written. A backend that reads one, be it to multiply it by zero, is off.
    """

    contract = "attention"

    # What is computed.

    @pytest.mark.parametrize("lens", [((0, 1),), ((0, 7),), ((0, 5), (0, 1), (0, 17))], ids=str)
    def test_extend(self, lens: Lens, device: torch.device) -> None:
        self.check_lens(make_layer(), lens, device, mode=ForwardMode.EXTEND)

    @pytest.mark.parametrize("lens", [((5, 3),), ((4, 4), (1, 9), (30, 2))], ids=str)
    def test_extend_behind_prefix(self, lens: Lens, device: torch.device) -> None:
        self.check_lens(make_layer(), lens, device)

    @pytest.mark.parametrize("lens", [((0, 1),), ((12, 1),), DECODES], ids=str)
    def test_decode(self, lens: Lens, device: torch.device) -> None:
        self.check_lens(make_layer(), lens, device)

    def test_mixed(self, device: torch.device) -> None:
        self.check_lens(make_layer(), RAGGED, device, mode=ForwardMode.MIXED)

    def test_decodes_as_mixed(self, device: torch.device) -> None:
        """A decode is an extend of one token."""
        self.check_lens(make_layer(), DECODES, device, mode=ForwardMode.MIXED)

    @pytest.mark.parametrize("page_size", [1, 4, 16])
    @pytest.mark.parametrize("lens", [RAGGED, DECODES], ids=["ragged", "decode"])
    def test_page_sizes(self, lens: Lens, page_size: int, device: torch.device) -> None:
        self.check_lens(make_layer(), lens, device, page_size=page_size)

    @pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (1, 1), (6, 2), (9, 3), (5, 1), (20, 1)])
    def test_grouped_heads(self, heads: int, kv_heads: int, device: torch.device) -> None:
        for lens in (RAGGED, DECODES):
            self.check_lens(make_layer(heads, kv_heads), lens, device)

    @pytest.mark.parametrize("dims", [(64, 64), (24, 24), (13, 13), (8, 8), (24, 16), (16, 40)], ids=str)
    def test_head_dims(self, dims: tuple[int, int], device: torch.device) -> None:
        for lens in (RAGGED, DECODES):
            self.check_lens(make_layer(4, 2, *dims), lens, device)

    @pytest.mark.parametrize("scale", [0.05, 1.0])
    def test_scale(self, scale: float, device: torch.device) -> None:
        """The layer's own, not what the head size suggests."""
        for lens in (RAGGED, DECODES):
            self.check_lens(make_layer(scale=scale), lens, device)

    @pytest.mark.parametrize("lens", [RAGGED, DECODES], ids=["ragged", "decode"])
    def test_large_scores(self, lens: Lens, device: torch.device) -> None:
        """Scores in the hundreds: exp of one overflows, so the largest has to come off first."""
        rig = AttentionRig([make_layer(dim=16)], lens, spread=12.0, device=device)
        out = rig.run(self.make(rig))
        # Rounding of scores this large is 1e-5 itself, and it is then the relative error of a weight.
        assert float((out.cpu().double() - rig.expected()).abs().max()) < 1e-3

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("lens", [RAGGED, DECODES], ids=["ragged", "decode"])
    def test_dtypes(self, lens: Lens, dtype: torch.dtype, device: torch.device) -> None:
        rig = AttentionRig([make_layer(6, 2, 32)], lens, dtype=dtype, device=device)
        self.check(rig, rig.run(self.make(rig)))

    @pytest.mark.parametrize("lens", [((300, 270), (10, 1)), ((530, 1), (3, 1), (290, 1))], ids=["extend", "decode"])
    def test_long(self, lens: Lens, device: torch.device) -> None:
        """Beyond any block that a backend may compute in one go."""
        self.check_lens(make_layer(2, 1), lens, device, page_size=16)

    # Capabilities.

    @capability("sliding_window")
    @pytest.mark.parametrize("window", [1, 2, 7, 16, 100])
    def test_window(self, window: int, device: torch.device) -> None:
        """`window` keys are seen, the token itself included."""
        for lens in (RAGGED, DECODES, ((0, 40),), ((35, 30),)):
            self.check_lens(make_layer(window=window), lens, device)

    @capability("sliding_window")
    def test_long_window(self, device: torch.device) -> None:
        for lens in (((200, 290), (10, 1)), ((500, 1), (3, 1))):
            self.check_lens(make_layer(2, 1, window=150), lens, device, page_size=16)

    @capability("sliding_window")
    @pytest.mark.parametrize("window", [1, 7, 16])
    def test_pages_behind_a_window_are_not_read(self, window: int, device: torch.device) -> None:
        """In a group of window layers they are other requests' by now, or free."""
        for lens in (RAGGED, DECODES, ((35, 30),)):
            rig = AttentionRig([make_layer(), make_layer(layer_id=1, window=window, kv_group=1)], lens, device=device)
            rig.spoil_behind_windows(1)
            self.check_layers(rig, self.make(rig))

    @lacks("sliding_window")
    def test_window_is_refused(self, device: torch.device) -> None:
        self.check_refused("sliding_window", make_layer(window=3), device)

    @capability("logit_cap")
    @pytest.mark.parametrize("cap", [0.5, 5.0])
    def test_logit_cap(self, cap: float, device: torch.device) -> None:
        """With scores of the order of the cap and above."""
        for lens in (RAGGED, DECODES):
            self.check_lens(make_layer(scale=1.0, logit_cap=cap), lens, device)

    @lacks("logit_cap")
    def test_logit_cap_is_refused(self, device: torch.device) -> None:
        self.check_refused("logit_cap", make_layer(logit_cap=0.5), device)

    @capability("sinks")
    @pytest.mark.parametrize("lens", [RAGGED, DECODES, ((0, 1),)], ids=["ragged", "decode", "first"])
    def test_sinks(self, lens: Lens, device: torch.device) -> None:
        self.check_lens(make_layer(6, 2, sinks=True), lens, device)

    @lacks("sinks")
    def test_sinks_are_refused(self, device: torch.device) -> None:
        self.check_refused("sinks", make_layer(sinks=True), device)

    @capability("sliding_window")
    @capability("logit_cap")
    @capability("sinks")
    def test_window_cap_and_sinks(self, device: torch.device) -> None:
        layer = make_layer(6, 2, 24, 16, window=6, logit_cap=2.0, sinks=True, scale=0.8)
        for lens in (RAGGED, DECODES):
            self.check_lens(layer, lens, device)

    # What is read and written.

    @pytest.mark.parametrize("page_size", [1, 16])
    @pytest.mark.parametrize("lens", [RAGGED, DECODES, ((0, 6),)], ids=["ragged", "decode", "prompt"])
    def test_reads_only_own_slots(self, lens: Lens, page_size: int, device: torch.device) -> None:
        """Whatever stands elsewhere: the output is the same to the bit."""
        outputs = []
        for poison in (math.nan, math.inf, 0.0, 1e4):
            rig = AttentionRig([make_layer()], lens, page_size=page_size, device=device, poison=poison)
            outputs.append(rig.run(self.make(rig)))
            assert bool(outputs[-1].isfinite().all()), f"slots that hold {poison} and have no owner were read"
        for out in outputs[1:]:
            assert torch.equal(out, outputs[0]), "slots that have no owner were read"

    @pytest.mark.parametrize("lens", [RAGGED, DECODES, ((0, 6),)], ids=["ragged", "decode", "prompt"])
    def test_writes_only_new_slots(self, lens: Lens, device: torch.device) -> None:
        """K and V are where `out_cache_loc` says, to the bit, and nothing else has changed, in any layer."""
        layers = [make_layer(v_dim=8), make_layer(layer_id=1)]
        rig = AttentionRig(layers, lens, device=device)
        pool = rig.pool
        before = [(pool.keys(one.layer_id).clone(), pool.values(one.layer_id).clone()) for one in layers]
        k, v = rig.new_kv()
        slots = rig.new_slots()
        rig.run(self.make(rig))
        assert torch.equal(pool.keys(0)[slots], k), "the new keys are not where out_cache_loc says"
        assert torch.equal(pool.values(0)[slots], v), "the new values are not where out_cache_loc says"
        before[0][0][slots], before[0][1][slots] = k, v
        for layer, (keys, values) in zip(layers, before, strict=True):
            for old, new in ((keys, pool.keys(layer.layer_id)), (values, pool.values(layer.layer_id))):
                same = ((old == new) | (old.isnan() & new.isnan())).flatten(1).all(1)
                changed = (~same).nonzero().flatten().tolist()
                assert not changed, f"layer {layer.layer_id}: slots {changed} changed"

    @pytest.mark.parametrize("lens", [RAGGED, DECODES, ((0, 6),)], ids=["ragged", "decode", "prompt"])
    def test_shared_kv(self, lens: Lens, device: torch.device) -> None:
        """Without k and v the layer attends to what another one wrote, and writes nothing."""
        rig = AttentionRig([make_layer()], lens, device=device)
        out = rig.run(self.make(rig), shared=True)
        self.check(rig, out)
        assert rig.pool.written == [], "a layer that shares another one's KV must not write"

    def test_leaves_its_inputs_alone(self, device: torch.device) -> None:
        for lens in (RAGGED, DECODES):
            rig = AttentionRig([make_layer()], lens, device=device)
            backend = self.make(rig)
            batch = rig.batch(backend)
            k, v = rig.new_kv()
            inputs = rig.q[0], k, v, batch.seq_lens, batch.req_pool_indices, *(one.row_table for one in batch.kv_groups)
            copies = [one.clone() for one in inputs]
            with torch.inference_mode():
                backend.prepare(batch)
                out = backend.forward(rig.q[0], k, v, rig.layers[0], batch)
                out.zero_()
            for one, copy in zip(inputs, copies, strict=True):
                assert torch.equal(one, copy)

    # How it is called.

    @pytest.mark.parametrize("lens", [RAGGED, DECODES, ((0, 6),)], ids=["ragged", "decode", "prompt"])
    def test_strided_inputs(self, lens: Lens, device: torch.device) -> None:
        """Views into a fused projection."""
        rig = AttentionRig([make_layer()], lens, device=device)
        backend = self.make(rig)
        batch = rig.batch(backend)
        fused = torch.cat([rig.q[0].flatten(1), *(one.flatten(1) for one in rig.new_kv())], dim=1)
        q, k, v = (one.view(len(fused), -1, 16) for one in torch.split(fused, [64, 32, 32], dim=1))
        with torch.inference_mode():
            backend.prepare(batch)
            self.check(rig, backend.forward(q, k, v, rig.layers[0], batch))

    @pytest.mark.parametrize("lens", [RAGGED, DECODES], ids=["ragged", "decode"])
    def test_layers_of_a_batch(self, lens: Lens, device: torch.device) -> None:
        """One `prepare` for layers that differ in everything, then each of them, twice."""
        layers = [make_layer(), make_layer(6, 3, 24, layer_id=1), make_layer(5, 1, 8, 16, layer_id=2, scale=1.0)]
        rig = AttentionRig(layers, lens, device=device)
        self.check_layers(rig, self.make(rig))

    @capability("sliding_window")
    @pytest.mark.parametrize("lens", [RAGGED, DECODES], ids=["ragged", "decode"])
    def test_windows_of_a_batch(self, lens: Lens, device: torch.device) -> None:
        layers = [make_layer(layer_id=index, window=window) for index, window in enumerate((None, 4, 11, None))]
        rig = AttentionRig(layers, lens, device=device)
        self.check_layers(rig, self.make(rig))

    @pytest.mark.parametrize("lens", [RAGGED, DECODES], ids=["ragged", "decode"])
    def test_kv_groups(self, lens: Lens, device: torch.device) -> None:
        """Each group has its own row table and its own slots."""
        layers = [make_layer(), make_layer(layer_id=1, kv_group=1), make_layer(layer_id=2)]
        rig = AttentionRig(layers, lens, device=device)
        self.check_layers(rig, self.make(rig))

    @torch.inference_mode()
    def check_layers(self, rig: AttentionRig, backend: AttentionBackend) -> None:
        batch = rig.batch(backend)
        backend.prepare(batch)
        for _ in range(2):
            for index, layer in enumerate(rig.layers):
                k, v = rig.new_kv(index)
                self.check(rig, backend.forward(rig.q[index], k, v, layer, batch), index)

    def test_steps(self, device: torch.device) -> None:
        """One backend serves batch after batch: a prompt in chunks, then decodes, each with the KV of those before."""
        layer, steps = make_layer(), (7, 1, 6, 1, 1, 3)
        whole = AttentionRig([layer], [(0, sum(steps)), (0, sum(steps))], device=device)
        backend = self.build(whole.context_for())
        expected = whole.expected().view(2, sum(steps), 4, 16)
        done = 0
        for new in steps:
            rig = AttentionRig([layer], [(done, new), (done, new)], device=device)
            for request in range(2):
                k, v = whole.k[0][request], whole.v[0][request]
                rig.k[0][request], rig.v[0][request] = k[: done + new], v[: done + new]
                slots = rig.slots[0][request][:done]
                rig.pool.keys(0)[slots], rig.pool.values(0)[slots] = k[:done], v[:done]
            rig.q[0] = whole.q[0].view(2, sum(steps), 4, 16)[:, done : done + new].flatten(0, 1)
            out = rig.run(backend).cpu().double()
            right = expected[:, done : done + new].flatten(0, 1)
            torch.testing.assert_close(out, right, rtol=0, atol=TOLERANCES[torch.float32])
            done += new

    @pytest.mark.parametrize("lens", [RAGGED, DECODES], ids=["ragged", "decode"])
    def test_neighbours_do_not_matter(self, lens: Lens, device: torch.device) -> None:
        """A request's output alone is what it is in company, but for rounding."""
        rig = AttentionRig([make_layer()], lens, device=device)
        together = torch.split(rig.run(self.make(rig)), rig.new.tolist())
        for request, (prefix, new) in enumerate(lens):
            alone = AttentionRig([make_layer()], [(prefix, new)], device=device)
            alone.k[0], alone.v[0] = [rig.k[0][request]], [rig.v[0][request]]
            slots = alone.slots[0][0][:prefix]
            alone.pool.keys(0)[slots] = rig.k[0][request][:prefix]
            alone.pool.values(0)[slots] = rig.v[0][request][:prefix]
            alone.q[0] = torch.split(rig.q[0], rig.new.tolist())[request]
            out = alone.run(self.make(alone))
            torch.testing.assert_close(out, together[request], rtol=0, atol=TOLERANCES[torch.float32])

    def test_idle_batch(self, device: torch.device) -> None:
        rig = AttentionRig([make_layer()], (), device=device)
        backend = self.build(rig.context_for(max_batch=4))
        out = rig.run(backend, mode=ForwardMode.IDLE)
        assert tuple(out.shape) == (0, 4, 16)

    @pytest.mark.parametrize("lens", [((0, 5), (3, 4)), ((4, 1), (9, 1))], ids=["extend", "decode"])
    def test_no_layers(self, lens: Lens, device: torch.device) -> None:
        """A model all of whose layers keep states prepares batches all the same."""
        rig = AttentionRig([make_layer()], lens, device=device)
        backend: AttentionBackend = self.build(dataclasses.replace(rig.context_for(), layers=()))
        batch = rig.batch(backend)
        backend.prepare(batch)
        assert batch.batch_size == 2

    # Everything at once.

    @properties(max_examples=30)
    @given(data=st.data())
    def test_any_batch(self, data: st.DataObject) -> None:
        """Whatever comes together, with as many capabilities as the backend has."""
        self.check_drawn(data, longest=24, device=torch.device("cpu"))

    @pytest.mark.full
    @properties(max_examples=200)
    @given(data=st.data())
    def test_any_larger_batch(self, data: st.DataObject) -> None:
        self.check_drawn(data, longest=90, device=torch.device("cpu"))

    @pytest.mark.gpu
    @properties(max_examples=100)
    @given(data=st.data())
    def test_any_batch_on_gpu(self, data: st.DataObject) -> None:
        self.check_drawn(data, longest=300, device=torch.device("cuda"))

    def check_drawn(self, data: st.DataObject, longest: int, device: torch.device) -> None:
        draw = data.draw
        request = st.tuples(st.integers(0, longest), st.integers(1, longest))
        lens = draw(st.lists(request, min_size=1, max_size=5), "lens")
        if draw(st.booleans(), "decode"):
            lens = [(prefix, 1) for prefix, _ in lens]
        dims = st.sampled_from((4, 8, 16, 17, 20, 48))
        dim = draw(dims, "dim")
        kv_heads = draw(st.integers(1, 3), "kv heads")
        layer = make_layer(
            kv_heads * draw(st.integers(1, 5), "group"),
            kv_heads,
            dim,
            draw(st.sampled_from((dim, dim, 16, 24)), "v dim"),
            window=draw(st.sampled_from((None, 1, 3, 16, 33)), "window") if self.has("sliding_window") else None,
            logit_cap=draw(st.sampled_from((None, 0.7, 20.0)), "cap") if self.has("logit_cap") else None,
            sinks=draw(st.booleans(), "sinks") if self.has("sinks") else False,
        )
        self.check_lens(layer, lens, device, page_size=draw(st.sampled_from((1, 2, 4, 16)), "page size"))

    @pytest.mark.full
    @pytest.mark.parametrize(("dtype", "dims", "heads", "page_size"), _SHAPES, ids=str)
    def test_matrix(
        self, dtype: torch.dtype, dims: tuple[int, int], heads: tuple[int, int], page_size: int, device: torch.device
    ) -> None:
        """Shapes of real models: each two settings stand together in one of the cases."""
        for lens in (((0, 70), (45, 20), (70, 1)), ((200, 1), (64, 1), (1, 1))):
            rig = AttentionRig([make_layer(*heads, *dims)], lens, page_size=page_size, dtype=dtype, device=device)
            self.check(rig, rig.run(self.make(rig)))
