"""The command line: what it prints, how it fails, and how quickly it answers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pegboard.core.cli.main import app, main
from pegboard.core.config.compose import ResolvedConfig
from pegboard.core.interfaces.errors import ConfigError, PegboardError, PluginError, Temporary

ROOT = Path(__file__).parents[3]
HEAVY = ("torch", "transformers", "fastapi", "zmq", "triton", "gguf", "numpy")


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def run_json(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json").stdout)


def pegboard(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The real script, in a process of its own."""
    script = Path(sys.executable).parent / "pegboard"
    env = {**os.environ, **environment}
    return subprocess.run([script, *arguments], capture_output=True, text=True, check=False, env=env, cwd="/")


class TestLightness:
    @pytest.mark.parametrize(
        "arguments",
        [
            ["--help"],
            ["--version"],
            ["plugins", "list"],
            ["plugins", "show", "lpm"],
            ["config", "--help"],
            ["chat", "--help"],
            ["generate", "--help"],
            ["bench", "serve", "--help"],
            ["bench", "step", "--help"],
        ],
    )
    def test_nothing_heavy_is_imported(self, arguments: list[str]) -> None:
        code = (
            f"import sys; sys.argv = ['pegboard', *{arguments!r}]\n"
            "from pegboard.core.cli.main import main\n"
            "try:\n    main()\nexcept SystemExit: pass\n"
            f"sys.exit(str([name for name in {HEAVY!r} if name in sys.modules]))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd="/")
        assert done.stderr.strip() == "[]"
        assert done.stdout


class TestErrors:
    @pytest.mark.parametrize(("error", "code"), [(PegboardError("so it is"), 2), (Temporary("so it is"), 1)])
    def test_what_another_start_may_mend_has_another_exit_code(
        self, error: PegboardError, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def fails() -> None:
            raise error

        monkeypatch.setattr("pegboard.core.cli.main.app", fails)
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == code
        assert capsys.readouterr().err == "error: so it is\n"

    def test_a_config_error_is_shown_without_traceback(self) -> None:
        done = pegboard("config", "check", "--set", "model.path=x", "--set", "prefix_cache.use=radxi")
        assert done.returncode == 2
        assert done.stderr.startswith("error: prefix_cache.use: 'radxi' is not installed; did you mean 'radix'")
        assert "Traceback" not in done.stderr

    def test_the_environment_counts(self) -> None:
        done = pegboard("config", "check", "--set", "model.path=x", PEGBOARD__SERVER__PORT="abc")
        assert done.returncode == 2
        assert "server.port: 'abc' is wrong" in done.stderr
        assert "[PEGBOARD__SERVER__PORT]" in done.stderr

    def test_a_missing_model_has_a_hint(self) -> None:
        done = pegboard("config", "check")
        assert done.returncode == 2
        assert (
            done.stderr.splitlines()[-1]
            == "hint: name a model, such as Qwen/Qwen3-0.6B or a directory, or a config file"
        )

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["simulate", "rondom"], "workload 'rondom' is unknown; did you mean 'random'? known: "),
            (["simulate", "random:inpt=1"], "has no parameter 'inpt'; did you mean 'input'? it has: "),
            (["simulate", "random", "--cost", "zzz"], "cost model 'zzz' is unknown; known: "),
            (["simulate", "random", "--png", "/no/such/x.png"], "--png: there is no directory /no/such"),
            (["simulate", "random", "--json", "/"], "--json: / is a directory"),
            (["plugins", "check", "fcfs", "--report", "/"], "--report: / is a directory"),
            (["plugins", "new", "my_thing", "--directory", "/dev/null"], "--directory: /dev/null/my-thing: "),
            (["plugins", "matrix", "/"], "/ cannot be read: Is a directory"),
        ],
    )
    def test_files_and_names_that_do_not_fit(self, arguments: list[str], message: str) -> None:
        with pytest.raises(PegboardError) as caught:
            run(*arguments)
        assert message in str(caught.value)

    @pytest.mark.parametrize("text", ["{", "[1]", '{"a": 1}', '{"providers": [{"x": 1}]}'])
    def test_what_is_no_report_is_not_shown(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(PegboardError, match=r"a\.json is not a conformance report"):
            run("plugins", "matrix", str(tmp_path / "a.json"))

    def test_a_pipe_that_closes_is_no_error(self) -> None:
        script = Path(sys.executable).parent / "pegboard"
        done = subprocess.run(
            ["sh", "-c", f"{script} config schema | head -c 1"], capture_output=True, text=True, check=False, cwd="/"
        )
        assert (done.stdout, done.stderr) == ("{", "")

    def test_other_errors_are_not_hidden(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail() -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr("pegboard.core.cli.main.app", fail)
        with pytest.raises(RuntimeError, match="a bug"):
            main()


class TestConfig:
    def test_check_says_ok(self) -> None:
        said = run("config", "check", str(ROOT / "examples" / "quickstart.yaml")).stdout
        assert said.startswith("ok (not checked: the device and its memory, the weights, ")

    def test_check_as_json(self) -> None:
        result = run("config", "check", "--json")
        assert result.exit_code == 2
        (problem,) = json.loads(result.stdout)["problems"]
        assert problem["path"] == "model.path"
        fine = run_json("config", "check", "org/model")
        assert (fine["ok"], fine["problems"]) == (True, [])
        assert fine["not_checked"][0] == "the model, which is to be fetched"

    def test_check_looks_at_the_files_that_a_config_names(self, tmp_path: Path) -> None:
        (tmp_path / "model").mkdir()
        keys, certificate = f"server.api_key_file={tmp_path}/keys", f"server.tls.cert_file={tmp_path}/tls.pem"
        result = run("config", "check", str(tmp_path / "model"), "--set", keys, "--set", certificate, "--json")
        problems = {one["path"]: one["message"] for one in json.loads(result.stdout)["problems"]}
        assert list(problems) == ["server.api_key_file", "server.tls.cert_file", "model.path"]
        assert "model has no config.json" in problems["model.path"]
        assert result.exit_code == 2

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("qwen3", "there is no directory '{}/qwen3' (did you mean '{}/Qwen3'?)"),
            ("none.gguf", "no such GGUF file: {}/none.gguf"),
            ("text.gguf", "{}/text.gguf is not a GGUF file"),
            ("server.conf", "is a file, and not a directory; a config file would end in .yaml, .yml, .toml, .json"),
            ("Qwen3", "Qwen3 has no config.json"),
        ],
    )
    def test_a_wrong_path_is_an_error_of_the_path(self, tmp_path: Path, name: str, message: str) -> None:
        (tmp_path / "Qwen3").mkdir()
        for file in ("text.gguf", "server.conf"):
            (tmp_path / file).write_text("text")
        with pytest.raises(ConfigError) as caught:
            run("config", "check", str(tmp_path / name))
        (problem,) = caught.value.problems
        assert (problem.path, problem.origin) == ("model.path", "argument")
        assert message.replace("{}", str(tmp_path)) in problem.message

    def test_show_prints_value_and_origin(self, tmp_path: Path) -> None:
        path = tmp_path / "a.yaml"
        path.write_text("model:\n  path: x\n")
        lines = run("config", "show", str(path), "--set", "server.port=31000").stdout.splitlines()
        rows = {line.split()[0]: line.split()[1:3] for line in lines}
        assert rows["model.path"] == ["'x'", f"{path}:2"]
        assert rows["server.port"] == ["31000", "--set"]
        assert rows["prefix_cache.use"] == ["'radix'", "default"]

    def test_show_as_json(self) -> None:
        shown = {one["path"]: one for one in run_json("config", "show", "--set", "model.path=x")}
        assert shown["server.port"] == {"path": "server.port", "value": 30000, "origin": "default", "note": ""}

    def test_show_explains_short_options(self) -> None:
        options = ("--host", "::1", "--port", "8000", "--api-key", "abc", "--served-name", "a", "--served-name", "b")
        shown = {one["path"]: (one["value"], one["origin"]) for one in run_json("config", "show", "org/it", *options)}
        assert shown["model.path"] == ("org/it", "argument")
        assert shown["model.served_name"] == (["a", "b"], "--served-name")
        assert shown["server.host"] == ("::1", "--host")
        assert shown["server.port"] == (8000, "--port")
        assert shown["server.api_key"] == (["***"], "--api-key")

    def test_show_warns_of_variables_that_are_not_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PEGBOARD_SERVER_PORT", "31000")
        result = run("config", "show", "org/it")
        assert "PEGBOARD_SERVER_PORT is not read; PEGBOARD__SERVER__PORT sets server.port" in result.stderr

    def test_schema_is_json(self) -> None:
        found = json.loads(run("config", "schema").stdout)
        assert "radix" in found["properties"]["prefix_cache"]["discriminator"]["mapping"]


