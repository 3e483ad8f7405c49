"""Declared fields of request bodies: each has one owner in a config, and those of chosen providers are found."""

from __future__ import annotations

from typing import Any

import pytest

from pegboard.conformance.fake_client import FakeEngineClient
from pegboard.core.config.body_fields import body_fields
from pegboard.core.config.compose import ResolvedConfig, compose
from pegboard.core.config.early import import_chosen, on_api_side
from pegboard.core.interfaces.errors import ConfigError
from pegboard.core.interfaces.plugin import BodyField, Plugin, Provider
from pegboard.core.registry.hooks import Hooks
from pegboard.core.registry.registry import Registry
from pegboard.core.server.serve import build_api

ROOM, HOST = BodyField("room", int), BodyField("host", str)


def registry_of(*providers: Provider) -> Registry:
    return Registry.discover().with_plugins(Plugin("acme", "1.0", providers), distribution="acme-gates", version="2.1")


def gate(name: str, *body: BodyField, **more: Any) -> Provider:
    factory = "pegboard.plugins.gate_session.gate:SessionGate"
    return Provider("admission_gate", name, factory, "for a test", body=body, **more)


def composed(*providers: Provider, **data: Any) -> ResolvedConfig:
    return compose(data={"model": {"path": "x"}, **data}, env={}, registry=registry_of(*providers))


def test_two_gates_of_a_config_may_not_declare_one_field() -> None:
    gates = gate("near", HOST), gate("far", ROOM), gate("wide", HOST, ROOM)
    composed(*gates, gates=["near", "far"])
    with pytest.raises(ConfigError) as caught:
        composed(*gates, gates=["near", "far", "wide"])
    first, second = caught.value.problems
    assert (first.path, second.path) == ("gates", "gates")
    near, wide = "near (acme-gates 2.1)", "wide (acme-gates 2.1)"
    assert first.message == f"{near} and {wide} both declare the field 'host' of request bodies; use one of them"
    assert "far (acme-gates 2.1) and wide" in second.message


def test_a_gate_and_a_policy_may_not_either() -> None:
    factory = "pegboard.plugins.policy_basic.policies:FcfsPolicy"
    policy = Provider("schedule_policy", "late", factory, "for a test", body=(ROOM,), rank=-1)
    chosen = {"gates": ["far"], "scheduler": {"policy": {"use": "late"}}}
    with pytest.raises(ConfigError, match=r"far .* and late .* both declare the field 'room'"):
        composed(gate("far", ROOM), policy, **chosen)
    composed(gate("far", HOST), policy, **chosen)


def test_a_field_of_an_api_is_refused_before_anything_is_loaded() -> None:
    resolved = composed(gate("far", BodyField("temperature", float), BodyField("echo", bool)), gates=["far"])
    with pytest.raises(ConfigError) as caught:
        import_chosen(resolved, on_api_side)
    first, second = caught.value.problems
    assert first.message == (
        "far (acme-gates 2.1) declares the field 'temperature' of request bodies, which belongs to the API openai and "
        "the API anthropic; leave one of them out"
    )
    assert "'echo' of request bodies, which belongs to the API openai; " in second.message
    import_chosen(
        composed(gate("far", BodyField("echo", bool)), gates=["far"], apis=["native", "anthropic"]), on_api_side
    )
    # What an API only knows in order to refuse it may be declared.
    import_chosen(composed(gate("far", BodyField("bootstrap_room", int)), gates=["far"]), on_api_side)


def test_those_of_chosen_providers_are_found() -> None:
    registry = registry_of(gate("near", HOST), gate("far", ROOM), gate("wide", ROOM))
    assert body_fields(registry, {"admission_gate": ["far"], "sampler": ["torch"]}, ()) == {"far": (ROOM,)}
    assert body_fields(registry, {"admission_gate": ["session"]}, ()) == {}
    with pytest.raises(ConfigError, match="both declare"):
        body_fields(registry, {"admission_gate": ["far", "wide"]}, ())


def test_what_auto_has_chosen_is_told_to_the_apis() -> None:
    """Which policy `auto` chooses is known when the engine is built."""
    resolved = composed(gate("far", ROOM, BodyField("echo", bool)))
    client = FakeEngineClient()
    client.info.providers["admission_gate"] = ["far"]
    with pytest.raises(ConfigError, match="'echo' of request bodies, which belongs to the API openai"):
        build_api(resolved, client, Hooks.load(resolved.registry))
    resolved = composed(gate("far", ROOM))
    _, routers = build_api(resolved, client, Hooks.load(resolved.registry))
    assert [router.ctx.body_fields for _, router in routers] == [{"far": (ROOM,)}] * len(routers)
