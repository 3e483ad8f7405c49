"""What the plugin brings: nothing without adapters in the config."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from pegboard import Engine
from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.stage import stage_context
from pegboard.core.interfaces.errors import ConfigError
from pegboard.plugins.adapters.hooks import AdapterHooks
from pegboard.plugins.adapters.options import AdapterSection
from pegboard.toolkit.model.linear import SITES


def context(**more: Any) -> Any:
    model = SimpleNamespace(path="/model", served_name=("base", "alias"))
    return stage_context(config=SimpleNamespace(model=model), **more)


def hooks(**section: Any) -> AdapterHooks:
    made = AdapterHooks()
    made.configure(SimpleNamespace(adapters=AdapterSection(**section)))
    return made


@pytest.mark.parametrize("made", [AdapterHooks(), hooks(), hooks(slots=3)])
def test_nothing_without_adapters(made: AdapterHooks) -> None:
    ctx = context()
    assert made.model_services(ctx.model) == {}
    assert not made.pipeline_stages(ctx)
    assert not made.device_parts(ctx)
    assert not made.frontend_stages(ctx)
    assert made.model_names() == []


@pytest.mark.parametrize("section", [{"preload": {"a": "/a"}}, {"directories": ["/"]}, {"directories": "/"}])
def test_a_stage_with_adapters(section: dict[str, Any]) -> None:
    made, ctx = hooks(**section), context()
    assert set(made.model_services(ctx.model)) == {SITES}
    [stage], [part] = made.pipeline_stages(ctx), made.device_parts(ctx)
    assert stage.name == part.name == "adapters"
    [frontend] = made.frontend_stages(ctx)
    assert frontend.name == stage.name
    assert list(made.model_names()) == list(section.get("preload", {}))


@pytest.mark.parametrize(
    ("who", "key"), [("runner 'native'", "runner.use"), ("model family 'x'", "model.use")]
)  # fmt: skip
def test_who_cannot_compute_them_is_named(who: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: the {who} does not compute adapters"):
        hooks(directories=["/"]).pipeline_stages(context(lacking=lambda capability: who))


def test_the_names_of_the_model_are_taken() -> None:
    for name in ("base", "alias", "/model"):
        with pytest.raises(ConfigError, match=rf"adapters\.preload\.{name}: '{name}' is a name of the model itself"):
            hooks(preload={name: "/a"}).pipeline_stages(context())


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_disaggregation_is_refused(tmp_path: Path, role: str) -> None:
    config = {
        "model": {"path": str(tiny_checkpoint(tmp_path, "llama", num_hidden_layers=1)), "dtype": "float32"},
        "runner": {"use": "layered"},
        "attention": {"use": "torch"},
        "memory": {"max_total_tokens": 64},
        "adapters": {"directories": [str(tmp_path)]},
        "gates": [{"use": "disagg", "role": role}],
    }
    with pytest.raises(ConfigError, match=r"gates: adapters do not work with gates that bring KV"):
        Engine.from_config(config)


@pytest.mark.parametrize("preload", [{"a": "/x", "b": "/y"}, ["a=/x", "b=/y"], "a=/x b=/y", ("a=/x", "b=/y")])
def test_ways_to_name_them(preload: Any) -> None:
    assert AdapterSection(preload=preload).preload == {"a": "/x", "b": "/y"}


@pytest.mark.parametrize("preload", [["a"], ["=/x"], ["a=/x", "a=/y"], {"a b": "/x"}, {"a:b": "/x"}, [5], {"": "/x"}])
def test_bad_names(preload: Any) -> None:
    with pytest.raises(ValidationError):
        AdapterSection.model_validate({"preload": preload})