class TestPlugins:
    def test_list(self) -> None:
        result = run("plugins", "list")
        assert result.exit_code == 0
        assert any(line.split()[:3] == ["prefix_cache", "radix", "cache_radix"] for line in result.stdout.splitlines())

    def test_in_a_pipe_a_table_is_lines_of_words(self) -> None:
        head, *rows = run("plugins", "list").stdout.splitlines()
        assert head.split() == ["contract", "provider", "plugin", "from"]
        assert all(len(row.split()) >= 5 and "\033" not in row and "─" not in row for row in rows)

    def test_list_as_json(self) -> None:
        found = run_json("plugins", "list")
        assert set(found) == {"providers", "plugins", "broken", "conflicts"}
        (radix,) = [one for one in found["providers"] if one["provider"] == "radix"]
        assert radix["provides"] == ["reuse"]
        assert radix["from"].startswith("pegboard ")

    def test_list_shows_what_is_broken_and_in_conflict(self, site: Any) -> None:
        site.install("acme-bad", "1.0", bad="1 / 0")
        assert "! bad (acme-bad 1.0) is broken: ZeroDivisionError" in run("plugins", "list").stdout
        site.install("acme-cache", "2.1", acme=site.plugin("acme", site.provider("prefix_cache", "radix")))
        result = run("plugins", "list")
        assert result.exit_code == 1
        assert "! two prefix_cache providers are called 'radix'" in result.stdout

    def test_show_by_provider_plugin_and_contract(self) -> None:
        (radix,) = run_json("plugins", "show", "radix")
        assert radix["options"][0]["path"] == "prefix_cache.eviction"
        names = [one["provider"] for one in run_json("plugins", "show", "policy_cache_aware")]
        assert names == ["lpm", "dfs-weight"]
        (torch,) = run_json("plugins", "show", "sampler/torch")
        assert torch["contract"] == "sampler"
        assert re.search(r"requires +prefix_cache\.reuse", run("plugins", "show", "lpm").stdout)

    def test_fields_of_bodies_are_shown(self, site: Any) -> None:
        body = "(BodyField('room', int, meaning='Where.'), BodyField('wait', float, each=False))"
        site.install("acme", "1.0", acme=site.plugin("acme", site.provider("admission_gate", "far", body=body)))
        body = "(BodyField('room', bytes),)"
        site.install("bad", "1.0", bad=site.plugin("bad", site.provider("admission_gate", "near", body=body)))
        (far,) = run_json("plugins", "show", "far")
        assert far["body"] == [
            {"name": "room", "type": "integer or list of integers", "meaning": "Where."},
            {"name": "wait", "type": "number", "meaning": ""},
        ]
        assert (
            "  room (in request bodies): integer or list of integers. Where.\n" in run("plugins", "show", "far").stdout
        )
        assert "has the kind <class 'bytes'>" in run("plugins", "show", "near").stdout

    def test_a_plugin_of_hooks_alone_is_listed_and_shown(self, site: Any) -> None:
        hooks = "summary='counts steps', hooks=('acme.hooks:Steps', 'acme.hooks:Times')"
        site.install("acme-steps", "1.2", steps=site.plugin("steps").replace("providers=()", hooks))
        [row] = [line for line in run("plugins", "list").stdout.splitlines() if "acme-steps" in line]
        assert " ".join(row.split()) == "(hooks) acme.hooks:Steps, acme.hooks:Times steps acme-steps 1.2 counts steps"
        shown = run("plugins", "show", "steps").stdout
        assert shown.startswith("steps: counts steps\n")
        assert re.search(r"hooks +acme\.hooks:Steps, acme\.hooks:Times\n", shown)
        [plain] = run_json("plugins", "show", "steps")
        assert plain["hooks"] == ["acme.hooks:Steps", "acme.hooks:Times"]
        assert "hooks       pegboard.plugins.metrics_prometheus" in run("plugins", "show", "metrics_prometheus").stdout

    def test_an_unknown_name_has_a_suggestion(self) -> None:
        with pytest.raises(PluginError, match="no plugin or provider 'radxi' is installed; did you mean 'radix'"):
            run("plugins", "show", "radxi")

    def test_matrix_shows_reports(self, tmp_path: Path) -> None:
        entry = {
            "contract": "prefix_cache",
            "provider": "radix",
            "class": "x",
            "distribution": "pegboard",
            "distribution_version": "0.1.0",
            "capabilities": ["reuse"],
            "verdict": "passed",
            "counts": {"passed": 31, "skipped": 2},
        }
        first, second = tmp_path / "a.json", tmp_path / "b.json"
        first.write_text(json.dumps({"format": 1, "providers": [entry], "errors": []}))
        second.write_text(json.dumps({"format": 1, "providers": [{**entry, "provider": "none"}], "errors": []}))
        text = run("plugins", "matrix", str(first), str(second)).stdout
        assert "31 passed, 2 skipped" in text
        broken = {"class": "t.py::TestIt", "message": "no module"}
        first.write_text(json.dumps({"format": 1, "providers": [entry], "errors": [broken]}))
        assert "! t.py::TestIt cannot be run: no module" in run("plugins", "matrix", str(first)).stdout
        assert [one["provider"] for one in run_json("plugins", "matrix", str(first), str(second))["providers"]] == [
            "radix",
            "none",
        ]

    def test_matrix_without_a_report_says_how_to_make_one(self, tmp_path: Path) -> None:
        with pytest.raises(PegboardError, match="write one with: pytest --conformance-report="):
            run("plugins", "matrix", str(tmp_path / "none.json"))

    def test_check_runs_the_suite_and_matrix_shows_it(self, tmp_path: Path) -> None:
        report = tmp_path / "report.json"
        done = pegboard("plugins", "check", "fcfs", "token_allocator/stack", "--report", str(report))
        assert done.returncode == 0, done.stdout + done.stderr
        verdicts = [
            (one["provider"], one["verdict"]) for one in run_json("plugins", "matrix", str(report))["providers"]
        ]
        assert verdicts == [("fcfs", "passed"), ("stack", "passed")]

    def test_check_as_json(self) -> None:
        done = pegboard("plugins", "check", "fcfs", "--json")
        assert done.returncode == 0
        assert json.loads(done.stdout)["providers"][0]["provider"] == "fcfs"

    def test_check_of_a_contract_without_a_suite(self) -> None:
        with pytest.raises(PluginError, match="no conformance suite yet for model_source"):
            run("plugins", "check", "hf")


