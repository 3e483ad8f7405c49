"""Discovery, conflicts, broken plugins, compatibility, and the plugin lock."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import sys
from typing import Any

import pytest

from pegboard.core.config.compose import ResolvedConfig, compose
from pegboard.core.interfaces.errors import ConfigError, PluginError
from pegboard.core.interfaces.plugin import BodyField, Plugin, Provider, Requirement
from pegboard.core.registry.lock import PluginLock
from pegboard.core.registry.records import MissingExtra
from pegboard.core.registry.registry import Registry

CACHE = "prefix_cache"
UNKNOWN_KIND: Any = bytes


def provider(name: str = "mine", contract: str = CACHE, factory: str = "nowhere:Nothing", **fields: Any) -> Provider:
    return Provider(contract, name, factory, "for a test", **fields)


def plugin(*providers: Provider, name: str = "acme", **fields: Any) -> Plugin:
    return Plugin(name, "1.0", providers, **fields)


def problem(one: Plugin) -> str:
    registry = Registry.of(one, distribution="acme-plugins")
    return registry.providers(one.providers[0].contract)[0].problem


class TestDiscovery:
    def test_the_built_ins_are_found_and_sound(self) -> None:
        registry = Registry.discover()
        built_in = [one for one in registry.plugins if one.origin.builtin]
        assert len(built_in) >= 16
        assert not [one for one in registry.broken if one.origin.builtin]
        problems = {
            f"{contract}/{record.name}": record.problem
            for contract in registry.contracts
            for record in registry.providers(contract)
            if record.origin.builtin and record.problem
        }
        assert problems == {}

    def test_a_third_party_plugin_is_found_after_the_built_ins(self, site: Any) -> None:
        site.install("acme-cache", "2.1", acme=site.plugin("acme", site.provider(CACHE, "acme_cache")))
        registry = Registry.discover()
        record = registry.get(CACHE, "acme_cache")
        assert record is not None
        assert str(record) == "acme_cache (acme-cache 2.1)"
        assert "acme" in registry.lock.names
        builtin = [one.origin.builtin for one in registry.plugins]
        assert builtin == sorted(builtin, reverse=True)

    def test_what_is_installed_or_removed_meanwhile_is_seen(self, site: Any) -> None:
        """What is installed is read once for as long as the folders of sys.path stay as they are."""
        for name in ("one", "two"):
            site.install(f"acme-{name}", **{name: site.plugin(name)})
            assert Registry.discover().plugin(name) is not None
        shutil.rmtree(site.folder / "acme_one-1.0.dist-info")
        names = Registry.discover().installed
        assert "two" in names
        assert "one" not in names

    def test_a_disabled_plugin_is_not_imported(self, site: Any) -> None:
        site.install("acme-cache", "2.1", acme="raise SystemExit('imported')")
        registry = Registry.discover(disable=["acme"])
        assert "acme_cache_acme" not in sys.modules
        assert [(one.name, str(one.origin)) for one in registry.disabled] == [("acme", "acme-cache 2.1")]
        assert "acme" not in registry.lock.names

    def test_disabling_an_unknown_plugin_is_an_error_with_a_suggestion(self) -> None:
        with pytest.raises(ConfigError) as caught:
            Registry.discover(disable=["cache_radx"])
        text = str(caught.value)
        assert text.startswith("plugins.disable: no plugin 'cache_radx' is installed; did you mean 'cache_radix'")
        assert "installed: adapters, api_anthropic, api_native, " in text

    @pytest.mark.parametrize(
        ("source", "error", "remedy"),
        [
            ("import no_such_library", "ModuleNotFoundError", "install 'no_such_library'"),
            ("1 / 0", "ZeroDivisionError", "update or uninstall acme-cache"),
            ("plugin = 3", "must name a pegboard.core.interfaces.Plugin, not a int", "uninstall"),
            (
                "from pegboard.core.interfaces.plugin import Plugin\nplugin = Plugin('other', '1')",
                "called 'acme', but its record 'other'",
                "",
            ),
            (
                "from pegboard.core.interfaces.plugin import Plugin\nplugin = Plugin('acme', '1', hooks=('x',))",
                "hooks",
                "",
            ),
        ],
    )
    def test_a_broken_plugin_is_listed_with_error_and_remedy(
        self, site: Any, source: str, error: str, remedy: str
    ) -> None:
        site.install("acme-cache", "2.1", acme=source)
        registry = Registry.discover()
        (broken,) = registry.broken
        assert (broken.name, str(broken.origin)) == ("acme", "acme-cache 2.1")
        assert error in str(broken)
        assert remedy in str(broken)
        assert "add 'acme' to plugins.disable" in str(broken)
        assert not registry.conflicts

    def test_upper_case_names_are_refused(self, site: Any) -> None:
        site.install("acme-cache", acme=site.plugin("acme", site.provider(CACHE, "Acme")))
        assert "bad name 'Acme': names are lower case" in str(Registry.discover().broken[0])


def config(registry: Registry, **more: Any) -> ResolvedConfig:
    return compose(data={"model": {"path": "x"}, **more}, env={}, registry=registry)


class TestConflicts:
    """A name that two claim stops a config that uses it, with both distributions, and no other."""

    def test_two_plugins_of_one_name(self, site: Any) -> None:
        site.install("acme-one", "1.0", acme=site.plugin("acme", site.provider(CACHE, "shiny")))
        site.install("acme-two", "2.0", acme=site.plugin("acme"))
        text = "two plugins are called 'acme': one of acme-one 1.0, one of acme-two 2.0"
        assert config(Registry.discover()).registry.conflicts[0].startswith(text)
        with pytest.raises(ConfigError, match=f"'shiny' is not installed.*{text}"):
            config(Registry.discover(), prefix_cache={"use": "shiny"})

    def test_a_plugin_of_a_built_in_name_is_refused_before_import(self, site: Any) -> None:
        site.install("acme-cache", "2.1", cache_radix="raise SystemExit('imported')")
        registry = Registry.discover()
        assert config(registry, prefix_cache={"use": "radix"}).candidates[CACHE][0].origin.builtin
        with pytest.raises(ConfigError, match="may not shadow a built-in one, so acme-cache must rename its own"):
            config(registry, prefix_cache={"use": "shiny"})

    def test_two_providers_of_one_name(self, site: Any) -> None:
        site.install("acme-one", "1.0", one=site.plugin("one", site.provider(CACHE, "same")))
        site.install("acme-two", "2.0", two=site.plugin("two", site.provider(CACHE, "same")))
        registry = Registry.discover()
        assert "same" not in [one.name for one in config(registry).candidates[CACHE]]
        with pytest.raises(ConfigError) as caught:
            config(registry, prefix_cache={"use": "same"})
        text = str(caught.value)
        assert "prefix_cache.use" in text
        assert "two prefix_cache providers are called 'same'" in text
        assert "plugin 'one' (acme-one 1.0)" in text
        assert "plugin 'two' (acme-two 2.0)" in text
        assert config(Registry.discover(disable=["two"]), prefix_cache={"use": "same"})  # type: ignore[truthy-bool]

    def test_a_provider_may_not_shadow_a_built_in_one(self, site: Any) -> None:
        site.install("acme-cache", "2.1", acme=site.plugin("acme", site.provider(CACHE, "radix")))
        registry = Registry.discover()
        assert [one.origin.builtin for one in config(registry).candidates[CACHE] if one.name == "radix"] == [True]
        with pytest.raises(ConfigError, match="may not shadow a built-in one; add one of the two plugins"):
            config(registry, prefix_cache={"use": "radix"})

    def test_presets_mean_the_built_in_one(self, site: Any) -> None:
        """What an operator means by the name is not known, wherever it is written."""
        site.install("acme-one", "1.0", one=site.plugin("one", site.provider("schedule_policy", "lpm")))
        lpm = {"policy": {"use": "lpm"}}
        chosen = config(Registry.discover(), preset="reference").candidates["schedule_policy"]
        assert [one.origin.builtin for one in chosen] == [True]
        for values in ({"scheduler": lpm}, {"preset": "reference", "scheduler": lpm}):
            with pytest.raises(ConfigError, match="two schedule_policy providers are called 'lpm'"):
                config(Registry.discover(), **values)

    def test_one_name_for_two_contracts_is_fine(self) -> None:
        assert not Registry.of(plugin(provider("same"), provider("same", "sampler"))).conflicts


class TestCompatibility:
    def test_another_major_of_the_api_makes_its_providers_unusable(self) -> None:
        assert "written for plugin API 2.0, this Pegboard has 1.0" in problem(plugin(provider(), api="2.0"))

    def test_another_major_of_the_contract(self) -> None:
        text = problem(plugin(provider(contract_version="2.3")))
        assert text == "it implements prefix_cache 2.3, this Pegboard has 1.0; install a matching acme-plugins"

    def test_another_minor_is_fine(self) -> None:
        assert problem(plugin(provider(contract_version="1.7"), api="1.9")) == ""

    def test_an_unknown_contract(self) -> None:
        registry = Registry.of(plugin(provider(contract="prefix_cach")))
        (stray,) = registry.stray
        assert stray.problem == "there is no contract 'prefix_cach'; did you mean 'prefix_cache'?"

    def test_capabilities_stand_in_the_contracts_table(self) -> None:
        assert problem(plugin(provider(provides=frozenset({"reuse"})))) == ""
        text = problem(plugin(provider(provides=frozenset({"reus"}))))
        assert "it provides 'reus', which is not a capability of prefix_cache (known: reuse, host_tier" in text
        assert "one of your own must read 'acme.reus'" in text

    def test_own_capabilities_carry_the_plugins_name(self) -> None:
        assert problem(plugin(provider(provides=frozenset({"acme.rewind"})))) == ""
        assert "must read 'acme.rewind'" in problem(plugin(provider(provides=frozenset({"other.rewind"}))))

    @pytest.mark.parametrize(
        ("requirement", "error"),
        [
            (Requirement("prefix_cach"), "requires the unknown contract 'prefix_cach'; did you mean"),
            (Requirement(CACHE, "reus"), "requires 'reus', which is not a capability of prefix_cache"),
            (Requirement(CACHE, "other.rewind"), ""),
        ],
    )
    def test_requirements_name_what_exists(self, requirement: Requirement, error: str) -> None:
        found = problem(plugin(provider(contract="sampler", requires=(requirement,))))
        assert error in found
        assert bool(error) == bool(found)

    def test_lazy_names_are_checked_without_importing(self) -> None:
        assert "bad lazy name 'nowhere' in factory" in problem(plugin(provider(factory="nowhere")))
        assert "bad lazy name 'no where:X' in config" in problem(plugin(provider(config="no where:X")))

    @pytest.mark.parametrize(
        ("contract", "body", "error"),
        [
            ("admission_gate", (BodyField("room", int), BodyField("host", str, each=False)), ""),
            ("schedule_policy", (BodyField("deadline", float),), ""),
            (CACHE, (BodyField("room", int),), "only providers of admission_gate and schedule_policy"),
            ("admission_gate", (BodyField("Room", int),), "bad name 'Room' of a field of bodies: it must be a letter"),
            ("admission_gate", (BodyField("index", int),), "bad name 'index' of a field of bodies"),
            (
                "admission_gate",
                (BodyField("room", UNKNOWN_KIND),),
                "the field 'room' of bodies has the kind <class 'bytes'>",
            ),
            ("admission_gate", (BodyField("room", int), BodyField("room", str)), "the field 'room' of bodies twice"),
            ("admission_gate", ("room",), "its body must have BodyFields, not 'room'"),
        ],
    )
    def test_fields_of_bodies_are_checked(self, contract: str, body: Any, error: str) -> None:
        found = problem(plugin(provider(contract=contract, body=body)))
        assert error in found
        assert bool(error) == bool(found)


class TestLoading:
    def record(self, one: Plugin) -> Any:
        return Registry.of(one, distribution="acme-plugins", version="2.1").providers(CACHE)[0]

    def test_a_factory_that_is_missing_names_plugin_and_cause(self) -> None:
        with pytest.raises(PluginError) as caught:
            self.record(plugin(provider())).load()
        text = str(caught.value)
        assert "prefix_cache 'mine' of plugin 'acme' (acme-plugins 2.1)" in text
        assert "importing nowhere:Nothing failed: ModuleNotFoundError" in text

    def test_a_missing_extra_names_the_command(self) -> None:
        one = plugin(provider(factory="no_such_library.sub:X"), extras={"no_such_library": "pip install acme[lib]"})
        with pytest.raises(
            MissingExtra, match=r"no_such_library is not installed; to install it: pip install acme\[lib\]"
        ):
            self.record(one).load()

    def test_a_factory_must_subclass_its_contract(self) -> None:
        with pytest.raises(PluginError, match=r"json:JSONDecoder is not a subclass of .*PrefixCache"):
            self.record(plugin(provider(factory="json:JSONDecoder"))).load()

    def test_options_must_subclass_the_base(self) -> None:
        with pytest.raises(PluginError, match=r"is not a subclass of pegboard\.core.interfaces\.options:Options"):
            self.record(plugin(provider(config="json:JSONDecoder"))).options_model()

    def test_every_built_in_loads_or_says_what_to_install(self) -> None:
        registry = Registry.discover()
        for contract in registry.contracts:
            for record in registry.providers(contract):
                if record.origin.builtin:
                    with contextlib.suppress(MissingExtra):
                        assert record.load()
                    assert record.options_model().model_config.get("frozen")


class TestLookup:
    def test_providers_are_ordered_by_rank_then_name(self) -> None:
        registry = Registry.of(plugin(provider("b"), provider("a"), provider("c", rank=5)))
        assert [one.name for one in registry.providers(CACHE)] == ["c", "a", "b"]

    def test_an_unknown_contract_is_an_error(self) -> None:
        with pytest.raises(PluginError, match="there is no contract 'sampla'; did you mean 'sampler'"):
            Registry.of().providers("sampla")

    def test_find_looks_in_every_contract(self) -> None:
        registry = Registry.of(plugin(provider("x"), provider("x", "sampler")))
        assert [one.provider.contract for one in registry.find("x")] == [CACHE, "sampler"]

    def test_without_leaves_plugins_out(self) -> None:
        registry = Registry.of(plugin(provider()), plugin(name="other"))
        assert registry.without([]) is registry
        assert registry.without(["acme"]).lock.names == ("other",)
        with pytest.raises(ConfigError, match="no plugin 'acne' is installed; did you mean 'acme'"):
            registry.without(["acne"])


class TestLock:
    def lock(self, *plugins: Plugin) -> PluginLock:
        return Registry.of(*plugins, distribution="acme-plugins").lock

    def test_it_survives_json(self) -> None:
        lock = Registry.discover().lock
        assert PluginLock.from_dict(json.loads(json.dumps(lock.to_dict()))) == lock

    def test_the_digest_covers_record_and_order(self) -> None:
        one, two = plugin(provider()), plugin(name="other")
        base = self.lock(one, two).digest
        assert self.lock(one, two).digest == base
        assert self.lock(two, one).digest != base
        changed = dataclasses.replace(one, providers=(provider(rank=1),))
        assert self.lock(changed, two).digest != base
        bodies = [dataclasses.replace(one, providers=(provider(body=(BodyField("a", kind),)),)) for kind in (int, str)]
        assert len({self.lock(changed, two).digest for changed in bodies}) == 2

    def test_verify_names_each_difference(self) -> None:
        one, two = plugin(provider()), plugin(name="other")
        lock = self.lock(one, two)
        lock.verify(self.lock(one, two))
        for plugins, text in [
            ([one], "other 1.0 (acme-plugins 0) is missing here"),
            ([one, two, plugin(name="third")], "third 1.0 (acme-plugins 0) is not in the lock"),
            ([dataclasses.replace(one, version="1.1"), two], "is locked, acme 1.1 (acme-plugins 0) is here"),
            ([dataclasses.replace(one, providers=()), two], "the record of acme 1.0 (acme-plugins 0) differs"),
            ([two, one], "another order"),
        ]:
            with pytest.raises(PluginError) as caught:
                lock.verify(self.lock(*plugins))
            assert text in str(caught.value)

    def test_an_altered_lock_is_refused(self) -> None:
        data = self.lock(plugin()).to_dict()
        data["plugins"][0]["version"] = "9"  # type: ignore[index]
        with pytest.raises(PluginError, match="was altered"):
            PluginLock.from_dict(data)
        with pytest.raises(PluginError, match="not a plugin lock"):
            PluginLock.from_dict({"digest": ""})
