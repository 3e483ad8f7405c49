"""`pegboard chat`: its commands with a scripted speaker, a server's events, and the real script with a tiny model."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pegboard.core.commands import chat
from pegboard.core.commands.chat import Conversation, read_question
from pegboard.core.commands.speakers import Answer, Figures, Piece, ServerSpeaker
from pegboard.core.interfaces.errors import InvalidRequest, PegboardError
from pegboard.core.testing.checkpoints import tiny_checkpoint


class Scripted:
    """Says the same pieces each time, and notes what it was asked."""

    name = "scripted"

    def __init__(self, *pieces: Piece | BaseException) -> None:
        self.pieces = pieces
        self.asked: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []
        self.closed = 0

    def answer(self, messages: Sequence[dict[str, Any]], params: Mapping[str, Any]) -> Answer:
        self.asked.append(([dict(one) for one in messages], dict(params)))
        return Answer(self._say(), Figures(prompt_tokens=7, new_tokens=3, finish_reason="stop"))

    def _say(self) -> Iterator[Piece]:
        try:
            for piece in self.pieces:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            self.closed += 1

    def close(self) -> None:
        pass


class Terminal:
    """A conversation, with what it showed and noted."""

    def __init__(self, *pieces: Piece | BaseException, **settings: Any) -> None:
        self.shown = ""
        self.notes: list[str] = []
        self.speaker = Scripted(*(pieces or (Piece("Hel"), Piece("lo."))))
        self.conversation = Conversation(
            self.speaker, show=self.show, notice=self.notes.append, dim=lambda text: f"<{text}>", **settings
        )

    def show(self, text: str) -> None:
        self.shown += text

    def type(self, *lines: str) -> bool:
        return all(self.conversation.handle(line) for line in lines)

    @property
    def messages(self) -> list[tuple[str, str]]:
        return [(one["role"], one["content"]) for one in self.conversation.messages]


class TestConversation:
    def test_questions_and_answers_make_the_history(self) -> None:
        terminal = Terminal(system="Be brief.", params={"temperature": 0.0})
        assert terminal.type("Hi", "  ", "And?")
        assert terminal.shown == "Hello.\nHello.\n"
        assert terminal.messages == [("user", "Hi"), ("assistant", "Hello."), ("user", "And?"), ("assistant", "Hello.")]
        messages, params = terminal.speaker.asked[1]
        assert [one["content"] for one in messages] == ["Be brief.", "Hi", "Hello.", "And?"]
        assert params == {"temperature": 0.0}

    def test_thinking_is_shown_dimmed_and_not_remembered(self) -> None:
        terminal = Terminal(Piece("hm", reasoning=True), Piece("Yes."))
        terminal.type("Is it?")
        assert terminal.shown == "<hm>Yes.\n"
        assert terminal.messages[-1] == ("assistant", "Yes.")

    def test_ctrl_c_keeps_what_was_said(self) -> None:
        terminal = Terminal(Piece("One, two"), KeyboardInterrupt())
        assert terminal.type("Count.")
        assert terminal.messages[-1] == ("assistant", "One, two")
        assert terminal.speaker.closed == 1
        assert "stopped" in terminal.notes[-1]

    def test_an_error_takes_the_question_back(self) -> None:
        terminal = Terminal(InvalidRequest("the engine is on fire", status=503))
        assert terminal.type("Hi")
        assert terminal.messages == []
        assert terminal.notes == ["error: the engine is on fire"]

    def test_a_full_context_says_what_to_do(self) -> None:
        terminal = Terminal(InvalidRequest("too long", code="context_length_exceeded"))
        terminal.type("Hi")
        assert "/reset" in terminal.notes[-1]

    def test_reset_undo_retry(self) -> None:
        terminal = Terminal()
        terminal.type("a", "b", "/undo")
        assert [one for _, one in terminal.messages] == ["a", "Hello."]
        terminal.type("/retry")
        assert [one for _, one in terminal.messages] == ["a", "Hello."]
        assert len(terminal.speaker.asked) == 3
        assert [one["content"] for one in terminal.speaker.asked[2][0]] == ["a"]
        terminal.type("/reset", "/undo", "/retry")
        assert terminal.messages == []
        assert terminal.notes[-2:] == ["there is nothing to forget", "nothing was asked yet"]

    def test_system_and_parameters(self) -> None:
        terminal = Terminal()
        terminal.type(
            "/system Speak French.", "/set temperature 0.5", "/set top_k 5", "Hi", "/system", "/set top_k", "Ho"
        )
        (first, params), (second, later) = terminal.speaker.asked
        assert first[0] == {"role": "system", "content": "Speak French."}
        assert params == {"temperature": 0.5, "top_k": 5}
        assert second[0]["role"] == "user"
        assert later == {"temperature": 0.5}

    @pytest.mark.parametrize(
        ("line", "note"),
        [
            ("/nope", "there is no /nope"),
            ("/set colour red", "/set takes temperature"),
            ("/set temperature warm", "'warm' is no number"),
            ("/stats", "nothing was answered yet"),
            ("/save", "/save FILE"),
            ("/load /no/such/file", "cannot be read"),
            ("/help", "/reset"),
        ],
    )
    def test_notes(self, line: str, note: str) -> None:
        terminal = Terminal()
        assert terminal.type(line)
        assert note in terminal.notes[-1]
        assert terminal.messages == []

    def test_stats_add_up(self) -> None:
        terminal = Terminal()
        terminal.type("a", "b", "/stats")
        assert "last: 7 prompt tokens" in terminal.notes[-1]
        assert "all 2: 14 prompt tokens, 6 new" in terminal.notes[-1]

    def test_save_and_load(self, tmp_path: Path) -> None:
        terminal = Terminal(system="S")
        terminal.type("a", f"/save {tmp_path / 'c.json'}")
        other = Terminal()
        other.type(f"/load {tmp_path / 'c.json'}")
        assert other.messages == terminal.messages
        assert other.conversation.system == "S"
        (tmp_path / "bad.json").write_text('{"messages": [{"role": 1}]}')
        other.type(f"/load {tmp_path / 'bad.json'}")
        assert "no saved conversation" in other.notes[-1]
        assert other.messages == terminal.messages

    @pytest.mark.parametrize("line", ["/quit", "/exit"])
    def test_the_end(self, line: str) -> None:
        assert not Terminal().type(line)


@pytest.mark.parametrize(
    ("lines", "question"),
    [
        (["one"], "one"),
        (["one \\", "two \\", "three"], "one \ntwo \nthree"),
        (["one\\"], "one\n"),
        (['"""', "one", "", "two", '"""'], "one\n\ntwo"),
        (["```", "never closed"], "never closed"),
    ],
)
def test_questions_of_several_lines(lines: list[str], question: str, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = iter(lines)

    def next_line(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", next_line)
    assert read_question("> ") == question


# ---- a server --------------------------------------------------------------------------------------

EVENTS = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"delta": {"reasoning_content": "so"}}]},
    {"choices": [{"delta": {"content": "Grüß "}}]},
    {"choices": [{"delta": {"content": "Gott"}, "finish_reason": "stop"}]},
    {
        "choices": [],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}},
    },
]


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    seen: list[tuple[str, dict[str, Any], str]] = []
    key = ""
    events: list[dict[str, Any]] = EVENTS
    cut = False

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as the base class has it
        pass

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "a-model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.seen.append((self.path, body, self.headers.get("authorization", "")))
        if self.key and self.headers.get("authorization") != f"Bearer {self.key}":
            self._answer({"error": {"message": "no key", "code": "no_key"}}, 401)
            return
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        data = b"".join(b"data: " + json.dumps(one, ensure_ascii=False).encode() + b"\n\n" for one in self.events)
        data += b"data: [DONE]\n\n"
        for at in range(0, len(data), 7):
            piece = data[at : at + 7]
            self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            if self.cut and at > 100:
                self.close_connection = True
                return
        self.wfile.write(b"0\r\n\r\n")

    def _answer(self, value: Any, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server() -> Iterator[tuple[str, type[Handler]]]:
    kind = type("OneHandler", (Handler,), {"seen": []})
    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=served.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{served.server_address[1]}", kind
    served.shutdown()
    served.server_close()


class TestServer:
    def test_a_stream_is_read_however_it_is_cut(self, server: tuple[str, type[Handler]]) -> None:
        url, handler = server
        speaker = ServerSpeaker(f"{url}/v1/")
        assert speaker.name == "a-model"
        answer = speaker.answer([{"role": "user", "content": "Hi"}], {"temperature": 0.0})
        assert list(answer.pieces) == [Piece("so", True), Piece("Grüß "), Piece("Gott")]
        figures = answer.figures
        assert (figures.prompt_tokens, figures.cached_tokens, figures.new_tokens) == (5, 4, 2)
        assert figures.finish_reason == "stop"
        path, body, _ = handler.seen[0]
        assert path == "/v1/chat/completions"
        assert body["stream"] is True
        assert body["temperature"] == 0.0

    def test_a_key_is_sent_and_its_lack_explained(self, server: tuple[str, type[Handler]]) -> None:
        url, handler = server
        handler.key = "secret"
        with pytest.raises(PegboardError, match=r"no key .*--api-key"):
            list(ServerSpeaker(url).answer([], {}).pieces)
        assert list(ServerSpeaker(url, "secret").answer([], {}).pieces)

    def test_an_error_in_the_stream(self, server: tuple[str, type[Handler]]) -> None:
        url, handler = server
        handler.events = [EVENTS[2], {"error": {"message": "the engine died", "code": "engine_failed"}}]
        pieces = ServerSpeaker(url).answer([], {}).pieces
        assert next(pieces) == Piece("Grüß ")
        with pytest.raises(PegboardError, match="the engine died"):
            next(pieces)

    def test_a_server_that_breaks_off(self, server: tuple[str, type[Handler]]) -> None:
        url, handler = server
        handler.cut = True
        with pytest.raises(PegboardError, match="broke off"):
            list(ServerSpeaker(url).answer([], {}).pieces)

    def test_nobody_there(self) -> None:
        with pytest.raises(PegboardError, match="does not answer"):
            ServerSpeaker("http://127.0.0.1:9")

    @pytest.mark.parametrize("url", ["ftp://x", "http://", "://"])
    def test_no_address(self, url: str) -> None:
        with pytest.raises(PegboardError, match="is no address such as"):
            ServerSpeaker(url)


# ---- the real thing --------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama")
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return directory


def test_a_pipe_in_and_a_pipe_out(model: Path) -> None:
    """Answers only go to stdout, notes to stderr; nothing asks for a terminal."""
    script = Path(sys.executable).parent / "pegboard"
    done = subprocess.run(
        [
            *(script, "chat", "--set", f"model.path={model}", "--set", "model.dtype=float32"),
            *("--set", "memory.max_total_tokens=2048", "--max-tokens", "5", "--temperature", "0"),
        ],
        input="Hi\n/stats\nAgain\n/quit\nnever\n",
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") >= 2
    assert "5 new" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_config_file_beside_a_url_is_refused() -> None:
    with pytest.raises(PegboardError, match="leave the config files out"):
        chat._server("http://127.0.0.1:9", "", "", [Path("x.yaml")])
