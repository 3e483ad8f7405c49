"""`pegboard generate --file`: lines checked before anything runs, answers written as they come, stopped and resumed."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.cli.main import app
from pegboard.core.config.compose import compose
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.errors import InvalidRequest, PegboardError
from pegboard.tools.batch import progress as generate_progress
from pegboard.tools.batch.lines import BadLine, Defaults, Line, parse_line, sampling_of
from pegboard.tools.batch.output import Output
from pegboard.tools.batch.run import Run, Totals
from pegboard.tools.signals import Signals

DEFAULTS = Defaults({"max_new_tokens": 8, "temperature": 0.0}, "a-model")
BODY = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def parse(line: Any, defaults: Defaults = DEFAULTS) -> Line | BadLine:
    return parse_line(line if isinstance(line, bytes) else json.dumps(line).encode(), 3, 4, defaults)


def good(line: Any, defaults: Defaults = DEFAULTS) -> Line:
    found = parse(line, defaults)
    assert isinstance(found, Line), found
    return found


class TestLines:
    def test_a_prompt_with_parameters_of_its_own(self) -> None:
        line = good({"prompt": "Hi", "id": 7, "sampling_params": {"temperature": 1.0, "stop": ".", "regex": "a+"}})
        assert (line.id, line.index, line.number, line.prompt, line.messages) == (7, 3, 4, "Hi", [])
        assert (line.sampling.temperature, line.sampling.max_new_tokens, line.sampling.stop) == (1.0, 8, (".",))
        assert line.sampling.grammar is not None
        assert (line.sampling.grammar.kind, line.sampling.grammar.source) == ("regex", "a+")

    def test_without_an_id_it_is_the_index(self) -> None:
        assert good({"prompt": [1, 2]}).id == 3

    def test_a_conversation(self) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        line = good({"messages": [{"role": "user", "content": parts}]})
        assert line.messages == [{"role": "user", "content": "a\nb"}]

    def test_options_put_prompts_into_conversations(self) -> None:
        defaults = Defaults({}, chat=True, system="Be brief.")
        system = {"role": "system", "content": "Be brief."}
        user = {"role": "user", "content": "Hi"}
        assert good({"prompt": "Hi"}, defaults).messages == [system, user]
        assert good({"messages": [user]}, defaults).messages == [system, user]
        own = {"role": "system", "content": "Be long."}
        assert good({"messages": [own, user]}, defaults).messages == [own, user]
        assert good({"prompt": [1, 2]}, defaults).messages == []

    def test_openais_batch_format(self) -> None:
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
        body = {**BODY, "max_tokens": 3, "stop": "b", "n": 1, "user": "me", "stream": False, "response_format": schema}
        line = good({"custom_id": "x", "method": "POST", "url": "/v1/chat/completions", "body": body})
        assert (line.id, line.messages) == ("x", [{"role": "user", "content": "Hi"}])
        assert (line.sampling.max_new_tokens, line.sampling.stop, line.sampling.temperature) == (3, ("b",), 0.0)
        assert line.sampling.grammar is not None
        assert line.sampling.grammar.kind == "json_schema"
        plain = good({"custom_id": "y", "url": "/v1/completions", "body": {"prompt": "Once", "max_tokens": 2}})
        assert (plain.prompt, plain.messages, plain.sampling.max_new_tokens) == ("Once", [], 2)

    @pytest.mark.parametrize(
        ("line", "why"),
        [
            (b"{", "no valid JSON"),
            (b'{"prompt": "a\xff"}', "no valid JSON"),
            (b'{"prompt": NaN}', "no valid JSON"),
            (b'{"prompt": ' + b"[" * 100_000, "nested too deeply"),
            ([1], "must be a JSON object"),
            ({}, "either prompt or messages is needed"),
            ({"prompt": "a", "messages": [{}]}, "exclude each other"),
            ({"prompt": ""}, "prompt must be text"),
            ({"prompt": [True]}, "prompt must be text"),
            ({"messages": []}, "messages must be a list"),
            ({"messages": ["a"]}, r"messages\[0\] must be an object with a role"),
            ({"messages": [{"role": "user"}]}, r"messages\[0\].content must be text"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "parts of type text only"),
            ({"prompt": "a", "id": []}, "id must be a string or an integer"),
            ({"prompt": "a", "id": ""}, "id must be a string or an integer"),
            ({"prompt": "a", "id": True}, "id must be a string or an integer"),
            ({"prompt": "a", "sampling_params": [1]}, "sampling_params must be an object"),
            ({"prompt": "a", "sampling_params": {"warmth": 1}}, "there is no sampling parameter 'warmth'"),
            ({"prompt": "a", "sampling_params": {"temperature": "x"}}, "sampling_params.temperature"),
            ({"prompt": "a", "sampling_params": {"top_p": 7.0}}, "top_p must be"),
            ({"prompt": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "exclude each other"),
            ({"prompt": "a", "promt": "b"}, "unknown key 'promt'"),
            ({"custom_id": "a", "prompt": "b"}, "unknown key 'prompt'"),
            ({"custom_id": "a", "body": []}, "body must be an object"),
            ({"custom_id": "a", "body": {"prompt": "b"}}, "body.messages is missing"),
            ({"custom_id": "a", "url": "/v1/embeddings", "body": BODY}, "url must be one of"),
            ({"custom_id": "a", "method": "GET", "body": BODY}, "method must be POST"),
            ({"custom_id": "a", "body": {**BODY, "n": 2}}, "body.n is not supported offline"),
            ({"custom_id": "a", "body": {**BODY, "tools": [{}]}}, "body.tools is not supported offline"),
            ({"custom_id": "a", "body": {**BODY, "n": 0}}, "body.n is not supported offline"),
            ({"custom_id": "a", "body": {**BODY, "logprobs": 0}}, "body.logprobs is not supported offline"),
            ({"custom_id": "a", "body": {**BODY, "tool_choice": "required"}}, "body.tool_choice is not supported"),
            ({"custom_id": "a", "body": {**BODY, "modalities": ["audio"]}}, "body.modalities is not supported"),
            ({"custom_id": "a", "body": {**BODY, "temperatur": 0}}, "body.temperatur is not supported offline"),
            ({"custom_id": "a", "body": {**BODY, "max_tokens": "x"}}, "body.max_new_tokens"),
            ({"custom_id": "a", "body": {**BODY, "response_format": {"type": "poem"}}}, "body.response_format"),
        ],
    )
    def test_bad_lines(self, line: Any, why: str) -> None:
        import re

        found = parse(line)
        assert isinstance(found, BadLine)
        assert re.search(why, found.problem), found.problem
        assert (found.index, found.number) == (3, 4)

    @pytest.mark.parametrize(
        "more",
        [
            {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "logprobs": False, "top_logprobs": 0},
            {"modalities": ["text"], "safety_identifier": "u1", "prompt_cache_key": "k", "n": 1, "stream": False},
            {"parallel_tool_calls": False, "tool_choice": "auto", "functions": [], "audio": None, "best_of": 1},
            {"echo": False, "suffix": "", "chat_template_kwargs": {}, "add_generation_prompt": True},
        ],
    )
    def test_fields_that_ask_for_nothing_pass(self, more: dict[str, Any]) -> None:
        plain, line = ({"custom_id": "a", "body": {**BODY, **fields}} for fields in ({}, more))
        assert good(line).digest == good(plain).digest

    def test_the_model_of_a_body_is_asked_for(self) -> None:
        """It may be an adapter."""
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        named, plain = (parse({"custom_id": "a", "body": {**body, **more}}) for more in ({"model": "sql"}, {}))
        assert isinstance(named, Line)
        assert isinstance(plain, Line)
        assert (named.model, plain.model) == ("sql", "")
        assert named.digest != plain.digest
        bad = parse({"custom_id": "a", "body": {**body, "model": 5}})
        assert isinstance(bad, BadLine)
        assert bad.problem == "body.model must be a string"

    def test_equal_digests_are_equal_requests(self) -> None:
        line = {"prompt": "Hi", "id": "a"}
        same = [line, {**line, "id": "b"}, {**line, "sampling_params": {"max_new_tokens": 8}}]
        assert len({good(one).digest for one in same}) == 1
        others = [good({"prompt": "Ho"}), good({**line, "sampling_params": {"seed": 1}})]
        others += [good(line, Defaults({}, "a-model")), good(line, Defaults(DEFAULTS.sampling, "another-model"))]
        assert len({one.digest for one in [good(line), *others]}) == 5

    def test_unknown_options_are_named(self) -> None:
        with pytest.raises(InvalidRequest, match="there is no sampling parameter 'warmth'"):
            sampling_of({"warmth": 1})


class TestOutput:
    LINES = b'{"index": 0, "digest": "a", "text": "x"}\n{"index": 2, "digest": "c", "error": {"message": "no"}}\n'

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        path = tmp_path / "out.jsonl"
        path.write_bytes(self.LINES)
        return path

    def test_nothing_is_overwritten_by_accident(self, path: Path) -> None:
        with pytest.raises(PegboardError, match="--resume goes on with it, --overwrite starts anew"):
            Output(path, "new")
        assert path.read_bytes() == self.LINES

    def test_overwriting_begins_when_the_run_does(self, path: Path) -> None:
        output = Output(path, "overwrite")
        assert path.read_bytes() == self.LINES, "a model that cannot be loaded costs nothing"
        output.begin()
        output.write({"index": 0})
        output.close()
        assert path.read_bytes() == b'{"index": 0}\n'

    @pytest.mark.parametrize("rest", [b'{"index": 3, "dig', b'{"index": 3, "digest": "d"}', b"\0\0\0\0", b"\xc3"])
    def test_resuming_drops_a_half_written_line(self, path: Path, rest: bytes) -> None:
        path.write_bytes(self.LINES + rest)
        output = Output(path, "resume")
        assert output.done == {0: "a", 2: "c"}
        assert output.failed == 1
        output.begin()
        output.write({"index": 3})
        output.close()
        assert path.read_bytes() == self.LINES + b'{"index": 3}\n'

    def test_failed_requests_can_be_left_out(self, path: Path) -> None:
        path.write_bytes(self.LINES + b'{"index": 1, "digest": "b"}\n{"ind')
        output = Output(path, "resume", retry_failed=True)
        assert output.done == {0: "a", 1: "b"}
        assert path.read_bytes().startswith(self.LINES)
        output.begin()
        output.write({"index": 2})
        output.close()
        assert [json.loads(line)["index"] for line in path.read_bytes().splitlines()] == [0, 1, 2]
        assert [one.name for one in path.parent.iterdir()] == [path.name]

    @pytest.mark.parametrize("line", [b"my diary\n", b'{"index": "x", "digest": ""}\n', b'{"index": 1}\n', b"[]\n"])
    def test_a_file_that_is_something_else_stays_as_it_is(self, path: Path, line: bytes) -> None:
        path.write_bytes(self.LINES + line + self.LINES)
        with pytest.raises(PegboardError, match=r"out\.jsonl:3 is not a line that this command writes"):
            Output(path, "resume")
        assert path.read_bytes() == self.LINES + line + self.LINES

    def test_two_runs_do_not_write_to_one_file(self, path: Path) -> None:
        with path.open("rb") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            with pytest.raises(PegboardError, match="another run is writing"):
                Output(path, "resume")
        Output(path, "resume").close()

    def test_resuming_what_never_began(self, tmp_path: Path) -> None:
        output = Output(tmp_path / "new" / "out.jsonl", "resume")
        output.begin()
        output.write({"text": "\ud800 ü\u2028\n"})
        output.close()
        text = (tmp_path / "new" / "out.jsonl").read_text()
        assert text == '{"text": "\\ud800 ü\\u2028\\n"}\n'
        assert json.loads(text) == {"text": "\ud800 ü\u2028\n"}

    def test_a_place_where_nothing_can_be_written(self, tmp_path: Path) -> None:
        with pytest.raises(PegboardError, match="cannot be written"):
            Output(tmp_path, "new")

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
    def test_a_full_disk_is_told(self) -> None:
        output = Output(Path("/dev/full"), "new")
        output.begin()
        with pytest.raises(PegboardError, match="No space left on device; what is complete in it stays"):
            output.write({"index": 0})
        output.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=1)


def settings(model: Path) -> list[str]:
    return [f"model.path={model}", "attention.use=torch", "memory.max_total_tokens=2048", "log_level=error"]


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    bounds = ["scheduler.max_running_requests=4", "scheduler.max_queued_requests=3"]
    with Engine(compose(overrides=[*settings(model), *bounds], env={})) as engine:
        yield engine


class Written:
    """An output that keeps what it gets."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.done: dict[int, str] = {}

    def write(self, record: dict[str, Any]) -> None:
        self.records.append(record)


