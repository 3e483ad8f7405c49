"""Broken plugins: each is told by name, with its place, and before anything slow begins."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from pegboard.core.cli.main import app
from pegboard.core.config.compose import ResolvedConfig, compose
from pegboard.core.config.early import import_chosen, on_engine_side
from pegboard.core.config.select import Selection
from pegboard.core.engine import engine as engine_module
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.contracts import ADMISSION_GATE, API
from pegboard.core.interfaces.errors import ConfigError, PluginError
from pegboard.core.registry.registry import Registry
from pegboard.core.server import serve as server
from pegboard.toolkit.http.app import build_app

GATE = """
from pegboard.core.interfaces import OPEN, AdmissionGate, GateOptions


class Gate(AdmissionGate):
    def concerns(self, req):
        return True

    def enter(self, req):
        return OPEN

    def poll(self, blocked):
        return {}

    def cancel(self, req):
        pass

"""
WHOSE = "gates: admission_gate 'late' of plugin 'acme' (acme-gates 2.1): "


@pytest.fixture
def gate(site: Any) -> Any:
    """Install the gate `late` with this source and choose it; what composes a config with it."""

    def install(source: str, *values: tuple[str, Any], options: str = "") -> ResolvedConfig:
        site.modules |= {"acme_late", "acme_late.gate"}
        (site.folder / "acme_late").mkdir()
        (site.folder / "acme_late" / "__init__.py").touch()
        (site.folder / "acme_late" / "gate.py").write_text(source)
        config = {"config": repr(options)} if options else {}
        provider = site.provider("admission_gate", "late", "acme_late.gate:Gate", **config)
        site.install("acme-gates", "2.1", acme=site.plugin("acme", provider))
        return compose(data={"model": {"path": "x"}, "gates": ["late"], **dict(values)}, env={})

    return install


@pytest.mark.parametrize(
    ("source", "message", "line"),
    [
        ("import json\n\njson.loads('{')\n", "importing acme_late.gate:Gate failed: JSONDecodeError: Expecting", 3),
        ("import sys\nsys.exit('no licence')\n", "importing acme_late.gate:Gate failed: SystemExit: no licence", 2),
        ("def broken(:\n", "importing acme_late.gate:Gate failed: SyntaxError: ", 1),
        ("Gate = 3\n", "acme_late.gate:Gate is not a subclass of ", 0),
        (GATE.replace("def enter", "def entr"), "acme_late.gate:Gate lacks enter, which pegboard.core.interfaces", 0),
        (
            f"{GATE}    def __init__(self, options):\n        pass\n",
            "acme_late.gate:Gate must be built as Gate(options, context), but its constructor does not take these: too",
            0,
        ),
    ],
)
def test_what_cannot_be_built_is_told_before_it_is_tried(gate: Any, source: str, message: str, line: int) -> None:
    with pytest.raises(PluginError) as caught:
        import_chosen(gate(source))
    error = caught.value
    assert str(error).startswith(WHOSE + message)
    assert (error.plugin, error.distribution, error.version) == ("acme", "acme-gates", "2.1")
    assert error.path == "gates"
    if line:
        assert error.place.endswith(f"acme_late/gate.py:{line}")
        assert error.place in str(error)
        assert error.__cause__ is not None


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("    def __init__(self, options, ctx):\n        {}['key']\n", "building it failed: KeyError: 'key' ("),
        (
            "    @classmethod\n    def supports(cls, *_):\n        return 1 / 0\n",
            "supports failed: ZeroDivisionError: ",
        ),
        (
            "    @classmethod\n    def supports(cls, *_):\n        return False\n",
            "supports failed: TypeError: it answered ",
        ),
    ],
)
def test_what_raises_when_it_is_chosen_is_told_with_its_name(gate: Any, source: str, message: str) -> None:
    resolved = gate(GATE + source)
    import_chosen(resolved)
    with pytest.raises(PluginError) as caught:
        Selection(resolved).choose_all(ADMISSION_GATE, None)[0].build(None)  # type: ignore[misc]
    assert str(caught.value).startswith(WHOSE + message)
    assert caught.value.__cause__ is not None
    if "answered" not in message:
        last = (GATE + source).count("\n")
        assert caught.value.place.endswith(f"acme_late/gate.py:{last}")


def test_what_a_plugin_says_to_the_operator_passes(gate: Any) -> None:
    source = "    def __init__(self, options, ctx):\n        raise ConfigError('gates: too late')\n"
    resolved = gate(f"from pegboard.core.interfaces import ConfigError\n{GATE}{source}")
    with pytest.raises(ConfigError, match=r"^gates: too late$"):
        Selection(resolved).choose_all(ADMISSION_GATE, None)[0].build(None)  # type: ignore[misc]


def test_a_validator_that_breaks_is_its_plugins(gate: Any) -> None:
    options = (
        "from pydantic import field_validator\n"
        "class Options(GateOptions):\n"
        "    least: int = 0\n"
        "    @field_validator('least')\n"
        "    @classmethod\n"
        "    def check(cls, value):\n"
        "        return {}['key']\n"
    )
    chosen = ("gates", [{"use": "late", "least": 3}])
    with pytest.raises(PluginError) as caught:
        gate(GATE + options, chosen, options="acme_late.gate:Options")
    assert str(caught.value).startswith(f"{WHOSE}checking its options failed: KeyError: 'key' (")
    assert caught.value.place.endswith("gate.py:" + str((GATE + options).count("\n")))


@pytest.mark.parametrize(
    "source", ["raise SystemExit('out')", "import sys\nsys.exit(3)", "class E(BaseException): pass\nraise E"]
)
def test_a_record_that_exits_ends_itself_only(site: Any, source: str) -> None:
    site.install("acme-gates", "2.1", acme=source)
    registry = Registry.discover()
    (broken,) = registry.broken
    assert broken.name == "acme"
    assert f"acme_gates_acme.py:{source.count(chr(10)) + 1}" in str(broken)
    assert registry.get("prefix_cache", "radix") is not None


def test_config_check_says_all_that_is_broken(gate: Any, site: Any, tmp_path: Path) -> None:
    gate("1 / 0\n")
    site.install("other", tools=site.plugin("tools", site.provider("sampler", "mine", "nowhere:Sampler")))
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model": {"path": "x"}, "gates": ["late"], "sampler": {"use": "mine"}}))
    result = CliRunner().invoke(app, ["config", "check", "--json", str(path)])
    assert result.exit_code == 2
    problems = json.loads(result.stdout)["problems"]
    assert [(one["path"], one["message"].partition(":")[0]) for one in problems] == [
        ("sampler.use", "sampler 'mine' of plugin 'tools' (other 1.0)"),
        ("gates", "admission_gate 'late' of plugin 'acme' (acme-gates 2.1)"),
    ]
    with pytest.raises(PluginError, match=r"nowhere:Sampler failed(.|\n)*ZeroDivisionError"):
        CliRunner().invoke(app, ["config", "check", str(path)], catch_exceptions=False)


def test_config_check_builds_the_hooks(site: Any) -> None:
    record = site.plugin("acme").replace("providers=()", "hooks=('acme_gates_acme:Hooks',)")
    site.install(
        "acme-gates", "2.1", acme=f"{record}\nclass Hooks:\n    def __init__(self):\n        raise SystemExit(1)\n"
    )
    model = ["--set", "model.path=x"]
    with pytest.raises(PluginError, match=r"plugin 'acme' \(acme-gates 2.1\) cannot be built: SystemExit: 1 \(.*py:"):
        CliRunner().invoke(app, ["config", "check", *model, "--set", "plugins.acme=true"], catch_exceptions=False)
    assert CliRunner().invoke(app, ["config", "check", *model]).exit_code == 0, "its hooks are not asked for"


def test_an_automatic_candidate_that_is_not_reached_stops_nothing(site: Any) -> None:
    provider = site.provider("sampler", "mine", "nowhere:Sampler")
    site.install("other", tools=site.plugin("tools", provider))
    import_chosen(compose(data={"model": {"path": "x"}}, env={}), lambda contract: contract.name == "sampler")


def test_a_pooler_is_looked_at_where_it_is_named(site: Any) -> None:
    """Only some runners need one, so an automatic one waits until the runner is known."""
    provider = site.provider("pooler", "mine", "nowhere:Pooler", rank=1000)
    site.install("other", tools=site.plugin("tools", provider))
    resolved = compose(data={"model": {"path": "x"}}, env={})
    assert resolved.candidates["pooler"][0].name == "mine"
    import_chosen(resolved, on_engine_side)
    with pytest.raises(PluginError, match="nowhere:Pooler failed"):
        import_chosen(compose(data={"model": {"path": "x"}, "pooler": {"use": "mine"}}, env={}), on_engine_side)


def test_generate_does_without_parsers(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parsers = [
        site.provider(contract, "mine", "nowhere:It", rank=1000) for contract in ("tool_parser", "reasoning_parser")
    ]
    site.install("other", tools=site.plugin("tools", *parsers))

    class Reached(Exception):
        pass

    def stop(resolved: ResolvedConfig) -> None:
        raise Reached

    monkeypatch.setattr(engine_module, "Engine", stop)
    with pytest.raises(Reached):
        CliRunner().invoke(app, ["generate", "hello", "--set", "model.path=x"], catch_exceptions=False)


def test_an_engine_starts_nothing_with_a_broken_plugin(gate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates are built behind the weights, but imported before the model is even looked for."""
    with pytest.raises(PluginError, match="ZeroDivisionError"):
        Engine(gate("1 / 0\n"))


