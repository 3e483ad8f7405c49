"""Outputs: tokens back to text. The scheduler's TokenOutput becomes an API plugin's OutputChunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.frontend.features import Features, not_served
from pegboard.core.interfaces.client import Embedding, OutputChunk
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.messages import TokenOutput
from pegboard.toolkit.text.detokenize import IncrementalDetokenizer
from pegboard.toolkit.text.stop import StopMatcher, StopPrefixes, compiled

if TYPE_CHECKING:
    from pegboard.core.interfaces.client import EmbedRequest
    from pegboard.core.interfaces.messages import TokenizedRequest
    from pegboard.core.interfaces.tokenizer import Tokenizer


class OutputState:
    """One request's output so far: incremental detokenisation and the trimming of stop strings.

    Whether a stop string ended the output is the scheduler's word (it may have had to ignore one, for
    `min_new_tokens`); here only text that could be the beginning of one is held back, so that no part of a stop string
    ever leaves.
    """

    def __init__(self, request: TokenizedRequest, tokenizer: Tokenizer, features: Features | None = None) -> None:
        sampling = request.sampling
        self._features = features or Features()
        self.rid = request.name or request.rid
        self._trim = not sampling.no_stop_trim
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            skip_special_tokens=sampling.skip_special_tokens,
            spaces_between_special_tokens=sampling.spaces_between_special_tokens,
        )
        self._held = ""
        self._prefixes: StopPrefixes | None = None
        self._matcher: StopMatcher | None = None
        others = self._features.compile_stops(sampling)
        if others:
            self._matcher = StopMatcher(sampling.stop, others, include_stop=sampling.no_stop_trim)
        elif sampling.stop:
            self._prefixes = StopPrefixes(compiled(sampling.stop))
        self._plain = self._prefixes is None and self._matcher is None
        """Whether text passes as it comes, until the end."""
        self._ignored = max(0, sampling.min_new_tokens - 1)
        """Tokens to come within which nothing that matches ends the output."""
        self._counters = (0, 0, 0, 0)
        self._cached_from: Mapping[str, int] = {}

    def push(self, output: TokenOutput) -> OutputChunk:
        """Return the chunk for these tokens. After the one with a finish reason there is none."""
        prompt, completion, cached, retractions = self._counters
        if output.completion_tokens or output.prompt_tokens:
            prompt, completion = output.prompt_tokens, output.completion_tokens
            cached, retractions = output.cached_tokens, output.num_retractions
            self._cached_from = output.cached_from or {}
        else:
            completion += len(output.token_ids)
        self._counters = (prompt, completion, cached, retractions)
        chunk = OutputChunk(
            self.rid,
            self._text(output),
            output.token_ids,
            output.finish_reason,
            prompt,
            completion,
            cached,
            retractions,
            output.logprobs,
            cached_from=self._cached_from,
        )
        if output.features or output.rows:
            self._features.finish(chunk, output)
        return chunk

    def _text(self, output: TokenOutput) -> str:
        ids: Sequence[int] = output.token_ids
        reason = output.finish_reason
        if reason is None and self._plain:
            return self._detokenizer.push(ids)
        matched = reason.get("matched") if reason is not None else None
        if self._trim and isinstance(matched, int) and ids and ids[-1] == matched:
            ids = ids[:-1]
        if self._matcher is not None:
            try:
                return self._matched_text(self._matcher, ids, matched, last=reason is not None)
            except Exception as error:
                raise self._features.unread(error) from error
        if reason is None and self._prefixes is not None:
            new = self._detokenizer.push(ids)
            self._prefixes.feed(new)
            text, keep = self._held + new, self._prefixes.longest
            self._held = text[len(text) - keep :]
            return text[: len(text) - keep]
        before = self._held + self._detokenizer.push(ids[:-1])
        text = before + self._detokenizer.push(ids[-1:])
        text += self._detokenizer.flush()
        self._held = ""
        if isinstance(matched, str):
            # The last token completed it; what looks like it before was ignored.
            at = text.find(matched, max(0, len(before) - len(matched) + 1))
            if at >= 0 or (at := text.find(matched)) >= 0:
                return text[: at if self._trim else at + len(matched)]
        return text

    def _matched_text(self, matcher: StopMatcher, ids: Sequence[int], matched: int | str | None, *, last: bool) -> str:
        """Find where what a stage brings has matched. What it is called does not say, so this repeats what the
        scheduler's matcher has done, token by token.
        """
        text = ""
        for place, token in enumerate(ids, 1):
            ignore = self._ignored > 0 or (last and place == len(ids) and not isinstance(matched, str))
            self._ignored = max(0, self._ignored - 1)
            text += matcher.feed(self._detokenizer.push([token]), ignore=ignore)[0]
        if last and matcher.matched is None:
            text += matcher.feed(self._detokenizer.flush(), ignore=True)[0] + matcher.flush()
        return text


def finish_embedding(request: EmbedRequest, output: TokenOutput, features: Features) -> Embedding:
    """Return the embedding that a request's last output brings, as the request wants it."""
    chunk = OutputChunk(output.rid, "", [], None, output.prompt_tokens, 0, output.cached_tokens)
    features.finish(chunk, output)
    if chunk.vector is None:
        raise not_served("embeddings")
    vector = np.array(chunk.vector)
    if request.dimensions is not None:
        if request.dimensions > vector.shape[0]:
            raise InvalidRequest(
                f"dimensions must be at most {vector.shape[0]}, the model's own, got {request.dimensions}",
                param="dimensions",
            )
        vector = vector[: request.dimensions]
    if request.normalize:
        vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
    return Embedding(vector.tolist(), output.prompt_tokens, output.cached_tokens)


_COUNTERS = (
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "cached_from",
    "num_retractions",
)


def merge(first: TokenOutput, second: TokenOutput) -> TokenOutput:
    """Return two consecutive outputs of one request as one, for a reader that fell behind. `first` is used up."""
    first.token_ids += second.token_ids
    if second.logprobs is not None:
        first.logprobs = (first.logprobs or []) + second.logprobs
    if second.features is not None:
        first.features = {**(first.features or {}), **second.features}
    if second.rows is not None:
        before = first.rows or {}
        first.rows = {name: before.get(name, []) + rows for name, rows in second.rows.items()}
    first.finish_reason = second.finish_reason
    if second.has_counters:
        for name in _COUNTERS:
            setattr(first, name, getattr(second, name))
    elif first.has_counters:
        first.completion_tokens += len(second.token_ids)
    return first