class TestRun:
    @staticmethod
    def lines(*lengths: int) -> Iterator[Line | BadLine]:
        """Prompts with so many tokens to generate."""
        for index, length in enumerate(lengths):
            params = {"max_new_tokens": length, "ignore_eos": True}
            raw = json.dumps({"prompt": [5 + index, 6, 7], "sampling_params": params}).encode()
            yield parse_line(raw, index, index + 1, DEFAULTS)

    @staticmethod
    def go(engine: Engine, lines: Iterator[Line | BadLine], window: int = 4, **options: Any) -> tuple[Written, Run]:
        output = Written()
        run = Run(engine, lines, output, window=window, **options)  # type: ignore[arg-type]
        run.go(lambda: False, lambda totals, generated: None)
        assert engine.built.scheduler.idle
        return output, run

    def test_answers_come_as_they_finish_or_in_order(self, engine: Engine) -> None:
        loose, run = self.go(engine, self.lines(20, 2, 4))
        assert [one["index"] for one in loose.records] == [1, 2, 0]
        assert run.totals.to_dict() | {"seconds": 0} == {
            "requests": 3,
            "errors": 0,
            "prompt_tokens": 9,
            "cached_tokens": 0,
            "completion_tokens": 26,
            "seconds": 0,
        }
        ordered, _ = self.go(engine, self.lines(20, 2, 4), in_order=True)
        key = ("index", "text", "digest", "finish_reason")
        assert [[one[name] for name in key] for one in ordered.records] == sorted(
            [one[name] for name in key] for one in loose.records
        )

    @pytest.mark.parametrize("in_order", [False, True])
    def test_no_more_are_read_than_there_is_room_for(self, engine: Engine, in_order: bool) -> None:
        taken = 0

        def counted() -> Iterator[Line | BadLine]:
            nonlocal taken
            for line in self.lines(40, *[1] * 30):
                taken += 1
                yield line

        output = Written()
        run = Run(engine, counted(), output, window=2, in_order=in_order)  # type: ignore[arg-type]
        worst = 0

        def watch(totals: Totals, generated: int) -> None:
            nonlocal worst
            worst = max(worst, taken - run.written)

        run.go(lambda: False, watch)
        assert len(output.records) == 31
        assert worst <= (8 if in_order else 2)

    def test_what_is_answered_already_is_passed_over(self, engine: Engine) -> None:
        output = Written()
        output.done = {0: "", 2: ""}
        run = Run(engine, self.lines(1, 1, 1, 1), output, window=9)  # type: ignore[arg-type]
        run.go(lambda: False, lambda totals, generated: None)
        assert sorted(one["index"] for one in output.records) == [1, 3]

    def test_a_queue_that_is_full_is_waited_for(self, engine: Engine) -> None:
        """4 run and 3 wait: the rest of a window of 12 is refused at first."""
        before = engine.stats()["rejected"]
        output, run = self.go(engine, self.lines(*[3] * 12), window=12)
        assert engine.stats()["rejected"] > before
        assert sorted(one["index"] for one in output.records) == list(range(12))
        assert run.totals.errors == 0

    def test_each_failure_is_its_own(self, engine: Engine) -> None:
        raws = [
            {"prompt": [5] * 5000},
            {"prompt": "fine"},
            {"prompt": 1},
            {"prompt": "a", "sampling_params": {"regex": "(a"}},
            {"prompt": [10**6]},
        ]
        lines = (parse_line(json.dumps(one).encode(), i, i + 1, DEFAULTS) for i, one in enumerate(raws))
        output, run = self.go(engine, lines)
        records = {one["index"]: one for one in output.records}
        assert records[0]["error"]["code"] == "context_length_exceeded"
        assert records[1]["text"]
        assert records[2]["error"]["code"] == "bad_line"
        assert "regex" in records[3]["error"]["message"]
        assert "not a token id" in records[4]["error"]["message"]
        assert all(one["digest"] for one in records.values())
        assert run.totals.errors == 4

    @pytest.mark.parametrize("in_order", [False, True])
    def test_stopping_aborts_what_is_under_way(self, engine: Engine, in_order: bool) -> None:
        output = Written()
        run = Run(engine, self.lines(500, 1, 500, 1), output, window=4, in_order=in_order)  # type: ignore[arg-type]
        run.go(lambda: run.totals.requests >= 2, lambda totals, generated: None)
        assert engine.built.scheduler.idle
        assert [one["index"] for one in output.records] == ([] if in_order else [1, 3])
        assert run.written == len(output.records)


