"""The conformance suite of HostPool."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pegboard.conformance.attention.batches import make_layer
from pegboard.conformance.properties import properties
from pegboard.conformance.rig.paged import PlainPool
from pegboard.conformance.suite import ContractSuite
from pegboard.core.interfaces.kv_pool import KVPoolContext
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.kv_tiers.api import HostPool, HostPoolContext

if TYPE_CHECKING:
    from numpy.typing import NDArray

LAYERS = (
    make_layer(4, 2, 8),
    make_layer(4, 1, 16, 4, layer_id=3),
    make_layer(6, 3, 5, 7, layer_id=1),
    make_layer(4, 1, 12, 8, layer_id=7, latent=True),
)
"""They differ in their heads and dimensions, K from V too; their ids have a gap and are not in order. The last one has
one buffer.
"""

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)

HOST_PAGES, DEVICE_PAGES = 12, 9

CPU = torch.device("cpu")

Pages = Sequence[int]
Content = list["NDArray[np.uint8]"]
"""K and V of each layer, or its latent, in the order of LAYERS: uint8 [pages, bytes of a page]."""


def indices(pages: Pages) -> torch.Tensor:
    """Return page numbers as the contract wants them."""
    return torch.tensor(list(pages), dtype=torch.int64)


class Rig:
    """A host pool below a plain pool of random bytes, and what is read from both."""

    def __init__(self, host: HostPool, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self.host = host
        ctx = KVPoolContext(DEVICE_PAGES, host.page_size, LAYERS, dtype, device)
        self.pool = PlainPool(NoOptions(), ctx)
        self.draw = np.random.default_rng(seed)
        self.put([self.draw.integers(0, 256, one.shape, np.uint8) for one in self.device()])

    def buffers(self) -> list[torch.Tensor]:
        """Return K and V of each layer as uint8 [pages, bytes], no copies."""
        return [
            buffer.view(torch.uint8).view(DEVICE_PAGES + 1, -1)
            for layer in LAYERS
            for buffer in self.pool.buffers(layer.layer_id)
        ]

    def put(self, content: Content) -> None:
        """Write all device pages."""
        for buffer, new in zip(self.buffers(), content, strict=True):
            buffer.copy_(torch.from_numpy(new))

    def device(self) -> Content:
        """Return a copy of all device pages, when all that is queued is done."""
        if self.pool.keys(0).is_cuda:
            torch.cuda.synchronize()
        return [buffer.cpu().numpy().copy() for buffer in self.buffers()]

    def save(self, device: Pages, host: Pages) -> None:
        self.host.save(self.pool, indices(device), indices(host))

    def load(self, host: Pages, device: Pages) -> None:
        """Load all layers, the last one first: the order is the caller's."""
        for layer in reversed(LAYERS):
            self.host.load(self.pool, layer.layer_id, indices(host), indices(device))

    def block(self, host: Pages) -> bytes:
        """Return what `write_block` writes, into memory that held something else."""
        out = bytearray(b"\xa5" * self.host.block_bytes)
        self.host.write_block(indices(host), memoryview(out))
        return bytes(out)

    def random_block(self) -> bytes:
        return self.draw.bytes(self.host.block_bytes)

    def fill_host(self) -> dict[int, bytes]:
        """Write random bytes to all host pages, of which each is a block: what each has, by page."""
        filled = {page: self.random_block() for page in range(1, HOST_PAGES + 1)}
        for page, block in filled.items():
            self.host.read_block(memoryview(block), indices([page]))
        return filled

    def pages(self, count: int, stop: int) -> list[int]:
        """Draw `count` pages of [1, stop] in any order."""
        return [int(page) for page in self.draw.permutation(stop)[:count] + 1]


def block_of(content: Content, pages: Pages) -> bytes:
    """Return the block of device pages as the contract words it: part after part, in each page after page."""
    return b"".join(part[page].tobytes() for part in content for page in pages)


def assert_same(found: Content, wanted: Content, what: str) -> None:
    """Compare to the bit."""
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        wrong = np.flatnonzero((one != other).any(1)).tolist()
        name = f"{'V' if number % 2 else 'K'} of layer {LAYERS[number // 2].layer_id}"
        assert not wrong, f"{name}: device pages {wrong} are wrong after {what}"


