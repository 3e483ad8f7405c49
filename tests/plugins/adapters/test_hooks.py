"""What the plugin brings: nothing without adapters in the config."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from pegboard.conformance.stage import stage_context
from pegboard.core.interfaces.errors import ConfigError
from pegboard.plugins.adapters.hooks import AdapterHooks
from pegboard.plugins.adapters.options import AdapterSection
from pegboard.toolkit.model.linear import SITES


def hooks(**section: Any) -> AdapterHooks:
    made = AdapterHooks()
    made.configure(SimpleNamespace(adapters=AdapterSection(**section)))
    return made


@pytest.mark.parametrize("made", [AdapterHooks(), hooks(), hooks(slots=3)])
def test_nothing_without_adapters(made: AdapterHooks) -> None:
    ctx: Any = stage_context()
    assert made.model_services(ctx.model) == {}
    assert not made.pipeline_stages(ctx)
    assert not made.device_parts(ctx)
    assert not made.frontend_stages(ctx)
    assert made.model_names() == []


@pytest.mark.parametrize("section", [{"preload": {"a": "/a"}}, {"directories": ["/"]}, {"directories": "/"}])
def test_a_stage_with_adapters(section: dict[str, Any]) -> None:
    made, ctx = hooks(**section), stage_context()
    assert set(made.model_services(ctx.model)) == {SITES}
    [stage], [part] = made.pipeline_stages(ctx), made.device_parts(ctx)
    assert stage.name == part.name == "adapters"
    [frontend] = made.frontend_stages(ctx)  # type: ignore[arg-type]
    assert frontend.name == stage.name
    assert list(made.model_names()) == list(section.get("preload", {}))


@pytest.mark.parametrize(
    ("who", "key"), [("runner 'native'", "runner.use"), ("model family 'x'", "model.use")]
)  # fmt: skip
def test_who_cannot_compute_them_is_named(who: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: the {who} does not compute adapters"):
        hooks(directories=["/"]).pipeline_stages(stage_context(lacking=lambda capability: who))


def test_disaggregation_is_refused() -> None:
    gate = SimpleNamespace(name="disagg", provides=frozenset({"brings_kv"}))
    with pytest.raises(ConfigError, match="adapters do not work with disaggregation yet"):
        hooks(directories=["/"]).pipeline_stages(stage_context(choices={"admission_gate": (gate,)}))


@pytest.mark.parametrize("preload", [{"a": "/x", "b": "/y"}, ["a=/x", "b=/y"], "a=/x b=/y", ("a=/x", "b=/y")])
def test_ways_to_name_them(preload: Any) -> None:
    assert AdapterSection(preload=preload).preload == {"a": "/x", "b": "/y"}


@pytest.mark.parametrize("preload", [["a"], ["=/x"], ["a=/x", "a=/y"], {"a b": "/x"}, {"a:b": "/x"}, [5], {"": "/x"}])
def test_bad_names(preload: Any) -> None:
    with pytest.raises(ValidationError):
        AdapterSection.model_validate({"preload": preload})