def test_signals_are_gentle_once() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Signals() as signals:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signals.gentle()
        signal.raise_signal(signal.SIGINT)
        assert signals.stopped
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_lines_of_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    totals = Totals(began=now)
    with generate_progress.progress(10, 2) as watcher:
        watcher(totals, 0)
        now += 11
        totals.requests, totals.errors = 4, 1
        watcher(totals, 550)
        watcher(totals, 600)
        now += 11
        watcher(totals, 1650)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "6 of 10 requests, 1 failed, 50 tok/s, about 11 s left"
    assert second == "6 of 10 requests, 1 failed, 75 tok/s, about 22 s left"


class Tool:
    """The command in this process, with a small model."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.file = folder / "in.jsonl"
        self.output = folder / "out.jsonl"
        self._settings = [part for one in settings(model) for part in ("--set", one)]

    def arguments(self, *more: str, file: str = "") -> list[str]:
        return ["generate", "--file", file or str(self.file), "--output", str(self.output), *self._settings, *more]

    def __call__(self, *more: str, stdin: str | None = None) -> Any:
        arguments = self.arguments(*more, file="" if stdin is None else "-")
        return CliRunner().invoke(app, arguments, input=stdin, catch_exceptions=False)

    def write(self, *lines: Any) -> None:
        self.file.write_text("".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in lines))

    @property
    def records(self) -> dict[str | int, dict[str, Any]]:
        lines = [json.loads(line) for line in self.output.read_text().splitlines()]
        found = {line["id"]: line for line in lines}
        assert len(found) == len(lines), "a request is answered twice"
        return found


@pytest.fixture
def tool(model: Path, tmp_path: Path) -> Tool:
    return Tool(model, tmp_path)


class TestCommand:
    def test_all_bad_lines_are_told_before_the_model_is_loaded(self, tool: Tool) -> None:
        tool.write({"prompt": "a", "id": 1}, "", "{", {"prompt": "b", "id": 1}, {"prompt": 5})
        with pytest.raises(PegboardError) as caught:
            tool("--set", "model.path=/nowhere")
        told = str(caught.value).splitlines()
        assert told[0].startswith("3 of 4 lines are wrong")
        assert told[1].startswith(f"  {tool.file}:3: no valid JSON")
        assert told[2] == f"  {tool.file}:4: the id 1 is that of line 1 already"
        assert told[3].startswith(f"  {tool.file}:5: prompt must be text")

    def test_bad_lines_can_be_skipped_and_mended(self, tool: Tool) -> None:
        tool.write({"prompt": "a", "id": "a"}, {"prompt": 1, "id": "b"}, {"prompt": "b", "id": "a"})
        done = tool("--skip-bad-lines", "--max-new-tokens", "2")
        assert done.exit_code == 1
        lines = [json.loads(line) for line in tool.output.read_text().splitlines()]
        assert sorted(one["index"] for one in lines if "error" in one) == [1, 2]
        assert "3 requests, 2 failed" in done.stderr
        again = tool("--resume", "--skip-bad-lines", "--max-new-tokens", "2")
        assert again.exit_code == 1
        assert "nothing to do" in again.stderr
        tool.write({"prompt": "a", "id": "a"}, {"prompt": "x", "id": "b"}, {"prompt": "b", "id": "c"})
        mended = tool("--retry-failed", "--max-new-tokens", "2")
        assert mended.exit_code == 0, mended.stderr
        assert {name: one["index"] for name, one in tool.records.items()} == {"a": 0, "b": 1, "c": 2}

    def test_stdin_stdout_and_a_summary(self, tool: Tool) -> None:
        done = tool("--json", "--max-new-tokens", "3", stdin='{"prompt": [5, 6]}\n\n{"prompt": [7]}\n')
        assert done.exit_code == 0, done.stderr
        summary = json.loads(done.stdout)
        assert (summary["requests"], summary["done"], summary["total"], summary["stopped"]) == (2, 2, 2, False)
        assert tool.records[1]["usage"] == {"prompt_tokens": 1, "completion_tokens": 3, "cached_tokens": 0}
        saved = tool.output.read_text()
        tool.output = Path("-")
        printed = tool("--max-new-tokens", "3", "--keep-order", stdin='{"prompt": [5, 6]}\n{"prompt": [7]}\n')
        assert sorted(printed.stdout.splitlines()) == sorted(saved.splitlines())

    def test_chats_are_answered_in_the_template(self, tool: Tool) -> None:
        tool.write({"prompt": "Hi"}, {"messages": [{"role": "user", "content": "Hi"}]})
        assert tool("--max-new-tokens", "4").exit_code == 0
        raw, chat = tool.records[0], tool.records[1]
        assert chat["usage"]["prompt_tokens"] > raw["usage"]["prompt_tokens"]
        assert tool("--max-new-tokens", "4", "--chat", "--overwrite").exit_code == 0
        assert [tool.records[i]["text"] for i in (0, 1)] == [chat["text"]] * 2

    def test_another_prompt_is_not_taken_for_answered(self, tool: Tool) -> None:
        tool.write({"prompt": "a"}, {"prompt": "b"})
        assert tool("--max-new-tokens", "2").exit_code == 0
        before = tool.output.read_text()
        with pytest.raises(PegboardError, match=r"in\.jsonl:1: the line, the options or the model have changed"):
            tool("--max-new-tokens", "3", "--resume")
        tool.write({"prompt": "a"})
        with pytest.raises(PegboardError, match=r"more requests than .*in\.jsonl has"):
            tool("--max-new-tokens", "2", "--resume")
        assert tool.output.read_text() == before

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "there is no prompt; give one, or a file of them with --file"),
            (["--file", "x"], "--file needs --output"),
            (["Hi", "--resume"], "--resume goes with --file"),
            (["Hi", "--output", "x"], "--output goes with --file"),
            (["--file", "x", "--output", "y", "--resume", "--overwrite"], "exclude each other"),
            (["--file", "x", "--output", "-", "--json"], "choose one"),
            (["--file", "/no/such", "--output", "/dev/null", "--set", "model.path=x"], "/no/such cannot be read"),
            (["Hi", "--set", "model.path=x", "--temperature", "-1"], "temperature must be"),
            (["Hi", "--set", "model.path=x", "--sampling", "{"], "--sampling: this is not JSON"),
            (["Hi", "--set", "model.path=x", "--sampling", '{"heat": 1}'], "no sampling parameter 'heat'"),
        ],
    )
    def test_options_that_do_not_fit(self, arguments: list[str], message: str) -> None:
        with pytest.raises(PegboardError) as caught:
            CliRunner().invoke(app, ["generate", *arguments], catch_exceptions=False)
        assert message in str(caught.value)

    def test_the_first_argument_is_a_config_where_a_file_has_the_prompts(self, tool: Tool, tmp_path: Path) -> None:
        config = tmp_path / "config.yaml"
        config.write_text("scheduler:\n  policy:\n    use: nonsense\n")
        tool.write({"prompt": "a"})
        with pytest.raises(PegboardError, match=r"nonsense.*config\.yaml"):
            tool(str(config))


def test_stopped_and_resumed_is_as_undisturbed(tool: Tool, tmp_path: Path) -> None:
    """A real interrupt in the middle, a power cut in the middle of a line, and no answer is lost, doubled or other."""
    count = 120
    tool.write(*({"prompt": [5 + i % 90, 9, *[7] * (i % 11)], "id": f"r{i}"} for i in range(count)))
    options = ("--max-new-tokens", "24", "--sampling", '{"ignore_eos": true}')
    assert tool(*options).exit_code == 0
    expected = {name: one["text"] for name, one in tool.records.items()}
    tool.output = tmp_path / "stopped.jsonl"
    script = Path(sys.executable).parent / "pegboard"
    command = [str(script), *tool.arguments(*options, "--window", "1")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env, cwd="/") as process:
        while process.poll() is None and (not tool.output.exists() or tool.output.read_bytes().count(b"\n") < 8):
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        errors = process.stderr.read()
    assert process.returncode == 130, errors
    found = tool.records
    assert 8 <= len(found) < count
    assert f"stopped: {len(found)} of {count} requests are answered" in errors
    assert "--resume" in errors
    assert "Traceback" not in errors
    with tool.output.open("r+b") as half:
        half.truncate(half.seek(-9, os.SEEK_END) or 0)
    resumed = tool(*options, "--resume")
    assert resumed.exit_code == 0, resumed.stderr
    assert f"{len(found) - 1} of {count} requests are answered" in resumed.stderr
    assert {name: one["text"] for name, one in tool.records.items()} == expected
