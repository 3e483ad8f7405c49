"""`pegboard chat`: its commands with a scripted speaker, a server's events, pipes, and Ctrl-C on a real terminal."""

from __future__ import annotations

import contextlib
import fcntl
import http.server
import io
import json
import os
import pty
import re
import select
import signal
import socket
import stat
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.cli.main import app
from pegboard.core.config.compose import compose
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.errors import InvalidRequest, PegboardError
from pegboard.tools.chat.backends import EngineSpeaker, Figures, Message, Piece, ServerSpeaker
from pegboard.tools.chat.server_client import ServerClient
from pegboard.tools.chat.session import SETTINGS, Session
from pegboard.tools.chat.terminal import Terminal

SCRIPT = Path(sys.executable).parent / "pegboard"


class Scripted:
    """Says the same pieces each time, and notes what it was asked."""

    name = "scripted"

    def __init__(self, *pieces: Piece | BaseException) -> None:
        self.pieces = pieces
        self.asked: list[tuple[list[Message], dict[str, Any]]] = []
        self.closed = 0
        self.finish_reason = "stop"

    def answer(self, messages: Sequence[Message], settings: Mapping[str, Any], figures: Figures) -> Iterator[Piece]:
        self.asked.append(([dict(one) for one in messages], dict(settings)))
        try:
            for piece in self.pieces:
                if isinstance(piece, BaseException):
                    raise piece
                figures.tick(1)
                yield piece
            figures.prompt_tokens, figures.cached_tokens, figures.completion_tokens = 7, 3, 5
            figures.finish_reason = self.finish_reason
        finally:
            self.closed += 1

    def close(self) -> None:
        pass


