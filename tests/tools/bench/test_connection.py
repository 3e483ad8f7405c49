"""The HTTP client against servers that send known bytes, cut anywhere, and servers that do not behave."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from pegboard.core.interfaces.errors import PegboardError
from pegboard.tools.bench.apis import APIS, Wanted
from pegboard.tools.bench.connection import Address, HttpClient, RequestFailed, Unreachable
from pegboard.tools.bench.records import Record

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def with_server(script: Script, ask: Callable[[HttpClient], Awaitable[Any]], **options: Any) -> Any:
    """What `ask` returns of a client of a server that runs `script` per connection."""

    async def main() -> Any:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await script(reader, writer)
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = HttpClient(Address("127.0.0.1", server.sockets[0].getsockname()[1]), **options)
        try:
            return await ask(client)
        finally:
            client.close()
            server.close()
            await asyncio.sleep(0)

    return asyncio.run(main())


async def request_of(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return head + await reader.readexactly(length)


def answering(*parts: bytes, close: bool = True) -> Script:
    """Sends these parts one by one."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                await request_of(reader)
            except asyncio.IncompleteReadError:
                return
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
            if close:
                return

    return script


async def whole(client: HttpClient) -> tuple[int, dict[str, str], bytes]:
    return await client.whole("GET", "/x")


def pieces(data: bytes, seed: int, count: int = 12) -> Sequence[bytes]:
    rng = random.Random(seed)
    edges = [0, *sorted(rng.randrange(len(data)) for _ in range(count)), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges) if start < end]


CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n7;ext=1\r\n, world\r\n0\r\n\r\n"
)


class TestFraming:
    @pytest.mark.parametrize("seed", range(20))
    def test_chunks_cut_anywhere(self, seed: int) -> None:
        status, headers, data = with_server(answering(*pieces(CHUNKED, seed)), whole)
        assert (status, headers["content-type"], data) == (200, "text/plain", b"hello, world")

    def test_a_length(self) -> None:
        sent = b"HTTP/1.1 404 Not Found\r\ncontent-length: 4\r\n\r\nnope"
        assert with_server(answering(sent), whole) == (404, {"content-length": "4"}, b"nope")

    def test_an_answer_that_ends_with_the_connection(self) -> None:
        sent = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n", b"all", b" of it"
        assert with_server(answering(*sent), whole)[2] == b"all of it"

    def test_connections_are_used_again(self) -> None:
        opened = []
        inner = answering(CHUNKED, close=False)

        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            opened.append(1)
            await inner(reader, writer)

        async def ask(client: HttpClient) -> Any:
            return [await whole(client) for _ in range(3)]

        assert [data for _, _, data in with_server(script, ask)] == [b"hello, world"] * 3
        assert len(opened) == 1

    def test_one_that_was_closed_meanwhile_is_opened_anew(self) -> None:
        """The server ends each connection behind its first answer, without having said so."""

        async def ask(client: HttpClient) -> Any:
            found = []
            for _ in range(3):
                found.append(await whole(client))
            return found

        async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await request_of(reader)
            writer.write(CHUNKED)
            # Closes only when the next request is there.
            await reader.read(1)

        assert len(with_server(once, ask)) == 3

    def test_what_is_sent(self) -> None:
        seen = []

        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.append(await request_of(reader))
            writer.write(CHUNKED)

        async def ask(client: HttpClient) -> Any:
            return await client.whole("POST", "/v1/x", b"{}")

        with_server(script, ask, api_key="sk-1")
        head, _, body = seen[0].partition(b"\r\n\r\n")
        assert body == b"{}"
        assert head.startswith(b"POST /v1/x HTTP/1.1\r\nhost: 127.0.0.1:")
        assert b"\r\nauthorization: Bearer sk-1\r\n" in head


class TestFaults:
    def failing(self, script: Script, **options: Any) -> str:
        with pytest.raises(RequestFailed) as caught:
            with_server(script, whole, **options)
        return str(caught.value)

    def test_it_breaks_off(self) -> None:
        assert "broke off in the middle" in self.failing(answering(CHUNKED[:-10]))

    def test_it_says_nothing(self) -> None:
        assert "closed the connection without an answer" in self.failing(answering())

    def test_it_speaks_something_else(self) -> None:
        assert "not HTTP/1.1" in self.failing(answering(b"SSH-2.0-OpenSSH_9.2\r\n"))

    def test_it_is_silent(self) -> None:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()

        async def ask(client: HttpClient) -> Any:
            task = asyncio.ensure_future(whole(client))
            while not task.done():
                await asyncio.sleep(0.01)
                client.expire()
            return await task

        with pytest.raises(RequestFailed, match=r"not a byte within 0\.05 s"):
            with_server(script, ask, timeout=0.05)

    def test_nobody_is_there(self) -> None:
        async def ask() -> Any:
            server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            server.close()
            await server.wait_closed()
            return await HttpClient(Address("127.0.0.1", port)).whole("GET", "/")

        with pytest.raises(Unreachable, match=r"nothing listens at http://127\.0\.0\.1:"):
            asyncio.run(ask())


