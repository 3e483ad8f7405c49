"""Which frames of a video are taken, and the times that prompts and positions have of them.

The rules are those of transformers' video processors. Those of Qwen2-VL and 2.5-VL take all frames unless they are told
otherwise; here they sample as Qwen3-VL does by default, 2 frames per second, which is what these models were made for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.media.api import MediaLimits
from pegboard.plugins.mm_qwen_vl.settings import ModelSettings
from pegboard.toolkit.media.inputs import MediaSettings


def check_sampling(asked: MediaSettings, limits: MediaLimits) -> None:
    """Raise InvalidRequest for settings that no video can be sampled with."""
    if asked.fps is not None and asked.num_frames is not None:
        raise InvalidRequest("give fps or num_frames, not both", param="fps", fields=("num_frames",))
    if asked.fps is not None and not 0 < asked.fps < math.inf:
        raise InvalidRequest(f"fps must be above 0, got {asked.fps}", param="fps")
    if asked.num_frames is not None and not 1 <= asked.num_frames <= limits.max_frames:
        raise InvalidRequest(
            f"num_frames must be from 1 to {limits.max_frames} on this server, got {asked.num_frames}",
            param="num_frames",
        )


def choose_frames(
    total: int, rate: float, model: ModelSettings, asked: MediaSettings, limits: MediaLimits
) -> tuple[int, ...]:
    """Return the indices, ascending, of the frames to take of a video of `total` frames, `rate` per second.

    What the request says is the most: no frame is taken twice, and no more than the limits allow.
    """
    step = model.geometry.temporal_patch_size
    if asked.num_frames is not None:
        most = max(1, min(total, limits.max_frames))
        if model.family == "qwen3":
            return _evenly(total, min(asked.num_frames, most))
        rounded = max(1, round(asked.num_frames / step)) * step
        return _in_equal_steps(total, min(rounded, most // step * step) or most)
    most = max(1, min(total, model.video.max_frames, limits.max_frames))
    wanted = min(total / rate * (asked.fps or model.video.fps), total)
    if model.family == "qwen3":
        return _evenly(total, min(max(int(wanted), model.video.min_frames), most))
    # Fewer frames than one temporal patch has: all of them, which transformers refuses.
    wanted = min(max(wanted, model.video.min_frames), most // step * step)
    return _in_equal_steps(total, math.floor(wanted / step) * step or most)


def _evenly(total: int, count: int) -> tuple[int, ...]:
    """Qwen3-VL: from the first frame to the last, both taken."""
    return tuple(np.linspace(0, total - 1, count).round().astype(np.int64).tolist())


def _in_equal_steps(total: int, count: int) -> tuple[int, ...]:
    """Qwen2-VL and 2.5-VL: from the first frame on.

    transformers computes ``i * (total / count)`` in float32, and thereby now and then an index beyond the end, or in
    videos of some ten thousand frames one that is 1 too large. This is exact.
    """
    return tuple((np.arange(count, dtype=np.int64) * total // count).tolist())


def frame_times(indices: Sequence[int], total: int, rate: float, model: ModelSettings) -> tuple[float, ...]:
    """Return the times of `MediaShape`: in Qwen3-VL the seconds of each temporal patch, the mean of its first and last
    frame's; in Qwen2.5-VL the seconds from one temporal patch to the next; in Qwen2-VL none.
    """
    step = model.geometry.temporal_patch_size
    if model.family == "qwen2":
        return ()
    if model.family == "qwen2_5":
        return (step / (len(indices) / total * rate),)
    padded = [*indices, *[indices[-1]] * (-len(indices) % step)]
    seconds = [index / rate for index in padded]
    return tuple((seconds[i] + seconds[i + step - 1]) / 2 for i in range(0, len(seconds), step))