class HostPoolContract(ContractSuite):
    """What caches with tiers count on. Everything is compared to the bit, and is bits: most patterns are no numbers."""

    contract = "host_pool"

    @pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
    def device(self, request: pytest.FixtureRequest) -> torch.device:
        """Each test runs on the CPU, and on a GPU, where there is one."""
        return torch.device(request.param)

    def make(
        self,
        device: torch.device = CPU,
        *,
        page_size: int = 4,
        dtype: torch.dtype = torch.bfloat16,
        block_pages: int = 1,
    ) -> Rig:
        """Return a host pool of HOST_PAGES pages and a device pool. Skips where the provider does not support that."""
        host: HostPool = self.build(HostPoolContext(HOST_PAGES, page_size, LAYERS, dtype, device, block_pages))
        return Rig(host, dtype, device)

    # Memory.

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("block_pages", [1, 3])
    def test_bytes_are_known_before_and_after(self, dtype: torch.dtype, block_pages: int) -> None:
        """The engine finds out how many pages memory has room for by what a token takes; page 0 may come on top."""
        host = self.make(dtype=dtype, block_pages=block_pages).host
        token = dtype.itemsize * sum(sum(layer.kept) for layer in LAYERS)
        assert self.provider_class().bytes_per_token(LAYERS, dtype) == token
        assert HOST_PAGES * 4 * token <= host.nbytes <= (HOST_PAGES + 1) * 4 * token
        assert host.block_bytes == block_pages * 4 * token
        assert (host.num_pages, host.page_size) == (HOST_PAGES, 4)
        host.close()

    @pytest.mark.parametrize("seconds", [0.0, 60.0])
    def test_prepare(self, seconds: float, device: torch.device) -> None:
        """It may be called before the first page is written to, and says how many pages are provided for."""
        rig = self.make(device)
        provided = rig.host.prepare(seconds)
        assert 0 <= provided <= HOST_PAGES
        assert seconds == 0.0 or provided == HOST_PAGES, "a small pool takes no minute"
        content = rig.device()
        rig.save([1, 2], [HOST_PAGES, 1])
        assert rig.block([HOST_PAGES]) + rig.block([1]) == block_of(content, [1]) + block_of(content, [2])

    # Saving and loading.

    @pytest.mark.parametrize("page_size", [1, 16, 64])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_what_was_saved_is_loaded(self, dtype: torch.dtype, page_size: int, device: torch.device) -> None:
        """From any pages by way of any pages to any pages; no other page of the device changes."""
        rig = self.make(device, page_size=page_size, dtype=dtype)
        wanted = rig.device()
        sources, between, targets = (rig.pages(5, stop) for stop in (DEVICE_PAGES, HOST_PAGES, DEVICE_PAGES))
        rig.save(sources, between)
        assert_same(rig.device(), wanted, "saving")
        lost = [rig.draw.integers(0, 256, one.shape, np.uint8) for one in wanted]
        rig.put(lost)
        rig.load(between, targets)
        for old, new in zip(wanted, lost, strict=True):
            new[targets] = old[sources]
        assert_same(rig.device(), lost, f"saving {sources} to {between} and loading them to {targets}")

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e5m2], ids=str)
    def test_no_bit_is_a_number(self, dtype: torch.dtype, device: torch.device) -> None:
        """Infinities, and NaN with whatever payload and sign, come back as they were."""
        rig = self.make(device, dtype=dtype)
        patterns = {
            torch.bfloat16: [0x7F81, 0xFFFF, 0x7F80, 0x8000, 0x0001],
            torch.float16: [0x7C01, 0xFFFF, 0x7C00, 0x8000, 0x0001],
            torch.float32: [0x7F800001, 0xFFFFFFFF, 0x7F800000, 0x80000000, 0x00000001],
            torch.float8_e5m2: [0x7D, 0xFF, 0x7C, 0x80, 0x01],
        }[dtype]
        words = np.array(patterns, dtype=f"<u{dtype.itemsize}")
        wanted = [
            np.resize(words, one.size // dtype.itemsize).view(np.uint8).reshape(one.shape) for one in rig.device()
        ]
        rig.put(wanted)
        rig.save([3, 1], [2, 7])
        rig.load([7, 2], [5, 6])
        for one in wanted:
            one[[5, 6]] = one[[1, 3]]
        assert_same(rig.device(), wanted, "saving and loading infinities and NaN")

    def test_only_named_host_pages_change(self, device: torch.device) -> None:
        rig = self.make(device)
        wanted, content = rig.fill_host(), rig.device()
        sources, targets = rig.pages(4, DEVICE_PAGES), rig.pages(4, HOST_PAGES)
        rig.save(sources, targets)
        wanted |= {target: block_of(content, [source]) for source, target in zip(sources, targets, strict=True)}
        wrong = [page for page, block in wanted.items() if rig.block([page]) != block]
        assert not wrong, f"host pages {wrong} are wrong after saving {sources} to {targets}"

    def test_one_layer_is_loaded(self, device: torch.device) -> None:
        """The others are not touched: their pages may be in use."""
        rig = self.make(device)
        content = rig.device()
        rig.save([2, 4], [5, 1])
        wanted = [rig.draw.integers(0, 256, one.shape, np.uint8) for one in content]
        rig.put(wanted)
        rig.host.load(rig.pool, LAYERS[1].layer_id, indices([1, 5]), indices([7, 8]))
        for part in (2, 3):
            wanted[part][[7, 8]] = content[part][[4, 2]]
        assert_same(rig.device(), wanted, f"loading layer {LAYERS[1].layer_id}")

    def test_no_pages_are_fine(self, device: torch.device) -> None:
        rig = self.make(device)
        content = rig.device()
        rig.save([], [])
        rig.load([], [])
        assert_same(rig.device(), content, "copying no pages")

    def test_arguments_stay(self, device: torch.device) -> None:
        rig = self.make(device)
        first, second = indices([4, 2, 9]), indices([11, 1, 6])
        rig.host.save(rig.pool, first, second)
        rig.host.load(rig.pool, LAYERS[0].layer_id, second, first)
        assert first.tolist() == [4, 2, 9]
        assert second.tolist() == [11, 1, 6]

    # Blocks.

    @pytest.mark.parametrize("page_size", [1, 16, 64])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
    def test_blocks_have_one_format(self, dtype: torch.dtype, page_size: int) -> None:
        """The same for each page size and layout: what one server stores, another one reads."""
        block_pages = 64 // page_size if page_size > 1 else 6
        rig = self.make(page_size=page_size, dtype=dtype, block_pages=block_pages)
        sources, between = rig.pages(block_pages, DEVICE_PAGES), rig.pages(block_pages, HOST_PAGES)
        slots = [page * page_size + offset for page in sources for offset in range(page_size)]
        wanted = b""
        for layer in LAYERS:
            for buffer in rig.pool.buffers(layer.layer_id):
                wanted += b"".join(buffer[slot].view(torch.uint8).numpy().tobytes() for slot in slots)
        rig.save(sources, between)
        assert rig.block(between) == wanted, "a block is [layers][K, V][tokens, heads, dim] without padding"

    @pytest.mark.parametrize(("page_size", "block_pages"), [(1, 8), (4, 3), (16, 1)])
    def test_blocks_are_read(self, page_size: int, block_pages: int, device: torch.device) -> None:
        """From memory that need not be writable, into the named pages alone."""
        rig = self.make(device, page_size=page_size, block_pages=block_pages)
        content, block = rig.device(), rig.random_block()
        host, targets = rig.pages(HOST_PAGES, HOST_PAGES), rig.pages(block_pages, DEVICE_PAGES)
        sources = rig.pages(HOST_PAGES - block_pages, DEVICE_PAGES)
        for source, page in zip(sources, host[block_pages:], strict=False):
            rig.save([source], [page])
        rig.host.read_block(memoryview(block), indices(host[:block_pages]))
        assert rig.block(host[:block_pages]) == block
        rig.load(host[:block_pages], targets)
        assert block_of(rig.device(), targets) == block
        for source, page in zip(sources, host[block_pages:], strict=False):
            rig.load([page], [targets[0]])
            assert block_of(rig.device(), [targets[0]]) == block_of(content, [source]), f"host page {page} changed"

    @pytest.mark.parametrize("block_pages", [1, 2])
    def test_a_view_is_the_block(self, block_pages: int) -> None:
        """Where there is one: the memory itself, to read and to write."""
        rig = self.make(block_pages=block_pages)
        content = rig.device()
        for host in (list(range(4, 4 + block_pages)), rig.pages(block_pages, HOST_PAGES)):
            sources, targets = (rig.pages(block_pages, DEVICE_PAGES) for _ in range(2))
            rig.save(sources, host)
            view = rig.host.view_block(indices(host))
            if view is None:
                continue
            assert view.contiguous
            assert bytes(view) == block_of(content, sources), "it differs from the block format"
            rig.save(targets, host)
            assert bytes(view) == block_of(content, targets), "it does not show what was saved since"
            new = rig.random_block()
            view.cast("B")[:] = new
            rig.load(host, targets)
            assert block_of(rig.device(), targets) == new, "what is written to it is not written to the pages"
            assert rig.block(host) == new
            rig.put(content)

    # Together.

    def test_calls_beside_each_other(self) -> None:
        """On pages of their own, from a thread for each: as the mover and the forward pass make them."""
        rig = self.make(page_size=16)
        other = Rig(rig.host, torch.bfloat16, CPU, seed=1)
        rounds, together = 20, threading.Barrier(4, timeout=30)
        wanted, content = rig.fill_host(), rig.device()

        def repeat(call: Callable[[], None]) -> None:
            try:
                for _ in range(rounds):
                    together.wait()
                    call()
            except BaseException:
                together.abort()
                raise

        def save(sources: list[int], pages: list[int]) -> None:
            rig.save(sources, pages)
            for source, page in zip(sources, pages, strict=True):
                assert rig.block([page]) == block_of(content, [source]), f"host page {page} is wrong"

        def read_and_write() -> None:
            block = rig.draw.bytes(rig.host.block_bytes)
            rig.host.read_block(memoryview(block), indices([12]))
            assert rig.block([12]) == block

        calls: list[Callable[[], None]] = [
            lambda: save([1, 2, 3], [1, 2, 3]),
            lambda: save([4, 5, 6], [6, 5, 4]),
            lambda: other.load([7, 8, 9], [9, 1, 4]),
            read_and_write,
        ]
        with ThreadPoolExecutor(len(calls)) as threads:
            ends = [threads.submit(repeat, call) for call in calls]
        failures = [error for end in ends if (error := end.exception()) is not None]
        for error in sorted(failures, key=lambda one: isinstance(one, threading.BrokenBarrierError)):
            raise error  # not that others waited for it in vain
        for page, target in zip([7, 8, 9], [9, 1, 4], strict=True):
            assert block_of(other.device(), [target]) == wanted[page], f"device page {target} is wrong"

    @properties(max_examples=30)
    @given(data=st.data())
    def test_any_sequence_of_calls(self, data: st.DataObject) -> None:
        """Device and host hold what lists of bytes hold that are copied one by one."""
        page_size, block_pages = data.draw(st.sampled_from([(1, 4), (4, 1), (3, 2)]), "page size, pages of a block")
        dtype = data.draw(st.sampled_from(DTYPES), "dtype")
        rig = self.make(page_size=page_size, dtype=dtype, block_pages=block_pages)
        device = rig.device()
        host = [np.zeros((HOST_PAGES + 1, one.shape[1]), np.uint8) for one in device]
        for first in range(1, HOST_PAGES + 1, block_pages):
            pages = range(first, first + block_pages)
            rig.host.read_block(memoryview(bytes(rig.host.block_bytes)), indices(pages))
        for _ in range(data.draw(st.integers(1, 6), "calls")):
            call = data.draw(st.sampled_from(["save", "load", "read", "view"]), "call")
            count = block_pages if call in ("read", "view") else data.draw(st.integers(0, 8), "pages")
            there, here = rig.pages(count, HOST_PAGES), rig.pages(count, DEVICE_PAGES)
            if call == "save":
                rig.save(here, there)
                for one, other in zip(host, device, strict=True):
                    one[there] = other[here]
            elif call == "load":
                number = data.draw(st.integers(0, len(LAYERS) - 1), "layer")
                rig.host.load(rig.pool, LAYERS[number].layer_id, indices(there), indices(here))
                for part in range(2 * number, 2 * number + len(LAYERS[number].kept)):
                    device[part][here] = host[part][there]
            else:
                block = rig.random_block()
                view = rig.host.view_block(indices(there)) if call == "view" else None
                if view is None:
                    rig.host.read_block(memoryview(block), indices(there))
                else:
                    view.cast("B")[:] = block
                begin = 0
                for one in host:
                    stop = begin + block_pages * one.shape[1]
                    one[there] = np.frombuffer(block[begin:stop], np.uint8).reshape(block_pages, -1)
                    begin = stop
            assert_same(rig.device(), device, call)
        for first in range(1, HOST_PAGES + 1, block_pages):
            pages = range(first, first + block_pages)
            assert rig.block(pages) == block_of(host, pages), f"host pages {list(pages)} are wrong"
