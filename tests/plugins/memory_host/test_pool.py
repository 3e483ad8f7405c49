"""What is these pools' own: their layouts, how they refuse, and memory that is pinned for a GPU."""

from __future__ import annotations

import contextlib
import gc
import logging

import psutil
import pytest
import torch

from pegboard.conformance.attention.batches import make_layer
from pegboard.conformance.rig.paged import PlainPool
from pegboard.core.interfaces.kv_pool import KVPoolContext
from pegboard.core.interfaces.layers import LayerSpec
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.kv_tiers.api import HostPoolContext
from pegboard.plugins.memory_host.pool import LayerFirst, PagedHostPool, PageFirst

CPU = torch.device("cpu")
LAYERS = (make_layer(4, 2, 8), make_layer(4, 1, 16, 4, layer_id=3))
BOTH = pytest.mark.parametrize("cls", [LayerFirst, PageFirst])


def make(
    cls: type[PagedHostPool],
    page_size: int = 4,
    block_pages: int = 1,
    layers: tuple[LayerSpec, ...] = LAYERS,
    device: torch.device = CPU,
    pages: int = 64,
) -> PagedHostPool:
    return cls(NoOptions(), HostPoolContext(pages, page_size, layers, torch.bfloat16, device, block_pages))


def block(pool: PagedHostPool, pages: torch.Tensor) -> bytes:
    out = bytearray(pool.block_bytes)
    pool.write_block(pages, memoryview(out))
    return bytes(out)


