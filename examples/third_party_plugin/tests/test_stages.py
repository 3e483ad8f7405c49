"""The four stages: their suites, and what makes each of them what it is."""

import numpy as np
import pytest
from pegboard.conformance.stage import StageContract
from pegboard.conformance.stage.ahead import AheadContract
from pegboard.conformance.stage.sources import SourceContract
from pegboard.core.interfaces.errors import InvalidRequest

from pegboard_example_plugin.stages.checksums import Checksums
from pegboard_example_plugin.stages.entropy import Entropy, EntropyFrontend, EntropyPart
from pegboard_example_plugin.stages.phrases import PhraseBook
from pegboard_example_plugin.stages.seconds import Seconds, SecondsFrontend


class TestChecksums(SourceContract):
    def make_stage(self):
        return Checksums(every=2)

    def work(self, payload):
        return float(np.sum(payload))


class TestEntropy(StageContract):
    def make_stage(self):
        return Entropy()

    def feature(self):
        return True

    def compute(self, payload, work):
        return {"entropy": np.zeros(len(payload), np.float32)}


class TestPhraseBook(AheadContract):
    def make_stage(self):
        return PhraseBook({token: ((token * 7) % 250, 3, 5) for token in range(250)})


class TestSeconds(StageContract):
    def make_stage(self):
        return Seconds()

    def feature(self):
        return 3600


def test_entropy_is_that_of_the_rows():
    torch = pytest.importorskip("torch")
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [9.0, float("-inf"), 0.0, 0.0], [1.0, 2.0, 3.0, 4.0]])
    output = type("Output", (), {"logits": logits})
    found = EntropyPart().computed(np.array([0, 2]), None, output)["entropy"]
    expected = [torch.distributions.Categorical(logits=logits[row]).entropy().item() for row in (0, 2)]
    assert found.tolist() == pytest.approx(expected, rel=1e-5)
    assert EntropyPart().computed(np.array([1]), None, output)["entropy"].isfinite().all()


@pytest.mark.parametrize(
    ("frontend", "wrong", "right"),
    [(EntropyFrontend, "yes", True), (SecondsFrontend, 0, 0.5), (SecondsFrontend, "1", 3600)],
)
def test_fields_are_checked(frontend, wrong, right):
    field = frontend.name.partition(".")[2]
    request = type("Request", (), {"params": {field: wrong}})
    with pytest.raises(InvalidRequest, match=f"params.{field} must be"):
        frontend().prepare(request, 1, None)
    request.params = {field: right}
    assert frontend().prepare(request, 1, None) == right
    request.params = {}
    assert frontend().prepare(request, 1, None) is None
