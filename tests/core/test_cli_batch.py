"""`pegboard generate --file`: checked first, answered as it goes, stopped and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pegboard.core.commands.batch import BadLine, Source, check, make_params, open_output, parse_line
from pegboard.core.interfaces.errors import PegboardError
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.testing.checkpoints import tiny_checkpoint

DEFAULTS = SamplingParams(max_new_tokens=8, temperature=0.0)


class TestLines:
    def test_a_prompt(self) -> None:
        line = parse_line('{"prompt": "Hi", "id": 7, "sampling_params": {"temperature": 1}}', 3)
        assert (line.id, line.index, line.prompt, line.messages) == ("7", 3, "Hi", None)
        params = make_params(DEFAULTS, line.params)
        assert (params.temperature, params.max_new_tokens) == (1.0, 8)

    def test_without_an_id_it_is_the_number(self) -> None:
        assert parse_line('{"prompt": [1, 2]}', 3).id == "3"

    def test_openais_batch_format(self) -> None:
        line = parse_line(
            json.dumps(
                {
                    "custom_id": "x",
                    "method": "POST",
                    "url": "/v1/chat/completions",
                    "body": {
                        "messages": [{"role": "user", "content": "Hi"}],
                        "max_tokens": 3,
                        "stop": "b",
                        "model": "m",
                    },
                }
            ),
            0,
        )
        assert line.id == "x"
        assert line.messages == [{"role": "user", "content": "Hi"}]
        params = make_params(DEFAULTS, line.params)
        assert (params.max_new_tokens, params.stop) == (3, ("b",))

    def test_a_grammar(self) -> None:
        line = parse_line('{"prompt": "a", "sampling_params": {"grammar": {"kind": "regex", "source": "a+"}}}', 0)
        grammar = make_params(DEFAULTS, line.params).grammar
        assert grammar is not None
        assert (grammar.kind, grammar.source) == ("regex", "a+")

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("{", "no JSON"),
            ("[" * 100_000, "no JSON"),
            ("[1]", "a JSON object"),
            ("{}", "one of prompt and messages"),
            ('{"prompt": "a", "messages": [{}]}', "not both"),
            ('{"prompt": ""}', "not empty"),
            ('{"prompt": [true]}', "list of token ids"),
            ('{"messages": []}', "not empty"),
            ('{"messages": ["a"]}', "list of objects"),
            ('{"prompt": "a", "id": []}', "the id"),
            ('{"prompt": "a", "id": ""}', "the id"),
            ('{"prompt": "a", "sampling_params": 1}', "an object"),
            ('{"prompt": "a", "sampling_params": {"warmth": 1}}', "sampling_params.warmth is unknown"),
            ('{"prompt": "a", "sampling_params": {"temperature": "x"}}', "temperature"),
            ('{"prompt": "a", "sampling_params": {"top_p": 7}}', "top_p"),
            ('{"prompt": "a", "sampling_params": {"grammar": {"kind": "poem"}}}', "grammar"),
            ('{"prompt": "a", "promt": "b"}', "unknown key 'promt'"),
            ('{"body": {"messages": [{}], "n": 2}}', "one answer per line"),
        ],
    )
    def test_bad_lines(self, text: str, why: str) -> None:
        with pytest.raises(BadLine, match=why):
            make_params(DEFAULTS, parse_line(text, 0).params)


class TestFiles:
    def write(self, path: Path, *lines: str) -> Path:
        path.write_text("\n".join(lines) + "\n")
        return path

    def test_everything_wrong_is_told_at_once(self, tmp_path: Path) -> None:
        path = self.write(tmp_path / "in.jsonl", '{"prompt": "a", "id": 1}', "", "{", '{"prompt": "b", "id": "1"}')
        with pytest.raises(PegboardError) as caught:
            check(Source(path), DEFAULTS, skip_bad=False)
        told = str(caught.value)
        assert f"{path}:3: no JSON" in told
        assert f"{path}:4: the id '1' is that of line 1" in told
        count, bad = check(Source(path), DEFAULTS, skip_bad=True)
        assert count == 3
        assert set(bad) == {3, 4}

    def test_no_such_file(self, tmp_path: Path) -> None:
        with pytest.raises(PegboardError, match="there is no"):
            Source(tmp_path / "none")

    def test_an_output_is_not_overwritten_by_accident(self, tmp_path: Path) -> None:
        path = self.write(tmp_path / "out.jsonl", '{"id": "a"}')
        with pytest.raises(PegboardError, match="--resume continues it, --overwrite starts anew"):
            open_output(path, resume=False, overwrite=False)
        assert path.read_text() == '{"id": "a"}\n'

    def test_resume_drops_a_half_written_line(self, tmp_path: Path) -> None:
        path = tmp_path / "out.jsonl"
        path.write_text('{"id": "a"}\n{"id": "b"}\n{"id": "c", "te')
        stream, done = open_output(path, resume=True, overwrite=False)
        with stream:
            assert done == {"a", "b"}
            stream.write('{"id": "c"}\n')
        assert path.read_text() == '{"id": "a"}\n{"id": "b"}\n{"id": "c"}\n'

    def test_resume_of_something_else_changes_nothing(self, tmp_path: Path) -> None:
        path = self.write(tmp_path / "out.jsonl", '{"id": "a"}', "my diary", "more")
        before = path.read_text()
        with pytest.raises(PegboardError, match=r"out\.jsonl:2 is no record"):
            open_output(path, resume=True, overwrite=False)
        assert path.read_text() == before

    def test_resume_without_an_output_begins(self, tmp_path: Path) -> None:
        stream, done = open_output(tmp_path / "new" / "out.jsonl", resume=True, overwrite=False)
        stream.close()
        assert not done

    def test_overwrite_and_resume_exclude_each_other(self, tmp_path: Path) -> None:
        with pytest.raises(PegboardError, match="exclude each other"):
            open_output(tmp_path / "x", resume=True, overwrite=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama")


class TestRuns:
    def command(self, model: Path, file: Path, output: Path, *more: str) -> list[str]:
        return [
            *(str(Path(sys.executable).parent / "pegboard"), "generate", "--file", str(file), "--output", str(output)),
            *("--set", f"model.path={model}", "--set", "model.dtype=float32", "--set", "memory.max_total_tokens=1024"),
            *more,
        ]

    def run(self, *command: str, **more: Any) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", env=env, **more)

    def records(self, path: Path) -> dict[str, dict[str, Any]]:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found = {line["id"]: line for line in lines}
        assert len(found) == len(lines), "a request is answered twice"
        return found

    def make(self, path: Path, count: int) -> Path:
        """Prompts of different lengths; one cannot be served, because it is too long."""
        lines = [{"prompt": [5 + i % 90, 9, *[7] * (i % 11)], "id": f"r{i}"} for i in range(count)]
        lines[2]["prompt"] = [5] * 5000
        path.write_text("".join(json.dumps(one) + "\n" for one in lines))
        return path

    def test_stopped_and_resumed_is_as_undisturbed(self, model: Path, tmp_path: Path) -> None:
        file = self.make(tmp_path / "in.jsonl", 300)
        options = ("--max-new-tokens", "60")
        whole = self.run(*self.command(model, file, tmp_path / "whole.jsonl", *options))
        assert whole.returncode == 1, whole.stderr
        assert "300 requests, 1 failed" in whole.stdout
        expected = self.records(tmp_path / "whole.jsonl")
        assert len(expected) == 300
        assert expected["r2"]["error"]["code"] == "context_length_exceeded"

        output = tmp_path / "out.jsonl"
        command = self.command(model, file, output, *options)
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        ) as process:
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline and process.poll() is None:
                if output.exists() and output.read_text().count("\n") >= 20:
                    break
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            told, errors = process.communicate(timeout=60)
        assert process.returncode == 130, errors
        assert "run the same with --resume" in told
        before = self.records(output)
        assert 20 <= len(before) < 300
        assert self.run(*command).returncode == 2, "it is not overwritten"
        resumed = self.run(*command, "--resume")
        assert resumed.returncode == 0, resumed.stderr
        after = self.records(output)
        assert {name: one.get("text") for name, one in after.items()} == {
            name: one.get("text") for name, one in expected.items()
        }
        again = self.run(*command, "--resume")
        assert again.returncode == 0
        assert "all 300 requests" in again.stdout

    def test_stdin_and_bad_lines(self, model: Path, tmp_path: Path) -> None:
        text = '{"prompt": [5, 6]}\n{"prompt": 1}\n\n{"prompt": [7]}\n'
        command = self.command(model, Path("-"), tmp_path / "out.jsonl", "--max-new-tokens", "3")
        refused = self.run(*command, input=text)
        assert refused.returncode == 2
        assert "stdin:2: prompt is a text" in refused.stderr
        done = self.run(*command, "--skip-bad-lines", input=text)
        assert done.returncode == 1, done.stderr
        found = self.records(tmp_path / "out.jsonl")
        assert set(found) == {"0", "1", "2"}
        assert found["1"]["error"]["code"] == "bad_line"
        assert found["2"]["usage"] == {"prompt_tokens": 1, "completion_tokens": 3, "cached_tokens": 0}

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "what to answer?"),
            (["--file", "x"], "--file needs --output"),
            (["Hi", "--resume"], "go with --file"),
            (["--file", "/no/such", "--output", "/tmp/never", "--set", "model.path=x"], "there is no /no/such"),
        ],
    )
    def test_options_that_do_not_fit(self, arguments: list[str], message: str) -> None:
        done = self.run(str(Path(sys.executable).parent / "pegboard"), "generate", *arguments)
        assert done.returncode == 2
        assert message in done.stderr
        assert "Traceback" not in done.stderr
