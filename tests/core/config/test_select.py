"""Choosing providers by what they support, and what the log and the errors say of it."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from pegboard.core.config.compose import ResolvedConfig, compose
from pegboard.core.config.select import Selection
from pegboard.core.interfaces.contract import Cardinality, Contract
from pegboard.core.interfaces.contracts import LOGITS_PROCESSOR, SAMPLER
from pegboard.core.interfaces.errors import ConfigError, PluginError
from pegboard.core.interfaces.options import Options
from pegboard.core.interfaces.plugin import Plugin, Provider, Requirement
from pegboard.core.interfaces.sampler import Sampler
from pegboard.core.registry.registry import Registry

OTHERS = {
    "model_source": ["a"],
    "model_family": ["a"],
    "runner": ["a"],
    "attention": ["a"],
    "kv_pool": ["a"],
    "token_allocator": ["stack"],
    "prefix_cache": ["radix"],
    "schedule_policy": ["fcfs"],
    "logits_processor": ["penalties", "logit_bias", "min_new_tokens", "bad_words", "allowed_token_ids"],
    "grammar": ["plain"],
    "pooler": ["last"],
    "reasoning_parser": ["plain"],
    "session_store": ["in_memory"],
    "speculator": ["none"],
    "tool_parser": ["plain"],
    "api": ["openai", "anthropic", "native", "metrics"],
}


NOTHING: Contract = Contract("nothing", "nothing", Cardinality.ONE, "no:No", "nothing", optional=True)
"""Without a provider."""


class Anywhere(Sampler):
    def sample(self, logits: Any, batch: Any) -> Any:
        raise NotImplementedError

    def logprobs(self, logits: Any, tokens: Any, requests: Any) -> Any:
        raise NotImplementedError


class OnlyOn(Anywhere):
    """Supports the contexts that equal its name in lower case."""

    @classmethod
    def supports(cls, options: Any, ctx: Any) -> str | None:
        return None if ctx == cls.__name__.lower() else f"no {cls.__name__.lower()} here"


class Gpu(OnlyOn):
    pass


class Cpu(OnlyOn):
    pass


def named(cls: type) -> str:
    sys.modules.setdefault("pegboard_test_select", sys.modules[__name__])
    return f"pegboard_test_select:{cls.__name__}"


def resolved(samplers: list[Provider], values: dict[str, Any] | None = None, *more: Provider) -> ResolvedConfig:
    others = [Provider(contract, name, "no:No", "") for contract, names in OTHERS.items() for name in names]
    extras = {"no_such_library": "pip install acme[lib]"}
    plugin = Plugin("acme", "1.0", (*samplers, *others, *more), extras=extras, contracts=(NOTHING,))
    data = {"model": {"path": "x"}, **(values or {})}
    return compose(data=data, env={}, registry=Registry.of(plugin))


GPU = Provider("sampler", "gpu", named(Gpu), "", rank=30)
CPU = Provider("sampler", "cpu", named(Cpu), "", rank=20)
ANY = Provider("sampler", "any", named(Anywhere), "", rank=10)
MISSING = Provider("sampler", "missing", "no_such_library:X", "", rank=40)
BROKEN = Provider("sampler", "broken", "no_such_module:X", "", rank=50)


def test_the_highest_ranked_without_objection_wins_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    selection = Selection(resolved([ANY, CPU, GPU, MISSING]))
    choice = selection.choose(SAMPLER, "cpu")  # type: ignore[misc]
    assert choice.cls is import_module_class("Cpu")
    assert choice.automatic
    assert str(choice) == (
        "sampler: cpu (pegboard 0), automatic; "
        "missing: no_such_library is not installed; to install it: pip install acme[lib]; gpu: no gpu here"
    )
    assert str(choice) in caplog.text
    assert selection.choose(SAMPLER, "gpu") is choice, "a choice stands"  # type: ignore[misc]
    assert selection.summary() == {"sampler": "cpu"}


def import_module_class(name: str) -> Any:
    return getattr(sys.modules["pegboard_test_select"], name)


def test_a_choice_builds_with_options_and_context() -> None:
    choice = Selection(resolved([ANY])).choose(SAMPLER, None)  # type: ignore[misc]
    built = choice.build(None)
    assert isinstance(built, Sampler)
    assert built.options == choice.options


def test_a_named_provider_that_objects_stops_the_start() -> None:
    selection = Selection(resolved([ANY, GPU], {"sampler": {"use": "gpu"}}))
    with pytest.raises(
        ConfigError, match=r"^sampler\.use: gpu \(pegboard 0\) cannot be used: no gpu here \[program\]$"
    ):
        selection.choose(SAMPLER, "cpu")  # type: ignore[misc]


def test_those_without_a_needed_capability_are_passed_over() -> None:
    """By what they declare, before they are asked anything; the error says what needs it, and what to do."""
    able = Provider("sampler", "able", named(Cpu), "", provides=frozenset({"seeded"}), rank=5)
    needs = {"seeded": "which acme.dice needs; remove that"}
    contract: Any = SAMPLER
    choice = Selection(resolved([ANY, able])).choose(contract, "cpu", needs)
    assert choice.name == "able"
    assert choice.reasons == ("any: it lacks the capability seeded, which acme.dice needs; remove that",)
    refused = (
        r"^sampler\.use: any \(pegboard 0\) cannot be used: it lacks .* seeded, which acme\.dice needs; remove that"
    )
    with pytest.raises(ConfigError, match=refused):
        Selection(resolved([ANY, able], {"sampler": {"use": "any"}})).choose(contract, "cpu", needs)


def test_nobody_left_says_each_ones_objection() -> None:
    selection = Selection(resolved([CPU, GPU]))
    with pytest.raises(ConfigError, match="no provider of sampler can be used: gpu: no gpu here; cpu: no cpu here"):
        selection.choose(SAMPLER, "tpu")  # type: ignore[misc]
    with pytest.raises(ConfigError, match="no provider of nothing can be used: none is installed"):
        Selection(resolved([CPU])).choose(NOTHING, None)


def test_a_library_that_a_supported_context_lacks_is_told_apart() -> None:
    """From objections, and from a library without which nothing is known of what is supported."""

    class Lacking(OnlyOn):
        @classmethod
        def supports(cls, options: Any, ctx: Any) -> str | None:
            if ctx == "gpu":
                raise ModuleNotFoundError(name="no_such_library")
            return "no gpu here"

    vars(sys.modules[__name__])["Lacking"] = Lacking
    contract: Any = SAMPLER
    lacking = Provider("sampler", "lacking", named(Lacking), "", rank=50)
    for ctx, found in (
        ("gpu", ["lacking: no_such_library is not installed; to install it: pip install acme[lib]"]),
        ("cpu", []),
    ):
        selection = Selection(resolved([lacking, MISSING]))
        assert selection.find(contract, ctx) is None
        assert list(selection.missing("sampler")) == found


def test_a_broken_candidate_is_no_silent_fall_back() -> None:
    with pytest.raises(PluginError, match="importing no_such_module:X failed"):
        Selection(resolved([ANY, BROKEN])).choose(SAMPLER, None)  # type: ignore[misc]


def test_a_choice_narrows_what_it_requires() -> None:
    needy = Provider("runner", "needy", named(Cpu), "", rank=9, requires=(Requirement("sampler", "seeded"),))
    seeded = Provider("sampler", "slow", named(Anywhere), "", provides=frozenset({"seeded"}))
    config = resolved([ANY, seeded], None, needy)
    assert [one.name for one in config.candidates["sampler"]] == ["any", "slow"], (
        "still open: needy is a mere candidate"
    )
    selection = Selection(config)
    assert Selection(config).choose(SAMPLER, None).name == "any"  # type: ignore[misc]
    selection._left["runner"] = (config.registry.get("runner", "needy"),)  # type: ignore[assignment]
    choice = selection.choose(SAMPLER, None)  # type: ignore[misc]
    assert choice.name == "slow"


def test_lists_are_taken_whole_and_in_order() -> None:
    first = Provider("logits_processor", "first", "no:No", "")
    config = resolved([ANY], {"logits_processors": []}, first)
    assert Selection(config).choose_all(LOGITS_PROCESSOR, None) == ()  # type: ignore[misc]


class Choosy(Options):
    seeds: bool = True

    def provides(self, declared: frozenset[str]) -> frozenset[str]:
        return frozenset({"seeded", "made_up"}) if self.seeds else frozenset()


class NeedsSeeds(Anywhere):
    @classmethod
    def supports(cls, options: Any, ctx: Any) -> str | None:
        return None if options.seeds else "it needs its seeds"


def test_options_narrow_what_a_provider_has_and_what_it_supports() -> None:
    choosy = Provider("sampler", "choosy", named(NeedsSeeds), "", named(Choosy), provides=frozenset({"seeded"}))
    needy = Provider("runner", "needy", named(Cpu), "", rank=9, requires=(Requirement("sampler", "seeded"),))
    chosen = {"sampler": {"use": "choosy"}, "runner": {"use": "needy"}}
    choice = Selection(resolved([ANY, choosy], chosen, needy)).choose(SAMPLER, None)  # type: ignore[misc]
    assert choice.provides == {"seeded"}, "none can be added"
    chosen["sampler"]["seeds"] = False  # type: ignore[assignment]
    with pytest.raises(
        ConfigError, match=r"needs sampler.seeded.* the options of 'choosy' \(pegboard 0\) switch it off"
    ):
        resolved([ANY, choosy], chosen, needy)
    config = resolved([ANY, choosy], {"sampler": chosen["sampler"]}, needy)
    assert needy not in [one.provider for one in config.candidates["runner"]], "a mere candidate goes"
    with pytest.raises(ConfigError, match="it needs its seeds"):
        Selection(config).choose(SAMPLER, None)  # type: ignore[misc]
