"""The demo model's weights, which come from a GGUF file of 4 and 8 bits, are found on grids and stay what they are."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open

from benchmarks.accuracy import DEMO, directory_of
from tests.plugins.cpu_native.instruction_sets import SETS
from tests.plugins.cpu_native.test_products import multiply


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_matrix_to_the_last_bit() -> None:
    """Products with rows of a single one are the weights; with all such rows, and with one as in a decode step."""
    if SETS[0] == "avx2":
        pytest.skip("grids take AVX-512")
    formats: dict[str, int] = {}
    for file in sorted(directory_of(DEMO).glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                w = opened.get_tensor(name).bfloat16().contiguous()
                if w.ndim != 2:
                    continue
                ones = torch.eye(w.shape[1]).bfloat16()
                found, came = multiply(SETS[0], "bf16", w, ones)
                assert torch.equal(found, w.float().T), name
                one, _ = multiply(SETS[0], "bf16", w, ones[40:41].contiguous())
                assert torch.equal(one, w.float().T[40:41]), name
                formats[came] = formats.get(came, 0) + 1
    assert formats == {"bytes": 1, "nibbles": 210}
