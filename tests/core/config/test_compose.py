"""Composing configs: sources and their order, `use`, options, `requires`, and every kind of message."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pegboard.core.config.compose import ResolvedConfig, compose
from pegboard.core.interfaces.errors import ConfigError, PluginError
from pegboard.core.interfaces.options import Options
from pegboard.core.interfaces.plugin import Plugin, Provider, Requirement
from pegboard.core.registry.registry import Registry
from pegboard.tools.config.describe import show
from pegboard.tools.config.schema import schema

BASE = {"model": {"path": "some/model"}}


class CacheOptions(Options):
    eviction: str = "lru"
    """Who goes first."""
    share: float = 0.5
    """How much."""
    pinned: bool = False
    """Whether it stays."""


class BrokenOptions(Options):
    def provides(self, declared: frozenset[str]) -> frozenset[str]:
        raise KeyError("boom")


class ClashingOptions(Options):
    path: str = ""
    """Called as a core key of the section."""


class PenaltyOptions(Options):
    strength: float
    """No default."""


def provider(contract: str, name: str, rank: int = 0, **fields: Any) -> Provider:
    return Provider(contract, name, f"acme.{contract}:{name}", f"the {name} {contract}", rank=rank, **fields)


def lazy(cls: type) -> str:
    """Options models of this very module, whatever pytest calls it."""
    sys.modules.setdefault("pegboard_test_compose_options", sys.modules[__name__])
    return f"pegboard_test_compose_options:{cls.__name__}"


REUSE = Requirement("prefix_cache", "reuse", "it orders by cached prefixes")


def acme(*more: Provider, **fields: Any) -> Plugin:
    providers = (
        provider("model_source", "dir"),
        provider("model_family", "dense", 20),
        provider("model_family", "other", 10),
        provider("runner", "layered"),
        provider("attention", "fast", 20, provides=frozenset({"sliding_window"})),
        provider("attention", "plain", 10, provides=frozenset({"sliding_window", "sinks"})),
        provider("attention", "toy", -1),
        provider("kv_pool", "mha"),
        provider("token_allocator", "stack"),
        provider("prefix_cache", "radix", 20, provides=frozenset({"reuse"}), config=lazy(CacheOptions)),
        provider("prefix_cache", "none"),
        provider("schedule_policy", "fcfs", 10),
        provider("schedule_policy", "lpm", requires=(REUSE,)),
        provider("logits_processor", "penalties"),
        provider("logits_processor", "logit_bias"),
        provider("logits_processor", "min_new_tokens"),
        provider("logits_processor", "bad_words"),
        provider("logits_processor", "allowed_token_ids"),
        provider("logits_processor", "strong", config=lazy(PenaltyOptions)),
        provider("sampler", "torch"),
        provider("grammar", "plain"),
        provider("pooler", "last"),
        provider("reasoning_parser", "plain"),
        provider("session_store", "in_memory"),
        provider("speculator", "none"),
        provider("tool_parser", "plain"),
        provider("api", "openai"),
        provider("api", "native"),
        provider("api", "anthropic"),
        provider("api", "metrics"),
        *more,
    )
    return Plugin("acme", "1.0", providers, **fields)


def registry(*more: Provider) -> Registry:
    return Registry.of(acme(*more), version="0.1.0")


def composed(values: dict[str, Any] | None = None, *more: Provider, **arguments: Any) -> ResolvedConfig:
    arguments.setdefault("env", {})
    return compose(data={**BASE, **(values or {})}, registry=registry(*more), **arguments)


def problems(values: dict[str, Any], *more: Provider, **arguments: Any) -> dict[str, str]:
    """What is wrong, by path."""
    with pytest.raises(ConfigError) as caught:
        composed(values, *more, **arguments)
    return {one.path: one.message for one in caught.value.problems}


def names(resolved: ResolvedConfig, contract: str) -> list[str]:
    return [one.name for one in resolved.candidates[contract]]


class TestSources:
    def test_the_default_preset_is_the_base(self) -> None:
        resolved = composed()
        assert names(resolved, "prefix_cache") == ["radix"]
        assert names(resolved, "api") == ["openai", "anthropic", "native", "metrics"]
        assert resolved.origins["prefix_cache.use"] == "default"

    def test_later_sources_win(self, tmp_path: Path) -> None:
        first, second = tmp_path / "a.yaml", tmp_path / "b.toml"
        first.write_text("server:\n  port: 1\n  host: '0.0.0.1'\nlog_level: error\nscheduler:\n  seed: 1\n")
        second.write_text("[server]\nport = 2\n[scheduler]\nseed = 2\n")
        resolved = composed(
            files=[first, second],
            env={"PEGBOARD__SCHEDULER__SEED": "3", "PEGBOARD_OTHER": "x"},
            overrides=["server.max_body_bytes=4"],
        )
        server = resolved.engine.server
        assert (server.port, server.host, server.max_body_bytes) == (2, "0.0.0.1", 4)
        assert resolved.engine.scheduler.seed == 3
        assert resolved.origins["server.port"] == str(second)
        assert resolved.origins["server.host"] == f"{first}:3"
        assert resolved.origins["scheduler.seed"] == "PEGBOARD__SCHEDULER__SEED"
        assert resolved.origins["server.max_body_bytes"] == "--set"
        assert resolved.origins["model.path"] == "program"

    def test_a_preset_lies_between_the_default_and_the_files(self, tmp_path: Path) -> None:
        path = tmp_path / "a.json"
        path.write_text(json.dumps({"preset": "reference", "scheduler": {"policy": {"use": "fcfs"}}}))
        resolved = composed(files=[path])
        assert resolved.engine.scheduler.prefill_first
        assert resolved.origins["scheduler.prefill_first"] == "preset reference"
        assert resolved.engine.scheduler.mixed_chunk is False, "whatever the runner prefers"
        assert names(resolved, "schedule_policy") == ["fcfs"]

    def test_lists_are_replaced_and_may_carry_options(self) -> None:
        resolved = composed({"logits_processors": ["penalties", {"use": "strong", "strength": 2}]})
        assert names(resolved, "logits_processor") == ["penalties", "strong"]
        record = resolved.candidates["logits_processor"][1]
        assert resolved.options(record).model_dump() == {"strength": 2.0}

    def test_a_new_use_drops_the_former_providers_options(self, tmp_path: Path) -> None:
        path = tmp_path / "a.yaml"
        path.write_text("prefix_cache:\n  eviction: lfu\n")
        kept = composed(files=[path])
        assert kept.options(kept.candidates["prefix_cache"][0]).model_dump(exclude_defaults=True) == {"eviction": "lfu"}
        assert names(composed(files=[path], overrides=["prefix_cache.use=none"]), "prefix_cache") == ["none"]

    def test_values_from_environment_and_options_are_yaml(self) -> None:
        resolved = composed(env={"PEGBOARD__APIS": "[native]"}, overrides=["model.served_name=3", "model.cache_dir=~"])
        assert names(resolved, "api") == ["native"]
        assert resolved.engine.model.served_name == ("3",)
        assert resolved.engine.model.cache_dir is None

    @pytest.mark.parametrize("word", ["on", "off", "yes", "No", "OFF"])
    def test_words_are_strings_where_an_option_takes_strings(self, word: str, tmp_path: Path) -> None:
        path = tmp_path / "a.yaml"
        path.write_text(f"prefix_cache:\n  eviction: {word}\n")
        for resolved in (
            composed(files=[path]),
            composed(overrides=[f"prefix_cache.eviction={word}"]),
            composed(env={"PEGBOARD__PREFIX_CACHE__EVICTION": word}),
        ):
            assert resolved.options(resolved.candidates["prefix_cache"][0]).model_dump()["eviction"] == word

    @pytest.mark.parametrize(
        ("word", "meant"),
        [("true", True), ("TRUE", True), ("on", True), ("Yes", True), ("False", False), ("off", False), ("NO", False)],
    )
    def test_and_booleans_where_it_takes_those(self, word: str, meant: bool, tmp_path: Path) -> None:
        path = tmp_path / "a.yaml"
        path.write_text(
            f"server:\n  access_log: {word}\nscheduler:\n  mixed_chunk: {word}\nprefix_cache:\n  pinned: {word}\n"
        )
        resolved = composed(files=[path], overrides=[f"server.cache_salt_by_key={word}"])
        engine = resolved.engine
        assert (engine.server.access_log, engine.scheduler.mixed_chunk) == (meant, meant)
        assert engine.server.cache_salt_by_key is meant
        assert resolved.options(resolved.candidates["prefix_cache"][0]).model_dump()["pinned"] is meant

    def test_true_is_no_string(self) -> None:
        assert "prefix_cache.eviction" in problems({}, overrides=["prefix_cache.eviction=True"])

    @pytest.mark.parametrize(("given", "names"), [("a", ("a",)), ('"[a, b]"', ("[a, b]",)), ("[a, 7]", ("a", "7"))])
    def test_a_model_has_one_name_or_several(self, given: str, names: tuple[str, ...]) -> None:
        assert composed(overrides=[f"model.served_name={given}"]).engine.model.served_name == names

    @pytest.mark.parametrize(
        "text",
        ["1.10", "12:30", "0123", "1_000", "0x1F", "0o17", "1e5", "+1", "2026-11-26", "-.5", ".inf", "190:20:30", "08"],
    )
    def test_a_text_is_what_was_written(self, text: str, tmp_path: Path) -> None:
        """Whatever kind of number YAML takes it for."""
        path = tmp_path / "a.yaml"
        path.write_text(f"model:\n  path: {text}\n  served_name: [{text}]\n")
        for model in (
            compose([path], env={}).engine.model,
            composed(overrides=[f"model.path={text}", f"model.served_name=[{text}]"]).engine.model,
            composed(env={"PEGBOARD__MODEL__PATH": text, "PEGBOARD__MODEL__SERVED_NAME": text}).engine.model,
        ):
            assert (model.path, *model.served_name) == (text, text)

    @pytest.mark.parametrize(
        ("text", "port"), [("010000", 10000), ("0x1F90", 8080), ("0o20", 16), ("+80", 80), ("1_000", 1000), ("8e1", 80)]
    )
    def test_numbers_are_those_of_yaml_1_2(self, text: str, port: int) -> None:
        assert composed(overrides=[f"server.port={text}"]).engine.server.port == port

    @pytest.mark.parametrize("text", ["12:30", "0b11", "0o8", "0777_"])
    def test_and_no_others(self, text: str) -> None:
        assert "server.port" in problems({}, overrides=[f"server.port={text}"])

    @pytest.mark.parametrize(
        ("name", "text"), [("a.json", '{"model": {"path": 1.10}}'), ("a.toml", "model.path = 1.10\n")]
    )
    def test_other_files_keep_numbers_as_written_too(self, name: str, text: str, tmp_path: Path) -> None:
        (tmp_path / name).write_text(text)
        assert compose([tmp_path / name], env={}).engine.model.path == "1.10"

    def test_a_key_that_is_a_number_asks_for_quotes(self, tmp_path: Path) -> None:
        path = tmp_path / "a.yaml"
        path.write_text("server:\n  api_key: 007\n")
        with pytest.raises(ConfigError) as caught:
            composed(files=[path])
        (problem,) = caught.value.problems
        assert problem.path == "server.api_key[0]"
        assert problem.message.endswith("it must be a text; put it in quotes")
        assert "7" not in problem.message

    def test_a_name_is_not_empty(self) -> None:
        with pytest.raises(ConfigError, match=r"model\.served_name"):
            composed(overrides=['model.served_name=""'])

    def test_an_empty_section_changes_nothing(self, tmp_path: Path) -> None:
        path = tmp_path / "a.yaml"
        path.write_text("memory:\nserver:\n")
        assert composed(files=[path]).engine.model_dump() == composed().engine.model_dump()

    @pytest.mark.parametrize(
        ("name", "text", "place", "message"),
        [
            ("a.yaml", "server:\n  port: [1\n", "a.yaml:3:1", "not valid YAML"),
            ("a.yaml", "server:\n  port: 1\n  port: 2\n", "a.yaml:3:3", "the key 'port' stands here twice"),
            ("a.yaml", "- 1\n", "a.yaml", "must hold keys and values, not a list"),
            ("a.yaml", "server:\n  1: 2\n", "a.yaml", "server: the key 1 (int) is not a string"),
            ("a.yaml", "model: {path: x}\n# \x1b[0m\n", "a.yaml:2:3", "the character U+001B cannot stand in a file"),
            ("a.yaml", "m\0o\0", "a.yaml:1:2", "the character U+0000 cannot stand in a file; is it UTF-8?"),
            ("a.yaml", f"server:\n  port: {'9' * 5000}\n", "a.yaml:2:9", "is not an integer"),
            ("a.json", f'{{"a": {"9" * 5000}}}', "a.json", "not valid JSON"),
            ("a.toml", "port = \n", "a.toml", "not valid TOML: Invalid value (at line 1"),
            ("a.json", '{"a": 1,\n "b" 2}', "a.json:2:6", "not valid JSON"),
            ("a.json", '{"a": 1, "a": 2}', "a.json", "the key 'a' stands twice"),
            ("missing.yaml", None, "missing.yaml", "there is no such file"),
        ],
    )
    def test_a_file_that_cannot_be_read(
        self, tmp_path: Path, name: str, text: str | None, place: str, message: str
    ) -> None:
        path = tmp_path / name
        if text is not None:
            path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            composed(files=[path])
        (problem,) = caught.value.problems
        assert problem.path == f"{tmp_path}/{place}"
        assert message in problem.message

    @pytest.mark.parametrize("text", ["server.port", "=3", " =3"])
    def test_an_option_without_key_or_value(self, text: str) -> None:
        with pytest.raises(ConfigError, match="must read key=value"):
            composed(overrides=[text])

    def test_a_value_where_a_section_is_needed(self) -> None:
        with pytest.raises(ConfigError, match="'server' has been given a value of its own"):
            composed(overrides=["server=3", "server.port=4"])

    def test_an_unknown_preset(self) -> None:
        with pytest.raises(ConfigError) as caught:
            composed({"preset": "referenc"})
        assert str(caught.value) == "preset: there is no preset 'referenc'; did you mean 'reference'? known: reference"


class TestMessages:
    """Every message says what to do."""

    def test_a_wrong_name(self) -> None:
        found = problems({"prefix_cache": {"use": "radxi"}})
        assert found == {
            "prefix_cache.use": "'radxi' is not installed; did you mean 'radix'? "
            "installed: radix (pegboard 0.1.0), none (pegboard 0.1.0)"
        }

    def test_it_cites_file_and_line(self, tmp_path: Path) -> None:
        path = tmp_path / "a.yaml"
        path.write_text("model:\n  path: x\n\nprefix_cache:\n  use: radxi\n")
        with pytest.raises(ConfigError, match=rf"\[{path}:5\]"):
            compose([path], env={}, registry=registry())

    def test_a_missing_plugin(self) -> None:
        text = problems({"attention": {"use": "flashinfer"}})["attention.use"]
        assert (
            text == "'flashinfer' is not installed; installed: fast (pegboard 0.1.0), plain (pegboard 0.1.0), "
            "toy (pegboard 0.1.0)"
        )

    def test_a_plugins_name_for_a_providers(self) -> None:
        assert (
            "'acme' is a plugin; its sampler providers are: torch"
            in problems({"sampler": {"use": "acme"}})["sampler.use"]
        )

    def test_a_provider_of_another_contract(self) -> None:
        text = problems({"sampler": {"use": "radix"}})["sampler.use"]
        assert "there is one of that name for prefix_cache (prefix_cache.use)" in text

    def test_a_disabled_plugin_is_named(self) -> None:
        text = problems({"plugins": {"disable": ["acme"]}})["prefix_cache.use"]
        assert text == "'radix' is not installed; installed: none; plugins.disable leaves out: acme"

    def test_a_broken_plugin_is_fatal_only_when_selected(self, site: Any) -> None:
        site.install("zeta-cache", "2.1", zeta="import no_such_library")
        assert compose(data=BASE, env={})  # type: ignore[truthy-bool]
        with pytest.raises(ConfigError) as caught:
            compose(data={**BASE, "prefix_cache": {"use": "zeta_cache"}}, env={})
        assert "plugin zeta (zeta-cache 2.1) is broken: ModuleNotFoundError" in str(caught.value)
        assert "add 'zeta' to plugins.disable" in str(caught.value)

    def test_an_incompatible_provider_is_fatal_only_when_selected(self) -> None:
        old = provider("attention", "old", 99, contract_version="0.9")
        assert names(composed(None, old), "attention") == ["fast", "plain"]
        text = problems({"attention": {"use": "old"}}, old)["attention.use"]
        assert text.startswith("'old' of plugin 'acme' (pegboard 0.1.0) cannot be used: it implements attention 0.9")

    @pytest.mark.parametrize(
        ("values", "path", "message"),
        [
            ({"server": {"port": "abc"}}, "server.port", "'abc' is wrong: input should be a valid integer"),
            ({"memory": {"page_size": 0}}, "memory.page_size", "0 is wrong: input should be greater than 0"),
            ({"server": 3}, "server", "3 must be a section: keys and values"),
            ({"attention": "fast"}, "attention", "'fast' must be a section: keys and values, such as {use: fast}"),
            ({"apis": "native"}, "apis", "'native' must be a list of names"),
            (
                {"prefix_cache": {"share": "much"}},
                "prefix_cache.share",
                "'much' is wrong: input should be a valid number",
            ),
            ({"attention": {"use": False}}, "attention.use", "YAML read no, off or false here; put the name in quotes"),
            ({"attention": {"use": 3}}, "attention.use", "3 must be the name of a provider; installed: fast"),
            ({"apis": [3]}, "apis[0]", "3 must be the name of a provider"),
            ({"apis": [{"use": "native", "x": 1}, "grpc"]}, "apis[1]", "'grpc' is not installed"),
            (
                {"logits_processors": [{"use": "strong", "strength": "x"}]},
                "logits_processors[0].strength",
                "'x' is wrong: input should be a valid number",
            ),
        ],
    )
    def test_a_wrong_type(self, values: dict[str, Any], path: str, message: str) -> None:
        assert message in problems(values)[path]

    def test_a_missing_key_says_what_it_is(self) -> None:
        with pytest.raises(ConfigError, match=r"model\.path: is required\. What to serve: a directory, a hub id"):
            compose(env={}, registry=registry())
        found = problems({"logits_processors": ["strong"]})
        assert found == {"logits_processors[0].strength": "is required"}

    @pytest.mark.parametrize(
        ("values", "path", "message"),
        [
            ({"server": {"prot": 1}}, "server.prot", "there is no such key; did you mean 'port'?"),
            ({"sever": {}}, "sever", "there is no such key; did you mean 'server'?"),
            (
                {"prefix_cache": {"evicton": "lru"}},
                "prefix_cache.evicton",
                "there is no such key; did you mean 'eviction'?",
            ),
            (
                {"prefix_cache": {"use": "none", "eviction": "lru"}},
                "prefix_cache.eviction",
                "it is an option of radix (pegboard 0.1.0), and prefix_cache.use is 'none'",
            ),
            ({"attention": {"zzz": 1}}, "attention.zzz", "there is no such key; keys here: use"),
        ],
    )
    def test_an_unknown_key(self, values: dict[str, Any], path: str, message: str) -> None:
        assert message in problems(values)[path]

    def test_an_option_below_auto_asks_for_the_name(self) -> None:
        text = problems({"prefix_cache": {"use": "auto", "eviction": "lru"}})["prefix_cache.eviction"]
        assert text.endswith("and prefix_cache.use is 'auto': name the provider to set its options")

    def test_all_problems_come_together_and_none_hides_another(self) -> None:
        found = problems(
            {
                "prefix_cache": {"use": "radxi", "whatever": 1},
                "server": {"port": "abc", "prot": 2},
                "apis": ["grpc", "native", "native"],
                "scheduler": {"policy": {"use": "lofi"}},
            }
        )
        assert sorted(found) == [
            "apis[0]",
            "apis[2]",
            "prefix_cache.use",
            "scheduler.policy.use",
            "server.port",
            "server.prot",
        ]
        assert found["apis[2]"] == "'native' stands in the list twice"

    def test_several_problems_are_counted(self) -> None:
        with pytest.raises(ConfigError, match=r"^2 problems in the config:\n  server\.port: .*\n  server\.prot: "):
            composed({"server": {"port": "abc", "prot": 2}})

    def test_an_option_called_as_a_core_key_is_the_plugins_fault(self) -> None:
        clashing = provider("model_family", "clash", config=lazy(ClashingOptions))
        with pytest.raises(PluginError, match="its option 'path' has the name of a core key of the section 'model'"):
            composed({"model": {"path": "x", "use": "clash"}}, clashing)

    def test_an_extra_that_is_not_installed(self) -> None:
        one = provider("attention", "extra", config="no_such_library.options:X")
        found = Registry.of(acme(one, extras={"no_such_library": "pip install acme[extra]"}))
        with pytest.raises(ConfigError) as caught:
            compose(data={**BASE, "attention": {"use": "extra", "option": 1}}, env={}, registry=found)
        assert "attention.use: extra (pegboard 0) cannot be used: no_such_library is not installed" in str(caught.value)
        assert "pip install acme[extra]" in str(caught.value)

    def test_nothing_can_be_chosen_automatically(self) -> None:
        empty = Registry.of(Plugin("acme", "1", tuple(one for one in acme().providers if one.contract != "sampler")))
        with pytest.raises(ConfigError, match=r"sampler\.use: no sampler can be chosen automatically; installed: none"):
            compose(data=BASE, env={}, registry=empty)


class TestRequires:
    def test_an_unmet_requirement_names_all_three(self) -> None:
        found = problems({"scheduler": {"policy": {"use": "lpm"}}, "prefix_cache": {"use": "none"}})
        assert found == {
            "scheduler.policy.use": "'lpm' (pegboard 0.1.0) needs prefix_cache.reuse because it orders by cached "
            "prefixes, but prefix_cache.use is 'none' (pegboard 0.1.0), without it; "
            "prefix_cache.use can be radix (pegboard 0.1.0)"
        }

    def test_a_requirement_narrows_auto(self) -> None:
        sinks = provider("runner", "sunk", requires=(Requirement("attention", "sinks"),))
        resolved = composed({"runner": {"use": "sunk"}}, sinks)
        assert names(resolved, "attention") == ["plain"]
        assert resolved.reasons["attention"] == ["fast: sunk needs attention.sinks"]

    def test_an_automatic_candidate_with_unmet_needs_is_passed_over(self) -> None:
        needy = provider("runner", "needy", 99, requires=(Requirement("attention", "tree_mask"),))
        resolved = composed(None, needy)
        assert names(resolved, "runner") == ["layered"]
        assert resolved.reasons["runner"] == ["needy: it needs attention.tree_mask, which nothing here provides"]

    @pytest.mark.parametrize("rank", [-1, 99])
    def test_a_stranger_that_cannot_say_what_it_provides_stops_nothing(self, rank: int) -> None:
        """It is told as its record has it where it could be chosen, and an automatic one is passed over."""
        stranger = provider("prefix_cache", "stranger", rank, provides=frozenset({"reuse"}), config=lazy(BrokenOptions))
        text = problems({"scheduler": {"policy": {"use": "lpm"}}, "prefix_cache": {"use": "none"}}, stranger)
        assert "stranger (pegboard 0.1.0)" in text["scheduler.policy.use"]
        resolved = composed({"scheduler": {"policy": {"use": "lpm"}}, "prefix_cache": {"use": "auto"}}, stranger)
        assert names(resolved, "prefix_cache") == ["radix"]
        reasons = " ".join(resolved.reasons["prefix_cache"])
        assert ("provides of its options failed: KeyError: 'boom'" in reasons) is (rank > 0)

    def test_a_named_one_that_cannot_say_what_it_provides_stops_the_start(self) -> None:
        broken = provider("prefix_cache", "broken", provides=frozenset({"reuse"}), config=lazy(BrokenOptions))
        with pytest.raises(PluginError, match=r"^prefix_cache.use: prefix_cache 'broken' .*: provides of its options"):
            composed({"scheduler": {"policy": {"use": "lpm"}}, "prefix_cache": {"use": "broken"}}, broken)

    def test_a_sampler_and_a_processor_do_not_share_parameters(self) -> None:
        params: dict[str, Any] = {"provides": frozenset({"params"})}
        both = (provider("sampler", "mine", **params), provider("logits_processor", "mine", **params))
        found = problems({"sampler": {"use": "mine"}, "logits_processors": ["mine"]}, *both)
        assert found == {
            "sampler.use": "'mine' (pegboard 0.1.0) and the logits processor 'mine' (pegboard 0.1.0) both take "
            "parameters from requests, which bring them under that name, so each would get the other's: use one of "
            "the two"
        }
        assert names(composed({"logits_processors": ["mine"]}, *both), "sampler") == ["torch"]
        assert names(composed({"sampler": {"use": "mine"}}, *both), "sampler") == ["mine"]
        mute = (both[0], provider("logits_processor", "mine"))
        assert names(composed({"sampler": {"use": "mine"}, "logits_processors": ["mine"]}, *mute), "sampler") == [
            "mine"
        ]

    def test_what_nobody_provides_is_said(self) -> None:
        needy = provider("runner", "needy", requires=(Requirement("attention", "tree_mask"),))
        text = problems({"runner": {"use": "needy"}}, needy)["runner.use"]
        assert text.endswith("without it; nothing installed provides it")

    def test_chains_are_followed(self) -> None:
        first = provider("runner", "first", requires=(Requirement("attention", "tree_mask"),))
        tree = provider(
            "attention", "tree", -1, provides=frozenset({"tree_mask"}), requires=(Requirement("sampler", "seeded"),)
        )
        found = problems({"runner": {"use": "first"}, "attention": {"use": "tree"}}, first, tree)
        assert list(found) == ["attention.use"]

    def test_one_of_a_list_is_enough(self) -> None:
        picky = provider("sampler", "picky", 9, requires=(Requirement("logits_processor"),))
        assert names(composed(None, picky), "sampler") == ["picky", "torch"]
        assert names(composed({"logits_processors": []}, picky), "sampler") == ["torch"]
        text = problems({"logits_processors": [], "sampler": {"use": "picky"}}, picky)["sampler.use"]
        assert "but logits_processors names none" in text

    def test_negative_ranks_are_never_automatic(self) -> None:
        assert names(composed(), "attention") == ["fast", "plain"]
        assert names(composed({"attention": {"use": "toy"}}), "attention") == ["toy"]


class TestResolved:
    def test_it_travels_as_json(self) -> None:
        resolved = composed({"prefix_cache": {"eviction": "lfu"}, "server": {"port": 1}}, overrides=["log_level=error"])
        again = ResolvedConfig.from_json(resolved.to_json(), registry())
        assert again.to_json() == resolved.to_json()
        assert again.engine.model_dump() == resolved.engine.model_dump()
        assert again.candidates.keys() == resolved.candidates.keys()
        assert again.options(again.candidates["prefix_cache"][0]) == resolved.options(
            resolved.candidates["prefix_cache"][0]
        )

    def test_the_installed_plugins_travel_too(self) -> None:
        resolved = compose(data=BASE, env={})
        assert ResolvedConfig.from_json(resolved.to_json()).to_json() == resolved.to_json()

    def test_another_set_of_plugins_is_refused(self) -> None:
        text = composed().to_json()
        with pytest.raises(PluginError, match=r"the record of acme 1\.0 .* differs"):
            ResolvedConfig.from_json(text, registry(provider("sampler", "more")))
        with pytest.raises(PluginError, match="is missing here"):
            ResolvedConfig.from_json(text, Registry.of())

    def test_plugins_installed_since_are_left_out(self) -> None:
        text = composed().to_json()
        more = Plugin("later", "1.0", (provider("attention", "later", 99),))
        again = ResolvedConfig.from_json(text, registry().with_plugins(more, distribution="later-plugins"))
        assert names(again, "attention") == ["fast", "plain"]

    def test_paths_and_tuples_of_programs_travel(self) -> None:
        resolved = composed({"model": {"path": Path("/models/x")}, "apis": ("native",)})
        assert ResolvedConfig.from_json(resolved.to_json(), registry()).engine.model.path == "/models/x"

    def test_options_of_an_automatic_choice_are_its_defaults(self) -> None:
        resolved = composed({"prefix_cache": {"use": "auto"}})
        assert resolved.options(resolved.candidates["prefix_cache"][0]).model_dump() == {
            "eviction": "lru",
            "share": 0.5,
            "pinned": False,
        }

    def test_only_selected_options_are_imported(self) -> None:
        broken = provider("prefix_cache", "broken", config="no_such_module:X")
        composed(None, broken)
        with pytest.raises(PluginError, match="importing no_such_module:X failed"):
            composed({"prefix_cache": {"use": "broken"}}, broken)

    def test_show_lists_every_value_with_its_origin(self) -> None:
        shown = {one.path: one for one in show(composed({"server": {"port": 1}}))}
        assert (shown["server.port"].value, shown["server.port"].origin) == (1, "program")
        assert shown["server.host"].origin == "default"
        assert shown["attention.use"].note == "the first that fits of: fast, plain"
        assert shown["prefix_cache.eviction"].value == "lru"
        assert shown["apis[2].use"].value == "native"

    def test_the_schema_tells_providers_apart(self) -> None:
        found = schema(registry())
        assert set(found["properties"]["prefix_cache"]["discriminator"]["mapping"]) == {"radix", "none", "auto"}
        radix = found["$defs"]["prefix_cache_radix"]
        assert radix["properties"]["eviction"]["default"] == "lru"
        assert "use" not in radix.get("required", []), "the default preset's provider needs no use"
        assert "use" in found["$defs"]["prefix_cache_none"]["required"]
        assert found["required"] == ["model"]
        assert "path" in found["$defs"]["model_family_dense"]["required"]
