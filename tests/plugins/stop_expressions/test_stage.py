"""The stage of stop expressions: the suite, and what becomes of requests where it fails or is missing."""

from __future__ import annotations

from typing import Any

import pytest

from pegboard.conformance.fake_client import FakeEngineClient, FakeTokenizer
from pegboard.conformance.stage import StageContract
from pegboard.core.frontend.intake import Intake
from pegboard.core.frontend.outputs import OutputState
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.messages import TokenizedRequest, TokenOutput
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.interfaces.stage import Stage
from pegboard.plugins.stop_expressions.matcher import RegexMatcher
from pegboard.plugins.stop_expressions.stage import StopExpressions
from tests.core.pipeline.harness import Harness
from tests.features import FEATURES

ASKED = SamplingParams(stop_regex=("a+b",))


class TestStopExpressions(StageContract):
    def make_stage(self) -> Stage:
        return StopExpressions()

    def feature(self) -> object:
        return True

    def ended_text(self) -> tuple[SamplingParams, str]:
        return SamplingParams(stop_regex=("a+b", r"\bno\b", "(?m)x$")), "caab aanono no.abx\nyx xx\naab no"


def raises(*_: Any) -> Any:
    raise ValueError("it broke")


@pytest.mark.parametrize(("where", "point"), [(StopExpressions, "compile_stops"), (RegexMatcher, "read")])
def test_one_that_raises_fails_its_request_alone(where: type, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(where, point, raises)
    harness = Harness(tokenizer=FakeTokenizer())
    harness.submit("a", [3, 4], 5, sampling={"stop_regex": ("a+b",)})
    harness.submit("b", [5, 6], 5, sampling={"stop": ("never",)})
    harness.run()
    reason = harness.outputs["a"][-1].finish_reason
    assert reason is not None
    assert (reason["type"], reason["status"], reason["code"]) == ("abort", 500, "plugin_failed")
    other = harness.outputs["b"][-1].finish_reason
    assert other is not None
    assert other["type"] != "abort"


def test_without_the_plugin_its_field_is_refused() -> None:
    info, request = FakeEngineClient().info, GenerateRequest(prompt="Hi", sampling=ASKED)
    assert Intake(info, FakeTokenizer(), FEATURES).prepare(request).features
    with pytest.raises(InvalidRequest) as caught:
        Intake(info, FakeTokenizer()).prepare(request)
    assert (caught.value.param, caught.value.code) == ("stop_regex", "not_available")


def test_one_that_raises_in_the_api_process_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    request = TokenizedRequest(rid="r", prompt=b"", sampling=ASKED)
    state = OutputState(request, FakeTokenizer(), FEATURES)
    monkeypatch.setattr(RegexMatcher, "read", raises)
    with pytest.raises(InvalidRequest, match=r"the stage 'stop_expressions' failed: .*it broke") as caught:
        state.push(TokenOutput(rid="r", token_ids=[97]))
    assert (caught.value.status, caught.value.code) == (500, "plugin_failed")
