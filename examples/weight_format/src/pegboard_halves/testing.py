"""What the suite of weight formats cannot know: checkpoints, and the numbers that they mean."""

from collections.abc import Sequence

import torch
from pegboard.plugins.quantization.suite.weight_format import Example, WeightFormatContract


def written(matrix: torch.Tensor, group: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the tensors of a matrix float64 [rows, cols], and what they mean in float64."""
    grouped = matrix.unflatten(1, (-1, group))
    steps = (grouped.abs().amax(-1) / 7).half()
    codes = (grouped / steps.double()[..., None]).round().clamp(-8, 7)
    meant = (codes * steps.double()[..., None]).flatten(1)
    left, right = (codes.flatten(1) + 8).to(torch.uint8).chunk(2, dim=1)
    return {"halves": left + 16 * right, "steps": steps}, meant


class TestHalves(WeightFormatContract):
    provider = "halves"

    def examples(self) -> Sequence[Example]:
        draw = torch.Generator().manual_seed(0)
        found = []
        for rows, cols, group in ((96, 160, 32), (40, 96, 48), (8, 64, 64)):
            tensors, meant = written(torch.randn(rows, cols, dtype=torch.float64, generator=draw), group)
            named = {f"x.q_proj.{end}": tensor for end, tensor in tensors.items()}
            found.append(Example({"quant_method": "halves"}, named, {"x.q_proj.weight": meant}))
        return found