class Screen(Terminal):
    """A terminal whose output is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.interactive = True
        self.shown = ""
        self.notes: list[str] = []

    def think(self, text: str) -> None:
        self.shown += f"<{text}>"

    def say(self, text: str) -> None:
        self.shown += text

    def end_answer(self) -> None:
        self.shown += "|"

    def note(self, text: str) -> None:
        self.notes.append(text)


class Chat:
    """A session with a scripted speaker."""

    def __init__(self, *pieces: Piece | BaseException, **options: Any) -> None:
        self.screen = Screen()
        self.speaker = Scripted(*(pieces or (Piece("Hel"), Piece("lo."))))
        self.session = Session(self.speaker, self.screen, **options)

    def type(self, *texts: str) -> bool:
        return all(self.session.handle(text) for text in texts)

    @property
    def messages(self) -> list[tuple[str, str]]:
        return [(one["role"], one["content"]) for one in self.session.messages]

    @property
    def last_asked(self) -> list[str]:
        return [one["content"] for one in self.speaker.asked[-1][0]]


class TestAttached:
    """Pictures and videos that go with a message."""

    @pytest.fixture
    def picture(self, tmp_path: Path) -> Path:
        path = tmp_path / "a cat.png"
        path.write_bytes(b"\x89PNG")
        return path

    IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw=="}}

    def test_they_go_with_the_next_message_alone(self, picture: Path) -> None:
        chat = Chat()
        chat.type(f"/image {picture}", f"/video {picture}", "What is it?", "And now?")
        asked = chat.speaker.asked[0][0][-1]["content"]
        assert asked[0] == self.IMAGE
        assert asked[1]["video_url"]["url"].startswith("data:image/png;base64,")
        assert asked[2:] == [{"type": "text", "text": "What is it?"}]
        assert chat.last_asked[-1] == "And now?"
        assert chat.screen.notes == ["a cat.png goes with your next message"] * 2
        chat.type("/show")
        assert "[picture] [video] What is it?" in chat.screen.shown

    def test_they_may_be_forgotten(self, picture: Path) -> None:
        chat = Chat()
        chat.type(f"/image {picture}", "/image -", "Hi", f"/image {picture}", "/reset", "Ho")
        assert chat.messages == [("user", "Ho"), ("assistant", "Hello.")]

    def test_a_message_that_failed_is_sent_again_with_them(self, picture: Path) -> None:
        chat = Chat(InvalidRequest("not now", status=503))
        chat.type(f"/image {picture}", "What?")
        chat.speaker.pieces = (Piece("A cat."),)
        chat.type("/retry")
        assert chat.session.messages[0]["content"] == [self.IMAGE, {"type": "text", "text": "What?"}]

    def test_they_are_saved_and_loaded(self, picture: Path, tmp_path: Path) -> None:
        chat = Chat()
        chat.type(f"/image {picture}", "What?", f"/save {tmp_path / 'chat.json'}")
        other = Chat()
        other.type(f"/load {tmp_path / 'chat.json'}")
        assert other.session.messages == chat.session.messages

    @pytest.mark.parametrize(
        ("command", "said"),
        [
            ("/image", "/image needs the name of a file"),
            ("/image /nowhere/a.png", "cannot be read: No such file"),
            ("/video /tmp", "cannot be read: Is a directory"),
            ("/image http://example.com/a.png", "/image takes files only, and no address such as 'http://e"),
            (f"/image data:image/png;base64,{'A' * 9000}", "/image takes files only, and no address such as 'data:"),
        ],
    )
    def test_what_cannot_be_attached(self, command: str, said: str) -> None:
        chat = Chat()
        chat.type(command, "Hi")
        assert said in chat.screen.notes[0]
        assert chat.messages == [("user", "Hi"), ("assistant", "Hello.")]

    @pytest.mark.parametrize("code", ["invalid_media", "media_too_large"])
    def test_a_file_that_is_no_picture_is_named(self, code: str, picture: Path, tmp_path: Path) -> None:
        readme = tmp_path / "README.md"
        readme.write_text("# Hello")
        chat = Chat(InvalidRequest("this is no picture", code=code))
        chat.type(f"/image {picture}", f"/image {readme}", "What?", "/retry", "/undo", "And?")
        told = "error: this is no picture"
        assert [one for one in chat.screen.notes if one.startswith("error")] == [
            f"{told} (attached: a cat.png, README.md)",
            f"{told} (attached: a cat.png, README.md)",
            told,
        ]

    def test_an_empty_file_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "none.png").touch()
        chat = Chat()
        chat.type(f"/image {tmp_path / 'none.png'}")
        assert "is empty" in chat.screen.notes[0]


class TestSession:
    def test_messages_and_answers_make_the_history(self) -> None:
        chat = Chat(system="Be brief.", settings={"temperature": 0.0})
        assert chat.type("Hi", "  ", "And?")
        assert chat.screen.shown == "Hello.|Hello.|"
        assert chat.messages == [("user", "Hi"), ("assistant", "Hello."), ("user", "And?"), ("assistant", "Hello.")]
        assert chat.last_asked == ["Be brief.", "Hi", "Hello.", "And?"]
        assert chat.speaker.asked[1][1] == {"temperature": 0.0}

    def test_thinking_is_shown_and_not_remembered(self) -> None:
        chat = Chat(Piece("hm", reasoning=True), Piece("Yes."))
        chat.type("Is it?")
        assert chat.screen.shown == "<hm>Yes.|"
        assert chat.messages[-1] == ("assistant", "Yes.")

    def test_an_answer_that_is_stopped_keeps_what_was_said(self) -> None:
        chat = Chat(Piece("One, two"), KeyboardInterrupt())
        assert chat.type("Count.")
        assert chat.messages[-1] == ("assistant", "One, two")
        assert chat.speaker.closed == 1
        assert chat.screen.notes == ["(stopped)"]

    def test_one_that_is_stopped_before_it_began_can_be_asked_for_again(self) -> None:
        chat = Chat(Piece("hm", reasoning=True), KeyboardInterrupt())
        chat.type("Count.")
        assert chat.messages == []
        chat.speaker.pieces = (Piece("One."),)
        chat.type("/retry")
        assert chat.messages == [("user", "Count."), ("assistant", "One.")]

    def test_in_a_pipe_an_interrupt_ends_it(self) -> None:
        chat = Chat(KeyboardInterrupt())
        chat.screen.interactive = False
        with pytest.raises(KeyboardInterrupt):
            chat.type("Hi")

    def test_an_error_leaves_the_conversation_as_it_was(self) -> None:
        chat = Chat()
        chat.type("a")
        before = chat.messages
        chat.speaker.pieces = (InvalidRequest("the engine is on fire", status=503),)
        assert chat.type("b")
        assert chat.messages == before
        assert chat.screen.notes == ["error: the engine is on fire"]
        assert chat.session.failed == 1
        chat.type("/undo", "/retry")
        assert chat.messages == before, "an answer that cannot be had again is kept"
        chat.speaker.pieces = (Piece("Now."),)
        chat.type("b", "/retry")
        assert chat.messages == [*before, ("user", "b"), ("assistant", "Now.")]

    def test_a_full_context_says_what_to_do_and_that_works(self) -> None:
        chat = Chat()
        chat.type("a", "b", "c")
        chat.speaker.pieces = (InvalidRequest("too long", code="context_length_exceeded"),)
        chat.type("d")
        assert "/drop" in chat.screen.notes[-1]
        assert "/reset" in chat.screen.notes[-1]
        chat.speaker.pieces = (Piece("At last."),)
        chat.type("/drop", "/retry")
        assert chat.messages == [("user", "c"), ("assistant", "Hello."), ("user", "d"), ("assistant", "At last.")]

    @pytest.mark.parametrize(("settings", "why"), [({"max_tokens": 5}, "after 5 tokens"), ({}, "context is full")])
    def test_why_an_answer_is_cut_off(self, settings: dict[str, Any], why: str) -> None:
        chat = Chat(settings=settings)
        chat.speaker.finish_reason = "length"
        chat.type("a")
        assert why in chat.screen.notes[-1]

    def test_reset_undo_retry_drop(self) -> None:
        chat = Chat()
        chat.type("a", "b", "/undo")
        assert chat.messages == [("user", "a"), ("assistant", "Hello.")]
        chat.type("/retry")
        assert chat.messages == [("user", "a"), ("assistant", "Hello.")]
        assert len(chat.speaker.asked) == 3
        assert chat.last_asked == ["a"]
        chat.type("b", "c", "/drop 2")
        assert [text for _, text in chat.messages] == ["c", "Hello."]
        chat.type("/drop 9")
        assert chat.messages == []
        chat.type("d", "/reset", "/undo", "/retry", "/drop", "/drop x")
        assert chat.messages == []
        assert chat.screen.notes[-4:] == [
            "error: there is nothing to forget",
            "error: nothing was asked yet",
            "error: there is nothing to forget",
            "error: /drop takes a number of messages, not 'x'",
        ]

    def test_the_system_message(self) -> None:
        chat = Chat()
        chat.type("/system Speak French.\nAlways.", "Hi", "/system", "/system -", "Ho")
        assert chat.speaker.asked[0][0][0] == {"role": "system", "content": "Speak French.\nAlways."}
        assert chat.screen.notes[1] == "system: Speak French.\nAlways."
        assert chat.last_asked == ["Hi", "Hello.", "Ho"]

    def test_settings(self) -> None:
        chat = Chat()
        chat.type("/set temperature 0.5", "/set top_k=5", '/set stop ["a", "b"]', "/set reasoning_effort none", "Hi")
        expected = {"temperature": 0.5, "top_k": 5, "stop": ["a", "b"], "reasoning_effort": "none"}
        assert chat.speaker.asked[0][1] == expected
        chat.type("/set top_k -", "/set stop END", "/set temperature")
        assert chat.session.settings == {"temperature": 0.5, "stop": ["END"], "reasoning_effort": "none"}
        assert chat.screen.notes[-3:] == ["top_k: the default", 'stop: ["END"]', "temperature: 0.5"]
        chat.screen.notes.clear()
        chat.type("/set")
        assert [one.partition(":")[0] for one in chat.screen.notes] == list(SETTINGS)

    @pytest.mark.parametrize(
        ("line", "note"),
        [
            ("/hlep", "there is no command /hlep; did you mean 'help'?"),
            ("/etc/passwd", "// begins a message with a slash"),
            ("/set colour red", "error: there is no setting 'colour'"),
            ("/set temprature 1", "did you mean 'temperature'?"),
            ("/set temperature warm", "error: temperature must be a number, 0 is greedy, not 'warm'"),
            ("/set temperature 1000", "error: temperature must be at least 0 and at most 100"),
            ("/set max_tokens 0", "error: max_tokens must be a whole number from 1"),
            ("/set reasoning_effort huge", "error: reasoning_effort must be none or low"),
            ("/set stop [1]", "error: stop must be a text, or a JSON list of texts"),
            ("/stats", "error: nothing was answered yet"),
            ("/show", "nothing was said yet"),
            ("/save", "error: /save needs the name of a file"),
            ("/save /no/such/folder/file", "cannot be written: No such file"),
            ("/load /no/such/file", "cannot be read: No such file"),
        ],
    )
    def test_what_is_no_use_is_told(self, line: str, note: str) -> None:
        chat = Chat()
        assert chat.type(line)
        assert note in chat.screen.notes[-1]
        assert not chat.messages
        assert not chat.session.settings
        assert not chat.speaker.asked

    def test_help_has_every_command(self) -> None:
        from pegboard.tools.chat.session import COMMANDS

        chat = Chat()
        chat.type("/help")
        for name in (*COMMANDS, "quit"):
            assert any(one.startswith(f"/{name} ") for one in chat.screen.notes)

    def test_a_message_may_begin_with_a_slash(self) -> None:
        chat = Chat()
        chat.type("//etc/passwd is what?")
        assert chat.last_asked == ["/etc/passwd is what?"]

    @pytest.mark.parametrize(
        ("arrivals", "completion", "rate"),
        [
            ([(1.0, 6)], 6, None),
            ([(1.0, 1), (1.0002, 1), (1.0004, 4)], 6, None),
            ([(1.0, 1), (1.5, 1), (2.0, 1)], 3, 2.0),
            ([(1.0, 5), (1.5, 1), (2.0, 0)], 6, 2.0),
            ([(1.0, 1), (2.0, 1)], 20, 10.0),
        ],
        ids=["one piece", "pieces at once", "one by one", "several at first", "pieces of ten tokens"],
    )
    def test_the_rate_is_that_of_tokens_that_came_apart(
        self, monkeypatch: pytest.MonkeyPatch, arrivals: list[tuple[float, int]], completion: int, rate: float | None
    ) -> None:
        figures = Figures(began=0.0)
        for when, tokens in arrivals:
            monkeypatch.setattr("pegboard.tools.chat.backends.time.monotonic", lambda now=when: now)
            figures.tick(tokens)
        figures.completion_tokens = completion
        assert figures.rate == (None if rate is None else pytest.approx(rate))

    def test_stats_add_up(self) -> None:
        chat = Chat()
        chat.type("a", "b", "/stats")
        assert re.fullmatch(
            r"last answer: 7 tokens in \(3 cached\), 5 out, the first after .* s(, .* tok/s)?", chat.screen.notes[-2]
        )
        assert chat.screen.notes[-1].startswith("2 answers: 14 tokens in (43% cached), 10 out, ")

    def test_save_and_load(self, tmp_path: Path) -> None:
        path = tmp_path / "c.json"
        chat = Chat(system="S", settings={"temperature": 0.0})
        chat.type("ä\ud800", f"/save {path}", "b", f"/save {path}")
        assert chat.screen.notes == [f"saved to {path}"] * 2
        other = Chat(settings={"temperature": 1.0, "seed": 1})
        other.type("c", f"/save {path}")
        assert "/save -f" in other.screen.notes[-1]
        other.type(f"/load {path}")
        assert other.messages == chat.messages
        assert (other.session.system, other.session.settings) == ("S", {"temperature": 0.0, "seed": 1})
        other.type("/reset", f"/save -f {path}")
        assert json.loads(path.read_text())["messages"] == []

    def test_loads_messages_of_others(self, tmp_path: Path) -> None:
        path = tmp_path / "c.json"
        path.write_text(json.dumps([{"role": role, "content": role} for role in ("system", "user", "assistant")]))
        chat = Chat()
        chat.type(f"/load {path}", "/show")
        assert chat.messages == [("user", "user"), ("assistant", "assistant")]
        assert chat.session.system == "system"
        assert chat.screen.shown == "system|user|assistant|"

    @pytest.mark.parametrize(
        "text",
        ['{"messages": [{"role": 1}]}', "{", '{"messages": 1}', "7", '{"messages": [], "settings": {"top_p": "x"}}'],
    )
    def test_what_is_no_conversation_is_not_loaded(self, text: str, tmp_path: Path) -> None:
        path = tmp_path / "c.json"
        path.write_text(text)
        chat = Chat()
        chat.type("a", f"/load {path}")
        assert chat.screen.notes[-1].startswith("error: ")
        assert [text for _, text in chat.messages] == ["a", "Hello."]

    @pytest.mark.parametrize("line", ["/quit", "/exit"])
    def test_the_end(self, line: str) -> None:
        assert not Chat().type(line)


class TestTerminal:
    @pytest.mark.parametrize(
        ("text", "messages"),
        [
            ("one\ntwo", ["one", "two"]),
            ("one \\\ntwo \\\nthree\nfour\n", ["one \ntwo \nthree", "four"]),
            ("one\\", ["one\n"]),
            ('"""\none\n\n two\n"""\nthree\n', ["one\n\n two", "three"]),
            ("```\nnever closed", ["never closed"]),
            ("```python\nprint()\n```\n", ["```python\nprint()\n```"]),
            ("```one line```\n", ["```one line```"]),
        ],
    )
    def test_messages_of_several_lines(self, text: str, messages: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        terminal = Terminal()
        found = []
        with contextlib.suppress(EOFError):
            while True:
                found.append(terminal.read())
        assert found == messages

    def test_a_pipe_gets_the_answer_as_it_is(self, capsys: pytest.CaptureFixture[str]) -> None:
        terminal = Terminal()
        terminal.think("hm")
        terminal.say("a\x1b[31m")
        terminal.end_answer()
        terminal.note("n")
        assert tuple(capsys.readouterr()) == ("a\x1b[31m\n", "n\n")

    @pytest.mark.parametrize(
        ("colours", "expected"),
        [
            (True, "\033[2mhm\033[0m\n\na␛[31m\tb\n\033[2mn\033[0m\n"),
            (False, "[thinking]\nhm\n[answer]\na␛[31m\tb\nn\n"),
        ],
    )
    def test_a_terminal_gets_no_control_characters(
        self, colours: bool, expected: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        terminal = Terminal()
        terminal.interactive, terminal._colours = True, colours
        terminal.think("hm")
        terminal.say("\n\na\x1b[31m\tb\r\n")
        terminal.end_answer()
        terminal.note("n")
        assert capsys.readouterr().out == expected


# ---- a server --------------------------------------------------------------------------------------

EVENTS: list[dict[str, Any]] = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"delta": {"reasoning_content": "so"}}]},
    {"choices": [{"delta": {"content": "Grüß "}}]},
    {"choices": [{"delta": {"content": "Gott"}, "finish_reason": "stop"}]},
    {
        "choices": [],
        "usage": {"prompt_tokens": 5, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}},
    },
]


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    seen: list[tuple[str, dict[str, Any]]] = []
    keys: list[str | None] = []
    key = ""
    events: list[dict[str, Any]] = EVENTS
    cut = False
    loading = 0
    gone: threading.Event
    models: Any = {"data": [{"id": "a-model"}, {"id": "another"}]}

    plain = False
    """Whether characters stand in the events as they are."""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as the base class has it
        pass

    def do_GET(self) -> None:
        if self.path != "/v1/models":
            self._answer({"detail": "Not Found"}, 404)
        elif self.loading:
            type(self).loading -= 1
            self._answer({"error": {"message": "the model is still loading", "code": "not_ready"}}, 503)
        else:
            self._answer(self.models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.seen.append((self.path, body))
        if self.key and self.headers.get("authorization") != f"Bearer {self.key}":
            self._answer({"error": {"message": "no key", "code": "no_key"}}, 401)
            return
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        data = b": hello\n\n" + b"".join(
            f"data: {json.dumps(one, ensure_ascii=not self.plain)}\n\n".encode() for one in self.events
        )
        data += b"data: [DONE]\n\n"
        try:
            for at in range(0, len(data), 7):
                piece = data[at : at + 7]
                self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                if self.cut and at > 100:
                    self.close_connection = True
                    return
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.gone.set()

    def _answer(self, value: Any, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Served(http.server.ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: clients may go away, and what stands in stderr is the command's."""


