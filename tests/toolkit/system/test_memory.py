import psutil
import torch

from pegboard.toolkit.system.memory import give_back, large_buffer, trim


def test_it_takes_nothing_before_it_is_written_to() -> None:
    process, size = psutil.Process(), 64 * 2**20
    before = process.memory_info().rss
    buffer = large_buffer(size)
    assert (buffer.nbytes, buffer.data_ptr() % 2**21) == (size, 0)
    assert process.memory_info().rss - before < size // 4
    buffer.fill_(7)
    assert process.memory_info().rss - before > size * 3 // 4


def test_what_was_not_written_is_zero() -> None:
    first, second = large_buffer(5), large_buffer(5)
    first.fill_(255)
    assert second.tolist() == [0] * 5


def test_it_is_given_back() -> None:
    """At the same address, as zeros; what lies beside it stays, and it can be written to again."""
    process, size = psutil.Process(), 64 * 2**20 + 5
    beside = [large_buffer(3 * 4096), large_buffer(3 * 4096)]
    buffer = large_buffer(size)
    for one in (buffer, *beside):
        one.fill_(7)
    before, address = process.memory_info().rss, buffer.data_ptr()
    assert give_back(buffer.view(torch.int8)) == size
    assert before - process.memory_info().rss > size * 9 // 10
    assert buffer.data_ptr() == address
    assert not buffer.any()
    assert all(bool((one == 7).all()) for one in beside)
    buffer.fill_(3)
    assert bool((buffer == 3).all())


def test_what_was_freed_is_given_back() -> None:
    process = psutil.Process()
    blocks = [torch.ones(50_000, dtype=torch.uint8) for _ in range(1000)]
    before = process.memory_info().rss
    del blocks
    trim()
    assert before - process.memory_info().rss > 40_000_000