class TestFlags:
    """Flags of vLLM and SGLang, and what is told of them."""

    @pytest.mark.parametrize(
        ("words", "answer"),
        [
            (["serve", "x", "--max-model-len", "8192"], "use --set model.context_length=..."),
            (["serve", "x", "--max_model_len=8192"], "use --set model.context_length=..."),
            (["serve", "x", "--tensor-parallel-size", "2"], "use --set parallel.tensor=..."),
            (["serve", "x", "-tp", "2"], "use --set parallel.tensor=..."),
            (
                ["serve", "x", "--ep", "2"],
                "not supported yet: processes share every expert, parallel.tensor",
            ),
            (["serve", "--model", "x"], "name it on the command line: pegboard serve MODEL"),
            (["chat", "x", "--gpu-memory-utilization", "0.9"], "use --set memory.gpu_share=..."),
            (["generate", "Hi", "--port", "1"], "use --set server.port=..."),
            (["bench", "offline", "x", "--page-size", "4"], "use --set memory.page_size=..."),
            (["serve", "x", "--prot", "1"], "--port"),
            (["serve", "x", "--foo"], "every key of the config can be set with --set KEY=VALUE"),
        ],
    )
    def test_an_unknown_flag_is_answered(self, words: list[str], answer: str) -> None:
        result = run(*words)
        assert result.exit_code == 2
        assert answer in re.sub(r"[\s│]+", " ", result.stderr)

    def test_commands_without_a_config_promise_nothing(self) -> None:
        assert "--set" not in run("bench", "serve", "--tensor-parallel-size", "2").stderr