class TestAddress:
    @pytest.mark.parametrize(
        ("url", "shown", "base"),
        [
            ("http://127.0.0.1:30000", "http://127.0.0.1:30000", ""),
            ("localhost:8000/v1", "http://localhost:8000", ""),
            ("https://a.example/llm/v1/", "https://a.example/llm", "/llm"),
            ("http://[::1]:80", "http://[::1]", ""),
        ],
    )
    def test_urls(self, url: str, shown: str, base: str) -> None:
        address = Address.parse(url)
        assert (str(address), address.base) == (shown, base)

    @pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:99999", "http://x?y", ""])
    def test_what_is_none(self, url: str) -> None:
        with pytest.raises(PegboardError, match=r"--url: .* is not an address"):
            Address.parse(url)

    def test_a_key_that_is_none(self) -> None:
        with pytest.raises(PegboardError, match="characters that a key cannot have"):
            HttpClient(Address("x", 1), "a\nb")


def stream(*events: str) -> bytes:
    body = "".join(f"data: {event}\n\n" for event in events).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


def plain(status: int, body: str) -> bytes:
    return f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()


def read(api: str, data: bytes, *, keep: bool = False, seed: int = 0, output_len: int = 0) -> tuple[Record, Any]:
    """The record of an answer, which comes in pieces."""
    record = Record(0, output_len=output_len)

    async def ask(client: HttpClient) -> Any:
        reader = APIS[api].reader(record, keep=keep)
        await client.send(client.request("POST", "/"), reader)
        reader.finish()
        return reader

    return record, with_server(answering(*pieces(data, seed, 5)), ask)


class TestReaders:
    def test_completions(self) -> None:
        data = stream(
            '{"choices":[{"index":0,"text":" a","finish_reason":null}],"usage":null}',
            '{"choices": [{"text": ""}]}',
            '{"choices": [{"text": " b c", "finish_reason": "length"}]}',
            '{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":4}}}',
            "[DONE]",
        )
        for seed in range(10):
            record, reader = read("openai", data, keep=True, seed=seed)
            assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (7, 3, 4)
            assert (record.counted, record.finish_reason, len(record.times)) == ("usage", "length", 2)
            assert "".join(reader.text) == " a b c"
            assert record.times == sorted(record.times)

    def test_chats(self) -> None:
        """A role is not a token; a thought is."""
        data = stream(
            '{"choices":[{"delta":{"role":"assistant","content":""}}]}',
            '{"choices":[{"delta":{"reasoning_content":"hm"}}]}',
            '{"choices":[{"delta":{"content":"yes"}}]}',
            '{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}',
            '{"choices":[{"delta":{},"finish_reason":"stop"}]}',
            "[DONE]",
        )
        record, _ = read("openai-chat", data)
        assert (len(record.times), record.output_tokens, record.counted) == (3, 3, "chunks")

    def test_nobody_counts_but_the_length_is_known(self) -> None:
        data = stream(
            '{"choices":[{"text":" a b c"}]}', '{"choices":[{"text":" d","finish_reason":"length"}]}', "[DONE]"
        )
        record, _ = read("openai", data, output_len=9)
        assert (record.output_tokens, record.counted) == (9, "limit")

    def test_native(self) -> None:
        def event(count: int, reason: str) -> str:
            meta = f'"prompt_tokens":5,"completion_tokens":{count},"cached_tokens":2,"finish_reason":{reason}'
            return f'{{"text":"{"x" * count}","output_ids":{list(range(count))},"meta_info":{{{meta}}}}}'

        data = stream(event(1, "null"), event(4, "null"), event(5, '{"type":"length","length":5}'), "[DONE]")
        record, reader = read("native", data, keep=True)
        assert (record.counts, record.output_tokens, record.cached_tokens) == ([1, 3, 1], 5, 2)
        assert (reader.ids, reader.text) == ([0, 1, 2, 3, 4], ["xxxxx"])

    @pytest.mark.parametrize(
        ("api", "data", "problem"),
        [
            ("openai", stream('{"choices":[{"text":"a"}]}'), "the stream ended before the answer did"),
            ("openai", stream("[DONE]"), "the stream ended before the answer did"),
            ("openai", stream('{"error":{"message":"out of memory"}}', "[DONE]"), "out of memory"),
            ("openai", stream('{"choices": 5}'), "an event cannot be read"),
            ("openai", stream("oops"), "an event cannot be read"),
            ("openai", stream('{"choices":[{"text":"a","finish_reason":"abort"}]}'), "ended the answer: abort"),
            ("native", stream('{"error":{"message":"late"}}'), "late"),
            (
                "native",
                stream('{"meta_info":{"completion_tokens":1,"finish_reason":{"type":"abort","message":"gone"}}}'),
                "gone",
            ),
            ("openai", plain(200, "{}"), "the answer is not an event stream"),
            ("openai", plain(503, '{"error":{"message":"the queue is full"}}'), "status 503: the queue is full"),
            ("openai", plain(422, '{"detail": [{"msg": "no"}]}'), "status 422: [{'msg': 'no'}]"),
            ("native", plain(500, "<html>\nOops"), "status 500: <html> Oops"),
        ],
    )  # fmt: skip
    def test_what_is_no_answer(self, api: str, data: bytes, problem: str) -> None:
        with pytest.raises(RequestFailed) as caught:
            read(api, data)
        assert problem in str(caught.value)


def test_further_fields_go_into_the_body() -> None:
    wanted = Wanted("m", extra={"top_p": 0.5, "sampling_params": {"top_k": 3}})
    native = APIS["native"].encode([1], 4, wanted)
    assert b'"sampling_params":{"max_new_tokens":4,"temperature":0.0,"ignore_eos":true,"top_k":3}' in native
    assert b'"top_p":0.5' in APIS["openai"].encode("x", 4, wanted)
