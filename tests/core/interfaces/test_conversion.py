"""Every field of parameters and requests takes what people pass, or InvalidRequest names it."""

from __future__ import annotations

from typing import Any, get_type_hints

import msgspec
import numpy as np
import pytest
import torch

from pegboard.core.interfaces.client import AnnotatedPrompt, EmbedRequest, GenerateRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import SAMPLING_DEFAULTS, Grammar, SamplingParams

INTEGERS = [(3, 3), (3.0, 3), (np.int32(3), 3), (torch.tensor(3), 3)]
IDS = [
    (7, (7,)),
    ([7, 8], (7, 8)),
    ((7, 8), (7, 8)),
    ({7}, (7,)),
    (np.array([7, 8]), (7, 8)),
    (torch.tensor([7]), (7,)),
]
PROMPTS = [("a", "a"), ([7], [7]), ((7, 8), [7, 8]), (np.array([7]), [7]), (torch.tensor([7]), [7])]
NOT_INTEGERS = ["3", 1.5, float("nan"), float("inf"), True, [3], b"3"]
GRAMMAR, PARAMS = Grammar("regex", "a"), SamplingParams()

TABLE: dict[Any, tuple[list[tuple[Any, Any]], list[Any]]] = {
    int: (INTEGERS, NOT_INTEGERS),
    int | None: ([*INTEGERS, (None, None)], NOT_INTEGERS),
    float: ([(0, 0.0), (0.5, 0.5), (np.float32(0.5), 0.5), (torch.tensor(0.5), 0.5)], ["0.5", True, [0.5], 10**400]),
    bool: ([(True, True), (0, False), (np.True_, True)], ["true", 2, [True]]),
    str: ([("a", "a")], [1, b"a", ["a"]]),
    tuple[str, ...]: (
        [("city", ("city",)), (["a", "b"], ("a", "b")), (("a",), ("a",)), ({"a"}, ("a",)), ([], ())],
        [1, [1], ["a", None], b"a", {"a": 1}],
    ),
    tuple[int, ...]: (IDS, ["7", ["7"], [1.5], {"a": 1}, [[7]], True]),
    dict[int, float]: (
        [({5: 1}, {5: 1.0}), ({"5": 1.0}, {5: 1.0}), ({np.int64(5): np.float32(0.5)}, {5: 0.5})],
        [{"a": 1}, {5: "x"}, [5], {1.5: 1}, {True: 1}, {5: 1, "5": 2}, "5"],
    ),
    dict[str, Any]: ([({"dry": {"a": 1}}, {"dry": {"a": 1}})], [{1: {}}, ["dry"], "dry"]),
    Grammar | None: ([(GRAMMAR, GRAMMAR), (None, None)], [{"kind": "regex"}, "a"]),
    SamplingParams: ([(PARAMS, PARAMS)], [{"temperature": 0}, 1]),
    str | list[int] | AnnotatedPrompt: (PROMPTS, [7, {"prompt": "a"}, (1.5,), None.__class__]),
    str | list[int]: (PROMPTS, [7, AnnotatedPrompt(base="a")]),
}
"""By the type of a field: what is passed and what becomes of it, and what is refused."""

FIELDS = [
    (struct, name, kind)
    for struct in (SamplingParams, GenerateRequest, EmbedRequest)
    for name, kind in get_type_hints(struct).items()
]


@pytest.mark.parametrize(("struct", "name", "kind"), FIELDS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_every_field_is_converted_or_named(struct: type[msgspec.Struct], name: str, kind: Any) -> None:
    needed = {} if struct is SamplingParams or name == "prompt" else {"prompt": "a"}
    accepted, refused = TABLE[kind]
    for value, expected in accepted:
        found = getattr(struct(**{name: value}, **needed), name)
        assert found == expected
        assert type(found) is type(expected)
    for value in refused:
        with pytest.raises(InvalidRequest, match=name) as error:
            struct(**{name: value}, **needed)
        assert error.value.param == name, value
    if name != "prompt":
        # As for bodies, null stands for the default.
        given, default = struct(**{name: None}, **needed), struct(**needed)
        assert getattr(given, name) == (None if any(one is None for one, _ in accepted) else getattr(default, name))


def test_what_is_right_stays_the_same_object() -> None:
    """Intake checks once what several requests share, and knows it by identity."""
    stop, bias, ids = ("a", "b"), {5: 1.0}, [7, 8]
    params = SamplingParams(stop=stop, logit_bias=bias)
    assert params.stop is stop
    assert params.logit_bias is bias
    assert GenerateRequest(prompt=ids).prompt is ids


def test_unset_parameters_are_filled_from_the_defaults() -> None:
    defaults = {"temperature": 0.5, "top_k": 20}
    assert SamplingParams.of({"top_k": 5}).filled(defaults) == SamplingParams(temperature=0.5, top_k=5)
    assert SamplingParams.of(None).filled(defaults) == SamplingParams(temperature=0.5, top_k=20)
    assert SamplingParams(top_k=5).filled(defaults) == SamplingParams(top_k=5), "said in full"
    assert set(SAMPLING_DEFAULTS) <= set(SamplingParams.__struct_fields__)
    with pytest.raises(InvalidRequest, match="there is no sampling parameter 'max_tokens'"):
        SamplingParams.of({"max_tokens": 5})
