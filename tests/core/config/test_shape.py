"""What plugins add to a config: switches and options, keys of sections, contracts. And what is refused of it."""

from __future__ import annotations

import abc
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field, field_validator

from pegboard.core.config.compose import ResolvedConfig, compose
from pegboard.core.config.early import import_chosen
from pegboard.core.config.select import Selection
from pegboard.core.config.shape import Shape
from pegboard.core.config.suggest import known_option
from pegboard.core.interfaces.contract import Cardinality, Contract
from pegboard.core.interfaces.errors import ConfigError, PluginError
from pegboard.core.interfaces.options import Options, PositiveInt, SectionFields
from pegboard.core.interfaces.plugin import Plugin, Provider, Requirement
from pegboard.core.registry.hooks import Hooks
from pegboard.core.registry.registry import Registry
from pegboard.toolkit.text.dotted_trees import value_at
from pegboard.tools.config.describe import core_keys_of, show
from pegboard.tools.config.schema import schema

HERE = __name__


class Interface(abc.ABC):
    def __init__(self, options: Options, ctx: int) -> None:
        self.options, self.ctx = options, ctx

    @classmethod
    def supports(cls, options: Options, ctx: int) -> str | None:
        return None if ctx else "it needs more than 0"

    @abc.abstractmethod
    def tint(self) -> str: ...


class Red(Interface):
    def tint(self) -> str:
        return f"red {self.options.section(ServerFields).paint_dir}"


class RedOptions(Options):
    shade: int = 1
    """How dark."""


class PaintSection(SectionFields):
    """What colour."""

    layers: PositiveInt = 2
    """How many."""