def test_a_server_starts_nothing_with_a_broken_api(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install("other", tools=site.plugin("tools", site.provider("api", "mine", "nowhere:Api")))
    monkeypatch.setattr(server, "Supervisor", lambda *_, **__: None)
    monkeypatch.setattr(server.asyncio, "Runner", lambda **_: pytest.fail("it has started"))  # type: ignore[attr-defined]
    resolved = compose(data={"model": {"path": "x"}, "apis": ["mine"], "server": {"port": 0}}, env={})
    with pytest.raises(PluginError, match=r"^apis: api 'mine' of plugin 'tools' \(other 1.0\): importing nowhere:Api"):
        server._Server(resolved, None, "", None)  # type: ignore[arg-type]
    assert "nowhere" not in sys.modules


@pytest.mark.parametrize(("body", "error"), [("1 / 0", "ZeroDivisionError"), ("return []", "it returned a list")])
def test_routes_that_raise_are_told_with_their_plugin(site: Any, body: str, error: str) -> None:
    head = "from pegboard.core.interfaces import ApiRouter\nclass Api(ApiRouter):\n"
    source = f"{head}    def routes(self):\n        {body}\n"
    (site.folder / "acme_api.py").write_text(source)
    site.modules.add("acme_api")
    site.install("other", tools=site.plugin("tools", site.provider("api", "mine", "acme_api:Api")))
    choice = Selection(compose(data={"model": {"path": "x"}, "apis": ["mine"]}, env={})).choose_all(API, None)[0]  # type: ignore[misc]
    told = {"mine": choice.record.told("routes()")}
    with pytest.raises(PluginError, match=rf"^apis: api 'mine' of plugin 'tools' .*: routes\(\) failed: .*{error}"):
        build_app([("mine", choice.build(SimpleNamespace(client=None)))], told=told.get)