class TestServe:
    def test_serve_composes_and_starts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import pegboard.core.server.serve

        started: list[ResolvedConfig] = []
        monkeypatch.setattr(pegboard.core.server.serve, "serve", started.append)
        run("serve", str(ROOT / "examples" / "quickstart.yaml"), "--set", "server.port=31000")
        (resolved,) = started
        assert resolved.engine.server.port == 31000
        assert resolved.origins["server.port"] == "--set"

    def test_a_bad_config_starts_nothing(self) -> None:
        with pytest.raises(PegboardError, match="there is no such file"):
            run("serve", "missing.yaml")

    def test_generate_answers_one_prompt(self, tmp_path: Path) -> None:
        from pegboard.conformance.checkpoints import tiny_checkpoint

        model = f"model.path={tiny_checkpoint(tmp_path, 'llama')}"
        small = ("--set", "memory.max_total_tokens=512", "--set", "attention.use=torch", "--max-new-tokens", "4")
        plain = run("generate", "The quick", "--set", model, *small)
        answer = run_json("generate", "The quick", "--set", model, *small)
        assert plain.stdout == answer["text"] + "\n"
        assert answer["prompt_tokens"] > 0
        assert 1 <= len(answer["token_ids"]) <= 4
        chat = run_json("generate", "The quick", "--set", model, *small, "--chat")
        assert chat["prompt_tokens"] > answer["prompt_tokens"]
