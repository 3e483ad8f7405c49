"""A faster way to compute the same model on a CPU, for training, where all pictures of a batch have one size.

PyTorch's fused attention is slow where heads and sequences are as small as here, and transformers calls it once for
each picture.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, Qwen3VLForConditionalGeneration

# transformers tells the length of pictures only to functions with "flash" in their names.
_PICTURES, _TEXT = "flash_of_equal_pictures", "plain_causal"


def quicken(model: Qwen3VLForConditionalGeneration) -> None:
    """Let the model compute its attention and its patch embedding as plain products of matrices."""
    model.model.visual.config._attn_implementation = _PICTURES
    model.model.language_model.config._attn_implementation = _TEXT
    conv = model.model.visual.patch_embed.proj
    model.model.visual.patch_embed.forward = lambda pixels: F.linear(
        pixels.to(conv.weight.dtype), conv.weight.flatten(1), conv.bias
    )


def _pictures(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object = None,
    *,
    scaling: float,
    max_length_q: int,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attend within each picture. [1, heads, pictures * patches, size] to [1, pictures * patches, heads, size]."""
    heads, size = query.shape[1], query.shape[3]
    q, k, v = (one.reshape(heads, -1, max_length_q, size).transpose(0, 1) for one in (query, key, value))
    found = torch.softmax((q * scaling) @ k.transpose(2, 3), -1) @ v
    return found.transpose(1, 2).reshape(1, -1, heads, size), None


def _text(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object = None,
    *,
    scaling: float,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attend to what comes before. Rows are padded at the right, so they need no other mask."""
    rows, groups, length, size = key.shape
    q = (query * scaling).reshape(rows, groups, -1, size)
    later = torch.full((length, length), float("-inf"), dtype=q.dtype).triu(1)
    scores = (q @ key.transpose(2, 3)).view(rows, groups, -1, length, length) + later
    found = torch.softmax(scores, -1).view(rows, groups, -1, length) @ value
    return found.view(rows, -1, length, size).transpose(1, 2).contiguous(), None


AttentionInterface.register(_PICTURES, _pictures)
AttentionInterface.register(_TEXT, _text)
