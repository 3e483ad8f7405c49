"""The sampler in native code: what the runner does within its forward pass, for logits that come from elsewhere."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

import torch

from pegboard.core.interfaces.errors import ConfigError, OutOfMemory
from pegboard.core.interfaces.forward import LogprobOutput
from pegboard.core.interfaces.sampler import NO_TOKEN, Sampler, SamplerContext
from pegboard.plugins.cpu_native.library import COLUMNS, NativeError, Sampling, first_that_loads
from pegboard.plugins.cpu_native.options import CpuNativeSamplerOptions
from pegboard.toolkit.sampling.logprobs import token_logprobs
from pegboard.toolkit.system.cores import usable_cores

if TYPE_CHECKING:
    from pegboard.core.interfaces.sampling import SamplingBatch

_NOT_FINITE = 2
"""pb_log_sums met a row whose logprobs are no matter of course."""


class CpuNativeSampler(Sampler[CpuNativeSamplerOptions]):
    """Rows are shared among threads, and each is drawn by itself: the same token in any batch, with any number of
    threads and every instruction set. Of what the filters keep, the largest logit with Gumbel noise is drawn, and seed,
    step and token id decide that noise. It is that of the sampler in torch, so that a seed gives the same tokens there,
    but for rounding at the border of a filter.

    Filters work one after the other, each on what the one before it left, renormalised. Of equal logits at the cut of
    top_k or top_p the smaller ids stay. The vocabulary is not sorted.
    """

    def __init__(self, options: CpuNativeSamplerOptions, ctx: SamplerContext) -> None:
        super().__init__(options, ctx)
        try:
            _, self._library = first_that_loads(options.instructions, quiet=options.instructions == "auto")
        except NativeError as error:
            raise ConfigError(f"sampler.instructions: {error}") from error
        threads = options.threads or usable_cores()
        self._handle = self._library.pb_sampler_create(threads)
        _check(0 if self._handle else 1)
        self._process = self._getpid()

    @classmethod
    def supports(cls, options: CpuNativeSamplerOptions, ctx: SamplerContext) -> str | None:
        if ctx.device.type != "cpu":
            return f"it samples on a CPU, not on {ctx.device}"
        try:
            first_that_loads("auto", quiet=True)
        except NativeError:
            # The runner says it at length, and once is enough.
            return "its native code is not to be had here; `python -m pegboard.plugins.cpu_native` says why"
        return None

    # Modules may be gone when the last objects of a process are.
    _getpid = staticmethod(os.getpid)

    def __del__(self) -> None:
        # A forked child has none of the threads that would have to be waited for.
        if getattr(self, "_handle", None) and self._process == self._getpid():
            self._library.pb_sampler_destroy(self._handle)
            self._handle = None

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        logits = _rows(logits)
        rows, vocab = logits.shape
        tokens = torch.empty(rows, dtype=torch.int64)
        columns, sampling = native_sampling(batch)
        _check(
            self._library.pb_sample(
                self._handle,
                logits.data_ptr(),
                logits.stride(0),
                rows,
                vocab,
                ctypes.byref(sampling),
                tokens.data_ptr(),
            )
        )
        del columns
        return with_no_tokens(tokens)

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, batch: SamplingBatch) -> LogprobOutput:
        given, logits = logits, _rows(logits)
        rows, vocab = logits.shape
        wants = batch.logprobs
        tops = torch.tensor(
            [0 if one is None else min(one.top, vocab) for one in wants] or [0] * rows, dtype=torch.int32
        )
        width = int(tops.max()) if rows else 0
        sums = torch.empty(rows, dtype=torch.float64)
        values, ids = torch.zeros(rows, width), torch.zeros(rows, width, dtype=torch.int64)
        code = self._library.pb_log_sums(
            self._handle,
            logits.data_ptr(),
            logits.stride(0),
            rows,
            vocab,
            tops.data_ptr(),
            width,
            sums.data_ptr(),
            values.data_ptr(),
            ids.data_ptr(),
        )
        if code == _NOT_FINITE:
            return token_logprobs(given, tokens, wants)
        _check(code)
        output = LogprobOutput((logits.gather(1, tokens.clamp(min=0)[:, None]).squeeze(1) - sums).float())
        if width:
            output.top_values, output.top_ids = (values - sums[:, None]).float(), ids
        for row, one in enumerate(wants):
            if one is not None and one.token_ids:
                output.chosen[row] = (logits[row, torch.tensor(one.token_ids)] - sums[row]).float()
        return output


def native_sampling(batch: SamplingBatch, *, masked: bool = False) -> tuple[list[torch.Tensor], Sampling]:
    """Return the tensors that must live as long, and a batch's parameters as the library wants them: with its mask, if
    the library is to apply that.
    """
    kept: list[torch.Tensor] = [getattr(batch, name).contiguous() for name in COLUMNS]
    sampling = Sampling(**{name: one.data_ptr() for name, one in zip(COLUMNS, kept, strict=True)})
    if masked and batch.mask is not None and batch.mask_rows is not None:
        mask, rows = batch.mask.contiguous(), batch.mask_rows.contiguous()
        sampling.mask, sampling.mask_rows = mask.data_ptr(), rows.data_ptr()
        sampling.masks, sampling.mask_words = mask.shape
        kept += [mask, rows]
    return kept, sampling


def with_no_tokens(tokens: torch.Tensor) -> torch.Tensor:
    """Return tokens with NO_TOKEN for rows that could not be sampled: the library has a number for each reason."""
    return tokens.clamp_(min=NO_TOKEN)


def _rows(logits: torch.Tensor) -> torch.Tensor:
    """float32, each row's numbers side by side."""
    if logits.dtype is not torch.float32:
        logits = logits.float()
    return logits if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.contiguous()


def _check(code: int) -> None:
    if code:
        raise OutOfMemory("the native sampler could not get memory on the host, or threads")