def random_block(pool: PagedHostPool) -> bytes:
    return torch.randint(0, 256, (pool.block_bytes,), dtype=torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_what_one_layout_writes_the_other_reads(page_size: int) -> None:
    """With any page size: the same tokens are in the same slots of the device."""
    writer, reader = make(LayerFirst, 16, 4), make(PageFirst, page_size, 64 // page_size)
    here, there = torch.tensor([7, 2, 9, 4]), torch.randperm(64)[: reader.block_pages] + 1
    written = random_block(writer)
    writer.read_block(memoryview(written), here)
    reader.read_block(memoryview(block(writer, here)), there)
    assert block(reader, there) == written
    pools = [
        PlainPool(NoOptions(), KVPoolContext(128 // one, one, LAYERS, torch.bfloat16, CPU)) for one in (16, page_size)
    ]
    for host, pool, pages in ((writer, pools[0], here), (reader, pools[1], there)):
        first = 64 // host.page_size
        for layer in LAYERS:
            host.load(pool, layer.layer_id, pages, torch.arange(first, 2 * first))
    for layer in LAYERS:
        for one, other in ((pools[0].keys, pools[1].keys), (pools[0].values, pools[1].values)):
            left, right = (buffer(layer.layer_id)[64:128].view(torch.uint8) for buffer in (one, other))
            assert torch.equal(left, right)


@pytest.mark.parametrize(
    ("cls", "block_pages", "shown"), [(PageFirst, 1, True), (PageFirst, 2, False), (LayerFirst, 1, False)]
)
def test_blocks_of_one_page_are_shown(cls: type[PagedHostPool], block_pages: int, shown: bool) -> None:
    """Neighbouring pages are no block: theirs has the layers outermost, and memory has the pages."""
    view = make(cls, block_pages=block_pages).view_block(torch.arange(3, 3 + block_pages))
    assert (view is not None) == shown


@BOTH
def test_wrong_calls_raise(cls: type[PagedHostPool]) -> None:
    """And touch nothing: a negative index would be a page from the end, and one page would do for many."""
    host = make(cls, block_pages=2)
    pool = PlainPool(NoOptions(), KVPoolContext(8, 4, LAYERS, torch.bfloat16, CPU))
    one, two = torch.tensor([1]), torch.tensor([1, 2])
    for wrong in (0, -1, 65):
        with pytest.raises(IndexError, match=f"host pages run from 1 to 64, not from {wrong}"):
            host.save(pool, one, torch.tensor([wrong]))
    for wrong in (-1, 9):
        with pytest.raises(IndexError, match=f"device pages run from 0 to 8, not from {wrong}"):
            host.load(pool, 0, one, torch.tensor([wrong]))
    with pytest.raises(ValueError, match="1 device pages cannot be copied to or from 2 host pages"):
        host.save(pool, one, two)
    with pytest.raises(ValueError, match=r"a block has 2 pages, not \[1\]"):
        host.read_block(memoryview(bytes(host.block_bytes)), one)
    with pytest.raises(ValueError, match=f"a block has {host.block_bytes} bytes, not 5"):
        host.write_block(two, memoryview(bytearray(5)))
    assert not any(buffer.data.any() for buffer in host.buffers)


@BOTH
def test_layers_that_cannot_be_held(cls: type[PagedHostPool]) -> None:
    with pytest.raises(ValueError, match="two layers have the id 3"):
        make(cls, layers=(LAYERS[1], LAYERS[0], LAYERS[1]))
    context = HostPoolContext(1, 1, (LAYERS[0], make_layer(dim=8, v_dim=0, layer_id=5)), torch.bfloat16, CPU)
    assert cls.supports(NoOptions(), context) == "layer 5 has no K or no V"


@BOTH
def test_closing_gives_memory_back(cls: type[PagedHostPool]) -> None:
    process = psutil.Process()
    host = make(cls, pages=2**15)
    before = process.memory_info().rss
    for buffer in host.buffers:
        buffer.data.fill_(1)
    del buffer
    written = process.memory_info().rss
    assert written - before > host.nbytes // 2 > 2**22
    size = host.nbytes
    host.close()
    gc.collect()
    assert written - process.memory_info().rss > size // 2
    assert host.nbytes == 0


class Runtime:
    """The part of CUDA that pins memory."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        if not self.error:
            self.pinned[address] = nbytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0


@BOTH
def test_memory_is_pinned_for_a_gpu(cls: type[PagedHostPool], monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    host = make(cls, device=torch.device("cuda"))
    assert runtime.pinned == {buffer.data.data_ptr(): buffer.nbytes for buffer in host.buffers}
    assert sum(runtime.pinned.values()) == host.nbytes
    host.close()
    assert not runtime.pinned
    host.close()


def test_memory_is_unpinned_when_the_pool_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found on a GPU: the system gives the addresses to the next buffer, which then could not be pinned."""
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    host = make(PageFirst, device=torch.device("cuda"))
    assert runtime.pinned
    del host
    gc.collect()
    assert not runtime.pinned


def test_memory_that_cannot_be_pinned_will_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Found on a GPU: CUDA keeps the error until a call looks at it, which would be some step's."""
    runtime, looked = Runtime(error=2), []

    def zeros(*args: object, device: object) -> None:
        looked.append(device)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch, "zeros", zeros)
    with caplog.at_level(logging.WARNING):
        host = make(PageFirst, device=torch.device("cuda"))
    assert "could not be pinned (CUDA error 2)" in caplog.text
    assert looked == [torch.device("cuda")] * len(host.buffers)
    host.close()


@BOTH
def test_a_cpu_needs_no_cuda(cls: type[PagedHostPool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even to ask; and torch's threads, which the forward pass has set, stay as they are."""
    for name in ("cudart", "device", "is_available", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, None)
    threads = torch.get_num_threads()
    host, pool = make(cls), PlainPool(NoOptions(), KVPoolContext(8, 4, LAYERS, torch.bfloat16, CPU))
    host.save(pool, torch.tensor([1]), torch.tensor([2]))
    host.load(pool, 3, torch.tensor([2]), torch.tensor([4]))
    host.close()
    assert torch.get_num_threads() == threads


@BOTH
def test_memory_comes_when_it_is_prepared(cls: type[PagedHostPool]) -> None:
    """And only the first pages, where there is no time for more."""
    layer = LayerSpec(layer_id=0, num_heads=4, num_kv_heads=4, qk_head_dim=512, v_head_dim=512, scale=1.0)
    process = psutil.Process()
    before = process.memory_info().rss
    pool = make(cls, page_size=1, layers=(layer,), pages=8192)  # 64 MiB
    assert pool.prepare(0.0) == 0
    assert process.memory_info().rss - before < 16 * 2**20
    assert pool.prepare(60.0) == pool.num_pages == 8192
    assert process.memory_info().rss - before > 48 * 2**20
