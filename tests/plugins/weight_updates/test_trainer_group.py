"""What a trainer announces, before anything is received."""

from __future__ import annotations

import pytest
import torch

from pegboard.core.interfaces.errors import InvalidRequest, ModelError
from pegboard.plugins.weight_updates.controls import tensors_of
from pegboard.plugins.weight_updates.messages import Announced, Meeting
from pegboard.plugins.weight_updates.trainer_group import GroupSource, TrainerGroup

NORM = ("model.norm.weight", "float32", (64,))


class Unjoined(TrainerGroup):
    def __init__(self) -> None:
        """Meet no other rank."""


def source(*tensors: tuple[str, str, tuple[int, ...]]) -> GroupSource:
    return GroupSource(Unjoined(), Announced("a", tensors), most=100, timeout=1)


def test_types_are_called_as_torch_or_its_users_call_them() -> None:
    found = source(NORM, ("b", "torch.bfloat16", ())).tensors
    assert [(one.shape, one.dtype) for one in found.values()] == [((64,), torch.float32), ((), torch.bfloat16)]


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ([("a", "int4", (3,))], "announced as 'int4'"),
        ([("a", "float32", (10**9,))], "no tensor of this model is as large"),
        ([("a", "float32", (2**32, 2**32))], "no tensor of this model is as large"),
        ([NORM, NORM], "announced twice"),
        ([], "there are no tensors"),
    ],
)
def test_odd_announcements(told: list[tuple[str, str, tuple[int, ...]]], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        source(*told)


@pytest.mark.parametrize("told", [[("a", "float32", [-1])], [("a", "float32")], [(1, "float32", [1])], "a", None])
def test_announcements_of_another_form(told: object) -> None:
    with pytest.raises(InvalidRequest, match="needs a name, type and shape"):
        tensors_of({"announced": told})


def test_backends_are_those_of_the_device() -> None:
    for backend, device, words in (("nccl", "cpu", "use gloo"), ("gloo", "cuda", "use nccl")):
        with pytest.raises(ModelError, match=words):
            TrainerGroup(Meeting("a", "127.0.0.1", 1, 1, 2, backend), torch.device(device), 1)