class ServerFields(SectionFields):
    paint_dir: str | None = None
    """Where paint is."""
    paint_limit: PositiveInt = 7
    """How much."""

    @field_validator("paint_dir")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith("/"):
            raise ValueError("paint_dir must be absolute")
        return value if value != "/0" else str(1 // 0)


class HookOptions(Options):
    every: float = Field(default=60.0, gt=0)
    """Seconds between two coats."""


class Painter:
    def __init__(self, options: HookOptions) -> None:
        self.options = options


class Shadowing(SectionFields):
    port: int = 1
    """Taken."""


PAINT: Contract[Interface, int] = Contract(
    "paint",
    "server.paint",
    Cardinality.ONE,
    f"{HERE}:Interface",
    "colours answers",
    capabilities={"washable": "comes off again"},
    section=f"{HERE}:PaintSection",
    default="red",
)
RED = Provider(
    "paint", "red", f"{HERE}:Red", "red paint", config=f"{HERE}:RedOptions", provides=frozenset({"washable"})
)
PAINTS = Plugin(
    "paints",
    "1",
    (RED,),
    hooks=(f"{HERE}:Painter",),
    summary="paints answers",
    config=f"{HERE}:HookOptions",
    fields={"server": f"{HERE}:ServerFields"},
    contracts=(PAINT,),
)


def registry(*plugins: Plugin, distribution: str = "acme-paints") -> Registry:
    return Registry.discover().with_plugins(*plugins, distribution=distribution, version="2.1")


def composed(*plugins: Plugin, distribution: str = "acme-paints", **data: Any) -> ResolvedConfig:
    values = {"model": {"path": "x"}, **data}
    return compose(data=values, env={}, registry=registry(*(plugins or (PAINTS,)), distribution=distribution))


def refused(*plugins: Plugin, **data: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        composed(*plugins, **data)
    return {problem.path: problem.message for problem in caught.value.problems}


def hooks_of(resolved: ResolvedConfig) -> list[Any]:
    hooks = Hooks.load(resolved.registry, resolved.plugin_options)
    return [built for loaded, built in hooks.built if loaded.plugin.name == "paints"]


ON: dict[str, Any] = {"plugins": {"paints": True}}


class TestSwitches:
    def test_an_installed_plugin_does_nothing_unasked(self) -> None:
        resolved = composed()
        assert hooks_of(resolved) == []
        assert "paint" not in resolved.candidates
        assert "server.paint_dir" not in {one.path for one in show(resolved)}

    @pytest.mark.parametrize("asked", [True, {}, None, {"every": 60}, "on"])
    def test_its_name_switches_it_on(self, asked: object) -> None:
        resolved = composed(plugins={"paints": asked})
        [painter] = hooks_of(resolved)
        assert painter.options.every == 60.0
        assert resolved.candidates["paint"][0].name == "red"

    def test_a_built_in_one_is_on_unless_its_record_says_otherwise(self) -> None:
        assert hooks_of(composed(distribution="pegboard"))
        quiet = Plugin("paints", "1", hooks=(f"{HERE}:Red",), hooks_on=False)
        assert hooks_of(composed(quiet, distribution="pegboard")) == []

    @pytest.mark.parametrize("off", [{"paints": False}, {"paints": "off"}, {"disable": ["paints"]}])
    def test_it_is_left_out(self, off: dict[str, object]) -> None:
        resolved = composed(plugins=off, distribution="pegboard")
        assert resolved.registry.plugin("paints") is None
        assert Hooks.load(resolved.registry, resolved.plugin_options).manager.is_blocked("paints")
        assert ResolvedConfig.from_json(resolved.to_json(), resolved.registry).lock == resolved.lock

    def test_options_are_checked_and_shown_with_their_origin(self) -> None:
        assert refused(plugins={"paints": {"every": 0}}) == {
            "plugins.paints.every": "0 is wrong: input should be greater than 0"
        }
        assert "did you mean 'every'" in refused(plugins={"paints": {"evry": 1}})["plugins.paints.evry"]
        assert refused(plugins={"paints": "red"}) == {
            "plugins.paints": "'red' must be a section: keys and values, or true or false"
        }
        shown = {one.path: (one.value, one.origin) for one in show(composed(plugins={"paints": {"every": 5}}))}
        assert shown["plugins.paints.every"] == (5.0, "program")
        assert {one.path: one.origin for one in show(composed(**ON))}["plugins.paints.every"] == "default"

    def test_a_plugin_without_options_takes_none(self) -> None:
        bare = Plugin("paints", "1")
        assert composed(bare, plugins={"paints": {}}).engine.plugins.model_dump()["paints"] is True
        message = "{'every': 1} is wrong: it must be true or false, since this plugin has no options"
        assert refused(bare, plugins={"paints": {"every": 1}}) == {"plugins.paints": message}

    def test_unknown_names_have_a_suggestion(self) -> None:
        for value in (True, False):
            [message] = refused(plugins={"paint": value}).values()
            assert message.startswith("no plugin 'paint' is installed; did you mean 'paints'? installed: ")

    def test_on_and_disabled_at_once_is_refused(self) -> None:
        message = "plugins.disable leaves out 'paints': take it from there to use it"
        assert refused(plugins={"paints": True, "disable": ["paints"]}) == {"plugins.paints": message}

    def test_a_broken_plugin_that_is_asked_for(self, site: Any) -> None:
        site.install("acme-broken", "1.0", broken="1 / 0")
        assert compose(data={"model": {"path": "x"}}, env={}).registry.broken
        with pytest.raises(ConfigError, match=r"plugins.broken: plugin broken .*ZeroDivisionError"):
            compose(data={"model": {"path": "x"}, "plugins": {"broken": True}}, env={})

    def test_a_later_source_replaces_the_switch(self, tmp_path: Path) -> None:
        path = tmp_path / "a.yaml"
        path.write_text("model: {path: x}\nplugins: {paints: {every: 5}}\n")
        off = compose([path], overrides=["plugins.paints=false"], env={}, registry=registry(PAINTS))
        assert off.registry.plugin("paints") is None
        env = {"PEGBOARD__PLUGINS__PAINTS__EVERY": "9"}
        assert hooks_of(compose([path], env=env, registry=registry(PAINTS)))[0].options.every == 9

    def test_a_wrong_options_model_names_the_plugin(self) -> None:
        with pytest.raises(
            PluginError, match=r"options .*:Red of plugin 'paints' \(acme-paints 2.1\) is not a subclass"
        ):
            composed(Plugin("paints", "1", config=f"{HERE}:Red"), **ON)


class TestFields:
    def test_they_are_keys_of_the_section(self) -> None:
        resolved = composed(**ON, server={"paint_dir": "/tmp", "port": 1})
        [painter] = hooks_of(resolved)
        server = painter.options.section(ServerFields)
        assert (server.paint_dir, server.paint_limit) == ("/tmp", 7)
        assert server is resolved.engine.server
        assert resolved.engine.server.port == 1
        shown = {one.path: one.origin for one in show(resolved)}
        assert (shown["server.paint_dir"], shown["server.paint_limit"]) == ("program", "default")

    def test_providers_read_them(self) -> None:
        resolved = composed(**ON, server={"paint_dir": "/tmp"})
        assert Selection(resolved).choose(PAINT, 1).build(1).tint() == "red /tmp"

    def test_without_a_config_there_are_defaults(self) -> None:
        assert HookOptions().section(ServerFields).paint_limit == 7

    def test_messages_are_those_of_the_section(self) -> None:
        found = refused(**ON, server={"paint_dir": "here", "paint_limit": 0, "paint_dri": 1})
        assert found == {
            "server.paint_dir": "paint_dir must be absolute",
            "server.paint_limit": "0 is wrong: input should be greater than 0",
            "server.paint_dri": "there is no such key; did you mean 'paint_dir' or 'paint' or 'paint_limit'?",
        }

    def test_a_key_of_a_plugin_that_is_off_says_which(self) -> None:
        wanted = {"paint_dir": "/tmp", "paint": {"use": "red"}}
        message = "it needs the plugin 'paints': set plugins.paints to true"
        assert refused(server=wanted) == dict.fromkeys(("server.paint_dir", "server.paint"), message)
        with pytest.raises(ConfigError) as caught:
            composed(distribution="pegboard", server=wanted, plugins={"paints": False})
        off = "it needs the plugin 'paints': it is switched off (plugins.disable or plugins.paints)"
        assert {problem.message for problem in caught.value.problems} == {off}

    def test_a_third_partys_record_is_not_imported_for_that(self, site: Any) -> None:
        site.install("acme", "1.0", acme="raise SystemExit('imported')")
        with pytest.raises(ConfigError, match=r"server.paint_dir: there is no such key"):
            compose(data={"model": {"path": "x"}, "server": {"paint_dir": 1}, "plugins": {"acme": False}}, env={})
        assert "acme_acme" not in sys.modules

    def test_they_are_in_schema_documents_and_hints(self) -> None:
        shape = Shape.of(registry(PAINTS), {"paints": True})
        keys = {key.path: key for key in core_keys_of(shape)}
        assert (keys["server.paint_limit"].type, keys["server.paint_limit"].meaning) == ("integer > 0", "How much.")
        assert keys["plugins.paints.every"].default == "60.0"
        assert known_option("--paint-limit", shape) == "use --set server.paint_limit=..."
        text = str(schema(registry(PAINTS)))
        assert all(name in text for name in ("paint_limit", "Seconds between two coats.", "How dark."))

    @pytest.mark.parametrize(
        ("plugin", "message"),
        [
            (Plugin("paints", "1", fields={"server": f"{HERE}:Shadowing"}), "declares server.port, which is a key of"),
            (
                Plugin("paints", "1", fields={"sever": f"{HERE}:ServerFields"}),
                "keys of sever, and there is no such sec",
            ),
            (Plugin("paints", "1", fields={"server": f"{HERE}:Nothing"}), "cannot be imported: AttributeError"),
            (Plugin("paints", "1", fields={"server": f"{HERE}:RedOptions"}), "is not a subclass of .*:SectionFields"),
        ],
    )
    def test_what_is_wrong_names_the_plugin(self, plugin: Plugin, message: str) -> None:
        with pytest.raises(PluginError, match=rf"plugin 'paints' \(acme-paints 2.1\) .*{message}|{message}") as caught:
            composed(plugin, **ON)
        assert "add 'paints' to plugins.disable" in str(caught.value)
        composed(plugin)

    def test_a_validator_that_fails_names_the_plugin(self) -> None:
        with pytest.raises(PluginError, match=r"plugin .paints. .* failed: ZeroDivisionError"):
            composed(**ON, server={"paint_dir": "/0"})

    def test_two_plugins_with_one_key(self) -> None:
        more = Plugin("more", "1", fields={"server": f"{HERE}:ServerFields"})
        with pytest.raises(
            PluginError, match=r"plugin 'more' .* declares server.paint_dir, and so does plugin 'paints'"
        ):
            composed(PAINTS, more, plugins={"paints": True, "more": True})
        composed(PAINTS, more, **ON)


class TestContracts:
    def test_its_providers_are_found_chosen_and_built(self) -> None:
        resolved = composed(**ON, server={"paint": {"shade": 3, "layers": 4}})
        assert resolved.named == frozenset({*resolved.named, "paint"})
        assert resolved.origins["server.paint.use"] == "default"
        choice = Selection(resolved).choose(PAINT, 1)
        assert (choice.name, choice.provides) == ("red", frozenset({"washable"}))
        assert choice.options.model_dump() == {"shade": 3}
        assert getattr(resolved.engine.server, "paint").layers == 4  # noqa: B009
        import_chosen(resolved, lambda contract: contract is PAINT)

    def test_errors_are_those_of_any_contract(self) -> None:
        assert refused(**ON, server={"paint": {"use": "rde"}}) == {
            "server.paint.use": "'rde' is not installed; did you mean 'red'? installed: red (acme-paints 2.1)"
        }
        assert "did you mean 'layers'" in refused(**ON, server={"paint": {"layer": 1}})["server.paint.layer"]
        with pytest.raises(ConfigError, match=r"red \(acme-paints 2.1\) cannot be used: it needs more than 0"):
            Selection(composed(**ON)).choose(PAINT, 0)

    def test_another_use_drops_the_former_ones_options(self) -> None:
        blue = Provider("paint", "blue", f"{HERE}:Red", "blue paint")
        resolved = compose(
            data={"model": {"path": "x"}, **ON, "server": {"paint": {"use": "red", "shade": 3, "layers": 5}}},
            overrides=["server.paint.use=blue"],
            env={},
            registry=registry(PAINTS, Plugin("blues", "1", (blue,))),
        )
        assert value_at(resolved.values, "server.paint") == {"use": "blue", "layers": 5}

    def test_capabilities_and_requirements(self) -> None:
        wrong = Provider("paint", "wrong", f"{HERE}:Red", "", provides=frozenset({"edible"}))
        needs = Provider("sampler", "wet", f"{HERE}:Red", "", requires=(Requirement("paint", "washable"),), rank=-1)
        known = registry(PAINTS, Plugin("more", "1", (wrong, needs)))
        problems = {one.name: one.problem for one in known.providers("paint")}
        assert problems["red"] == ""
        assert "it provides 'edible', which is not a capability of paint (known: washable)" in problems["wrong"]
        record = known.get("sampler", "wet")
        assert record is not None
        assert record.problem == ""

    def test_it_is_part_of_the_lock(self) -> None:
        bare = Plugin(PAINTS.name, PAINTS.version, PAINTS.providers)
        assert registry(PAINTS).lock.digest != registry(bare).lock.digest
        resolved = composed(**ON, server={"paint": {"shade": 3}})
        again = ResolvedConfig.from_json(resolved.to_json(), resolved.registry)
        assert again.to_json() == resolved.to_json()
        assert again.engine.model_dump() == resolved.engine.model_dump()

    def test_of_two_of_one_place_the_first_counts(self) -> None:
        other = Contract("colour", "server.paint", Cardinality.ONE, f"{HERE}:Interface", "colours too")
        known = registry(PAINTS, Plugin("more", "1", contracts=(other,)))
        assert "colour" not in known.contracts
        assert any("the contract 'colour' at server.paint of plugin 'more'" in text for text in known.conflicts)
        taken = Contract("sampler", "server.paint", Cardinality.ONE, f"{HERE}:Interface", "colours too")
        assert registry(Plugin("more", "1", contracts=(taken,))).contract("sampler").config_path == "sampler"

    def test_a_list_of_providers(self) -> None:
        coats = Contract("paint", "server.coats", Cardinality.MANY, f"{HERE}:Interface", "coats answers")
        plugin = Plugin("paints", "1", (replace(RED, provides=frozenset()),), contracts=(coats,))
        resolved = composed(plugin, **ON, server={"coats": ["red"]})
        [choice] = Selection(resolved).choose_all(coats, 1)
        assert choice.options == RedOptions()
        assert composed(plugin, **ON).candidates["paint"] == ()


class TestRequires:
    @pytest.mark.parametrize(
        ("plugins", "disable", "why"),
        [
            ((), [], "which is not installed"),
            ((PAINTS,), ["paints"], r"which is switched off \(plugins.disable or plugins.paints\)"),
        ],
    )
    def test_a_plugin_without_what_it_requires(self, plugins: Any, disable: list[str], why: str) -> None:
        gate = Provider("admission_gate", "wet", f"{HERE}:Red", "waits for paint")
        waits = Plugin("waits", "1", (gate,), hooks=(f"{HERE}:Painter",), requires=("paints",))
        known = registry(*plugins, waits)
        data = {"model": {"path": "x"}, "plugins": {"disable": disable}}
        with pytest.raises(ConfigError, match=f"cannot be used: it requires the plugin 'paints', {why}"):
            compose(data={**data, "gates": ["wet"]}, env={}, registry=known)
        resolved = compose(data={**data, "plugins": {"disable": disable, "waits": True}}, env={}, registry=known)
        with pytest.raises(
            PluginError, match=f"plugin 'waits' .* cannot be built: it requires the plugin 'paints', {why}"
        ):
            Hooks.load(resolved.registry, resolved.plugin_options)