@pytest.fixture
def server() -> Iterator[tuple[str, type[Handler]]]:
    kind = type("OneHandler", (Handler,), {"seen": [], "gone": threading.Event()})
    with Served(("127.0.0.1", 0), kind) as served:
        thread = threading.Thread(target=served.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{served.server_address[1]}", kind
        served.shutdown()
        thread.join()


def ask(url: str, key: str = "", **settings: Any) -> tuple[list[Piece], Figures]:
    figures = Figures()
    speaker = ServerSpeaker(ServerClient(url, key), "a-model")
    return list(speaker.answer([{"role": "user", "content": "Hi"}], settings, figures)), figures


class TestServer:
    def test_a_stream_is_read_however_it_is_cut(self, server: tuple[str, type[Handler]]) -> None:
        url, handler = server
        pieces, figures = ask(f"{url}/v1/", temperature=0.0)
        assert pieces == [Piece("so", True), Piece("Grüß "), Piece("Gott")]
        assert (figures.prompt_tokens, figures.cached_tokens, figures.completion_tokens) == (5, 4, 9)
        assert (figures.finish_reason, figures.exact) == ("stop", True)
        path, body = handler.seen[0]
        assert path == "/v1/chat/completions"
        assert (body["model"], body["stream"], body["temperature"]) == ("a-model", True, 0.0)

    def test_a_line_ends_at_a_line_feed_and_nowhere_else(self, server: tuple[str, type[Handler]]) -> None:
        url, handler = server
        handler.plain = True
        handler.events = [{"choices": [{"delta": {"content": "a\u2028b\x85c"}}]}]
        assert ask(url)[0] == [Piece("a\u2028b\x85c")]

    def test_something_that_speaks_neither(self) -> None:
        """It hangs up at once, as servers of other protocols do."""
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]

            def hang_up() -> None:
                for _ in range(2):
                    connection, _ = listening.accept()
                    connection.recv(65536)
                    connection.close()

            thread = threading.Thread(target=hang_up, daemon=True)
            thread.start()
            with pytest.raises(PegboardError, match=r"does not speak HTTP; is it https://\?"):
                ask(f"http://127.0.0.1:{port}")
            with pytest.raises(PegboardError, match=r"does not speak HTTPS; is it http://\?"):
                ask(f"https://127.0.0.1:{port}")
            thread.join()

    def test_a_host_without_an_address(self) -> None:
        with pytest.raises(PegboardError, match=r"no-such-host.invalid cannot be reached: \w+"):
            ask("http://no-such-host.invalid")

    def test_a_server_that_does_not_take_the_connection(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def never(*_: Any, **__: Any) -> None:
            raise TimeoutError("timed out")

        monkeypatch.setattr("socket.create_connection", never)
        with pytest.raises(PegboardError, match=r"does not answer within 10 s"):
            ask("http://127.0.0.1:9")

    def test_a_key_is_sent_and_its_lack_explained(self, server: tuple[str, type[Handler]]) -> None:
        url, handler = server
        handler.key = "secret"
        with pytest.raises(PegboardError, match=r"no key .*PEGBOARD_API_KEY"):
            ask(url)
        assert ask(url, "secret")[0]

    def test_an_error_in_the_stream(self, server: tuple[str, type[Handler]]) -> None:
        url, handler = server
        handler.events = [EVENTS[2], {"error": {"message": "the engine died", "code": "engine_failed"}}]
        figures = Figures()
        pieces = ServerSpeaker(ServerClient(url), "m").answer([], {}, figures)
        assert next(pieces) == Piece("Grüß ")
        with pytest.raises(PegboardError, match="the engine died"):
            next(pieces)
        assert (figures.completion_tokens, figures.exact) == (1, False)

    def test_a_server_that_breaks_off(self, server: tuple[str, type[Handler]]) -> None:
        url, handler = server
        handler.cut = True
        with pytest.raises(PegboardError, match="broke off in the middle of the answer"):
            ask(url)

    def test_closing_an_answer_closes_the_connection(self, server: tuple[str, type[Handler]]) -> None:
        url, handler = server
        handler.events = EVENTS[2:3] * 100_000
        pieces = ServerSpeaker(ServerClient(url), "m").answer([], {}, Figures())
        assert next(pieces)  # type: ignore[truthy-bool]
        pieces.close()  # type: ignore[attr-defined]  # it is a generator
        assert handler.gone.wait(20)

    def test_a_model_that_is_loading_is_waited_for(
        self, server: tuple[str, type[Handler]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        url, handler = server
        handler.loading = 3
        monkeypatch.setattr("pegboard.tools.chat.server_client.ASK_AGAIN_SECONDS", 0.0)
        waits = []

        @contextlib.contextmanager
        def wait() -> Iterator[None]:
            waits.append("begun")
            yield
            waits.append("ended")

        assert ServerClient(url).models(wait=wait) == ["a-model", "another"]
        assert waits == ["begun", "ended"]

    @pytest.mark.parametrize("models", [[], {"data": [{}]}, {"data": None}])
    def test_something_else_than_a_model_server(self, server: tuple[str, type[Handler]], models: Any) -> None:
        url, handler = server
        handler.models = models
        with pytest.raises(PegboardError, match="not as a server with OpenAI's API does"):
            ServerClient(url).models(wait=contextlib.nullcontext)

    def test_other_addresses(self, server: tuple[str, type[Handler]]) -> None:
        url, _ = server
        with pytest.raises(PegboardError, match=r"status 404 .* it has no OpenAI API there"):
            ServerClient(f"{url}/elsewhere").models(wait=contextlib.nullcontext)
        with pytest.raises(PegboardError, match=r"does not speak HTTPS; is it http://"):
            ServerClient(url.replace("http", "https")).models(wait=contextlib.nullcontext)
        with pytest.raises(PegboardError, match=r"nothing listens at .* `pegboard serve`"):
            ServerClient("127.0.0.1:9").models(wait=contextlib.nullcontext)

    @pytest.mark.parametrize("url", ["ftp://x", "http://", "://", "http://x:port", "http://x/?a=b"])
    def test_no_address(self, url: str) -> None:
        with pytest.raises(PegboardError, match="is not an address such as"):
            ServerClient(url)

    def test_a_key_that_is_none(self) -> None:
        with pytest.raises(PegboardError, match="characters that a key cannot have"):
            ServerClient("http://x", "a\nhost: b")

    def test_the_command_on_a_server(self, server: tuple[str, type[Handler]], tmp_path: Path) -> None:
        url, handler = server
        handler.key = "secret"
        (tmp_path / "key").write_text("secret\n")
        arguments = ["chat", "--url", url, "--api-key-file", str(tmp_path / "key"), "--model", "another"]
        arguments += ["--setting", "top_p=0.5", "--system", "S"]
        done = CliRunner().invoke(app, arguments, input="Hi\n/stats\nAgain\n", catch_exceptions=False)
        assert done.exit_code == 0, done.stderr
        assert done.stdout == "Grüß Gott\nGrüß Gott\n"
        assert "model: another\nlast answer: 5 tokens in (4 cached), 9 out" in done.stderr
        body = handler.seen[1][1]
        assert [one["content"] for one in body["messages"]] == ["S", "Hi", "Grüß Gott", "Again"]
        assert (body["top_p"], body["temperature"]) == (0.5, 0.7)
        handler.key = "changed"
        refused = CliRunner().invoke(app, arguments, input="Hi\n", catch_exceptions=False)
        assert refused.exit_code == 1
        assert refused.stderr.startswith("error: no key")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--url", "http://x", "a.yaml"], "has a config of its own"),
            (["--url", "http://x", "--set", "a=b"], "has a config of its own"),
            (["--model", "m"], "--model goes with --url"),
            (["--api-key-file", "m"], "--api-key-file goes with --url"),
            (["--url", "http://x", "--api-key-file", "/no/such"], "/no/such cannot be read"),
            (["--url", "http://x", "--setting", "heat=1"], "there is no setting 'heat'"),
            (["--url", "http://x", "--temperature", "-1"], "temperature must be"),
        ],
    )
    def test_options_that_do_not_fit(self, arguments: list[str], message: str) -> None:
        with pytest.raises(PegboardError) as caught:
            CliRunner().invoke(app, ["chat", *arguments], catch_exceptions=False)
        assert message in str(caught.value)


# ---- an engine -------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}assistant:"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, in a folder of its own: its template is changed, and its weights."""
    import shutil

    from safetensors.torch import load_file, save_file

    made = tiny_checkpoint(tmp_path_factory.mktemp("made"), "llama", num_hidden_layers=1)
    directory = Path(shutil.copytree(made, tmp_path_factory.mktemp("model") / "tiny"))
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    for other in directory.glob("chat_template*"):
        other.unlink()
    # It never ends by itself: the logit of its end is 0, and some other one is above.
    weights = load_file(directory / "model.safetensors")
    weights["lm_head.weight"][2] = 0
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


def overrides(model: Path) -> list[str]:
    return [f"model.path={model}", "attention.use=torch", "memory.max_total_tokens=512", "log_level=error"]


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with Engine(compose(overrides=overrides(model), env={})) as engine:
        yield engine


class TestEngine:
    def test_the_answer_is_the_engines(self, engine: Engine) -> None:
        figures = Figures()
        settings = {"max_tokens": 12, "temperature": 0.0, "reasoning_effort": "none"}
        pieces = EngineSpeaker(engine).answer([{"role": "user", "content": "Hi"}], settings, figures)
        text = "".join(piece.text for piece in pieces)
        prompt = "user:Hi\nFalseassistant:"
        from pegboard.core.interfaces.sampling import SamplingParams

        sampling = SamplingParams(max_new_tokens=12, temperature=0.0)
        assert text == engine.generate(prompt, sampling, add_special_tokens=False).text
        assert figures.completion_tokens == 12
        assert figures.prompt_tokens == len(engine.tokenizer.encode(prompt, add_special_tokens=False))
        assert figures.finish_reason == "length"
        assert figures.first is not None
        assert figures.first <= figures.seconds

    def test_an_interrupt_is_heard_between_two_steps(self, engine: Engine) -> None:
        handler = signal.getsignal(signal.SIGINT)
        pieces = EngineSpeaker(engine).answer([{"role": "user", "content": "Hi"}], {"temperature": 0.0}, Figures())
        assert next(pieces)  # type: ignore[truthy-bool]
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            list(pieces)
        assert engine.built.scheduler.idle
        assert signal.getsignal(signal.SIGINT) is handler

    def test_a_conversation_that_is_too_long_is_told_apart(self, engine: Engine) -> None:
        with pytest.raises(InvalidRequest) as caught:
            list(EngineSpeaker(engine).answer([{"role": "user", "content": "Hi " * 600}], {}, Figures()))
        assert caught.value.code == "context_length_exceeded"


def test_a_model_without_a_chat_template(model: Path, tmp_path: Path) -> None:
    import shutil

    directory = Path(shutil.copytree(model, tmp_path / "plain"))
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    arguments = [part for one in overrides(directory) for part in ("--set", one)]
    with pytest.raises(PegboardError, match=r"plain has no chat template.*pegboard generate"):
        CliRunner().invoke(app, ["chat", *arguments], input="Hi\n", catch_exceptions=False)


class OnTerminal:
    """The real script on a terminal of its own."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.screen = ""
        self._own, other = pty.openpty()
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", **environment}
        self.process = subprocess.Popen(
            [SCRIPT, *arguments],
            stdin=other,
            stdout=other,
            stderr=other,
            env=env,
            cwd="/",
            start_new_session=True,
            # Its own terminal, which turns Ctrl-C into a signal.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(other)

    def type(self, text: str) -> None:
        os.write(self._own, text.encode())

    def wait_for(self, text: str) -> None:
        """Until this is on the screen."""
        self._read_until(lambda: text in self.screen)

    def wait_for_prompt(self) -> None:
        """Until it reads what is typed: a Ctrl-C before that is another one's."""
        self._read_until(lambda: self.screen.endswith("> "))

    def wait_for_more(self, characters: int) -> None:
        """Until so many characters more are on the screen."""
        goal = len(self.screen) + characters
        self._read_until(lambda: len(self.screen) >= goal)

    def _read_until(self, enough: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not enough():
            assert time.monotonic() < deadline, self.screen
            if select.select([self._own], [], [], 0.2)[0]:
                try:
                    self.screen += os.read(self._own, 65536).decode("utf-8", "replace")
                except OSError:
                    raise AssertionError(f"it has ended:\n{self.screen}") from None

    def end(self) -> int:
        """Read to the end; the exit code."""
        with contextlib.suppress(AssertionError):
            self._read_until(lambda: False)
        return self.process.wait(30)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._own)


def test_ctrl_c_on_a_terminal_stops_the_answer_and_not_the_chat(model: Path, tmp_path: Path) -> None:
    arguments = [part for one in overrides(model) for part in ("--set", one)]
    arguments += ["--set", "memory.max_total_tokens=4096", "--temperature", "0"]
    # In a cache of its own it would be compiled anew.
    arguments += ["--set", "plugins.disable=[cpu_native]"]
    chat = OnTerminal("chat", *arguments, PEGBOARD_CACHE=str(tmp_path / "cache"), NO_COLOR="1")
    try:
        chat.wait_for("> ")
        chat.type("Hi\n")
        chat.wait_for("Hi\r\n")
        chat.wait_for_more(40)
        chat.type("\x03")
        chat.wait_for("(stopped)")
        chat.wait_for_prompt()
        chat.type("/stats\n")
        chat.wait_for("1 answer:")
        chat.wait_for_prompt()
        chat.type("/show\n")
        chat.wait_for("user:\r\nHi")
        chat.wait_for_prompt()
        chat.type("\x04")
        assert chat.end() == 0
    finally:
        chat.close()
    typed = tmp_path / "cache" / "chat_history"
    assert "/stats" in typed.read_text()
    assert stat.S_IMODE(typed.stat().st_mode) == 0o600


def test_ctrl_c_in_a_pipe_ends_it(model: Path) -> None:
    arguments = [part for one in overrides(model) for part in ("--set", one)]
    with subprocess.Popen(
        [SCRIPT, "chat", *arguments, "--set", "memory.max_total_tokens=4096", "--temperature", "0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd="/",
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b"Hi\nNever\n")
        process.stdin.flush()
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        errors = process.stderr.read().decode()
        process.stdout.read()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "(stopped)" in errors
