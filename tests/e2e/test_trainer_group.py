"""New weights that a trainer in another process broadcasts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pegboard import Engine
from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.rig.other_weights import other_weights, tensors_of
from pegboard.conformance.servers import free_ports
from pegboard.core.interfaces.errors import InvalidRequest
from tests.e2e.test_weights import config, fresh, refused, tokens_of
from tests.plugins.weight_updates.trainer import GROUP, Trainer, trainer

Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture(scope="module")
def base(checkpoints: Path) -> Path:
    return tiny_checkpoint(checkpoints, "llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def other(base: Path) -> Path:
    return other_weights(base)


@pytest.fixture
def port() -> int:
    (found,) = free_ports(1)
    return found


@pytest.fixture
def teaches(port: int) -> Iterator[Trainer]:
    with trainer(port) as one:
        yield one


def serving(path: Path, arrangement: str = "dense", timeout: float = 60.0) -> Engine:
    settings = config(path, arrangement)
    settings["weight_updates"] |= {"process_groups": True, "group_timeout": timeout}
    return Engine.from_config(settings)


def join(engine: Engine, port: int) -> None:
    engine.control("init_weights_group", name=GROUP, address="127.0.0.1", port=port, rank=1, size=2)


def announced(tensors: Tensors, names: Sequence[str]) -> dict[str, Any]:
    told = [(name, str(tensors[name].dtype), list(tensors[name].shape)) for name in names]
    return {"group": GROUP, "announced": told}


def saved(tensors: Tensors, tmp_path: Path) -> Path:
    file = tmp_path / "new.safetensors"
    save_file({name: one.contiguous() for name, one in tensors.items()}, file)
    return file


@pytest.mark.parametrize(
    "arrangement", ["dense", *(pytest.param(one, marks=pytest.mark.full) for one in ("native", "packed"))]
)
def test_tokens_are_those_of_a_fresh_start(
    base: Path, other: Path, arrangement: str, teaches: Trainer, port: int, tmp_path: Path
) -> None:
    """In any order, with a tensor that is not needed among the others, in parts where the runner takes parts."""
    tensors = tensors_of(other)
    unneeded = "model.layers.0.self_attn.rotary_emb.inv_freq"
    names = [unneeded, *sorted(tensors, reverse=True), unneeded.replace("0", "1")]
    every = {**tensors, names[0]: torch.zeros(4), names[-1]: torch.zeros(4)}
    file = saved(every, tmp_path)
    with serving(base, arrangement) as engine:
        join(engine, port)
        parts = [names] if arrangement == "native" else [names[:5], names[5:]]
        for part in parts:
            teaches.send(file, part)
            found = engine.control("update_weights", **announced(every, part), partial=True, weight_version="v2")
            assert (found["weight_version"], teaches.heard()) == ("v2", "sent")
        assert tokens_of(engine) == fresh(other, arrangement)
        assert engine.stats()["book_errors"] == 0
        engine.control("destroy_weights_group", name=GROUP)
        assert refused(engine, "destroy_weights_group", name=GROUP).status == 404


def test_a_trainer_whose_weights_were_released_brings_all_of_them(
    base: Path, other: Path, teaches: Trainer, port: int, tmp_path: Path
) -> None:
    """Although `partial`, the default of the route, is true. A refusal before the check leaves the group, too."""
    tensors = tensors_of(other)
    names = sorted(tensors)
    with serving(base) as engine:
        join(engine, port)
        engine.control("release_memory", tags=["weights"])
        teaches.send(saved(tensors, tmp_path), names)
        engine.control("update_weights", **announced(tensors, names), partial=True)
        assert teaches.heard() == "sent"
        assert tokens_of(engine) == fresh(other)
        teaches.send(tmp_path / "new.safetensors", names[:1])
        assert refused(engine, **announced(tensors, names[:1]), mode="gently").param == "mode"
        assert teaches.heard() == "failed"
        assert refused(engine, "destroy_weights_group", name=GROUP).status == 404


@pytest.mark.full
def test_what_does_not_fit_changes_nothing(base: Path, teaches: Trainer, port: int, tmp_path: Path) -> None:
    """The trainer learns of it, as the group is gone."""
    wrong: Tensors = {"model.norm.weight": torch.zeros(3)}
    with serving(base) as engine:
        before = tokens_of(engine)
        for values in ({"rank": 0}, {"rank": 2}, {"backend": "nccl"}):
            where = {"name": GROUP, "address": "127.0.0.1", "port": port, "rank": 1, "size": 2}
            refused(engine, "init_weights_group", **{**where, **values})
        join(engine, port)
        assert "there is a group" in refused(engine, "init_weights_group", **where).message
        assert (
            "there is no group 'other'"
            in refused(engine, **{**announced(wrong, list(wrong)), "group": "other"}).message
        )
        teaches.send(saved(wrong, tmp_path), list(wrong))
        assert "has shape [3]" in refused(engine, **announced(wrong, list(wrong)), partial=True).message
        assert tokens_of(engine) == before
        assert "there is no group" in refused(engine, **announced(wrong, list(wrong))).message


@pytest.mark.full
def test_a_trainer_that_sends_nothing(base: Path, other: Path, teaches: Trainer, port: int) -> None:
    """Nothing has changed, and the group is gone."""
    tensors = tensors_of(other)
    with serving(base, timeout=5.0) as engine:
        before = tokens_of(engine)
        join(engine, port)
        assert "has not come within 5 s" in refused(engine, **announced(tensors, list(tensors))).message
        assert tokens_of(engine) == before
        assert "there is no group" in refused(engine, **announced(tensors, list(tensors))).message


def test_a_trainer_that_never_comes(base: Path, port: int) -> None:
    with serving(base, timeout=1.0) as engine:
        with pytest.raises(InvalidRequest, match="did not meet at"):
            join(engine, port)
        assert engine.control("update_weights", path=str(base))["tensors"]


@pytest.mark.full
def test_a_trainer_that_dies_amid_an_update(
    base: Path, other: Path, teaches: Trainer, port: int, tmp_path: Path
) -> None:
    """Some weights are new and some are not: nothing is served until all of them are the same again."""
    tensors = tensors_of(other)
    with serving(base, timeout=20.0) as engine:
        join(engine, port)
        names = list(tensors)
        teaches.send(saved(tensors, tmp_path), names[:3])
        teaches.end()
        error = refused(engine, **announced(tensors, names))
        assert (error.code, error.status) == ("weights_broken", 500)
        assert names[3] in error.message
        with pytest.raises(InvalidRequest, match="an update of the weights has failed"):
            tokens_of(engine)
        engine.control("update_weights", path=str(other))
        assert tokens_of(engine) == fresh(other)


def test_groups_are_off_unless_the_config_has_them(base: Path, port: int) -> None:
    with Engine.from_config(config(base)) as engine:
        assert "process_groups" in refused(engine, "init_weights_group", name=GROUP).message
