import psutil

from pegboard.toolkit.system.memory import large_buffer


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
