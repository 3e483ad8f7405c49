"""/v1/completions: text continued."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.api_openai.fields import CommonBody, check_top
from pegboard.plugins.api_openai.logprobs import CompletionLogprobs
from pegboard.plugins.api_openai.surface import Surface, documented, new_id
from pegboard.plugins.api_openai.unsupported import COMPLETIONS
from pegboard.plugins.api_openai.usage import Usage
from pegboard.plugins.api_openai.writer import Choice, Writer, ending
from pegboard.toolkit.http.bodies import parse_body
from pegboard.toolkit.http.request_fields import with_declared

if TYPE_CHECKING:
    from pegboard.core.interfaces.client import Logprob, OutputChunk
    from pegboard.toolkit.http.generation import Answer

DEFAULT_MAX_TOKENS = 16
"""What OpenAI's completions generate when a request does not say how much."""
MAX_BEST_OF = 128

NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "logprob_start": "echo"}


class CompletionBody(CommonBody):
    """Body of `/v1/completions`."""

    refused = COMPLETIONS

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    echo: bool = False
    suffix: str = ""
    best_of: int | None = None
    """How many answers to generate, of which the `n` likeliest are given."""
    add_special_tokens: bool = True

    def check(self, prompts: int = 1) -> None:
        """As CommonBody's, of all prompts."""
        if self.suffix:
            raise InvalidRequest("suffix: this server fills in no middles", param="suffix", code="unsupported")
        if self.best_of is not None:
            if not self.n <= self.best_of <= MAX_BEST_OF:
                raise InvalidRequest(
                    f"best_of must be from n ({self.n}) to {MAX_BEST_OF}, got {self.best_of}", param="best_of"
                )
            if self.stream and self.best_of != self.n:
                raise InvalidRequest("best_of is not for streams: the best answer is known at the end", param="best_of")
        if self.echo and self.logprobs is not None and self.session_params is not None and self.session_params.id:
            raise InvalidRequest("echo with logprobs is not for turns of a session", param="echo")
        super().check(len(self.prompts()))
        check_top("logprobs", self.logprobs or 0)

    @property
    def copies(self) -> int:
        return self.best_of or self.n

    @property
    def top_wanted(self) -> int | None:
        if self.logprobs is None and self.copies > self.n:
            return 0
        return self.logprobs

    @property
    def limit(self) -> int:
        """How many tokens to generate."""
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, one unless `prompt` is a list of texts or of lists."""
        prompt: Any = self.prompt
        found = list(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)) else [prompt]
        if not all(found):
            raise InvalidRequest("prompt is empty", param="prompt")
        return found


class CompletionWriter(Writer):
    """Bodies of `/v1/completions`. `echoes` holds, per choice, the prompt's text that goes before the answer."""

    kind = "text_completion"
    chunk_kind = "text_completion"
    wanted: CompletionBody

    def __init__(
        self,
        surface: Surface,
        rid: str,
        body: CompletionBody,
        echoes: Sequence[str],
        prompt_ids: Sequence[list[int]] | None = None,
    ) -> None:
        super().__init__(surface, rid, body, prompt_ids)
        self._echoes = echoes
        self._columns = [
            CompletionLogprobs(surface.texts, body.logprobs or 0, skip_special_tokens=body.skip_special_tokens)
            for _ in echoes
        ]
        self._first = [True] * len(echoes)

    def choice(self, index: int, answer: Answer) -> Choice:
        echoed = answer.input_logprobs if self.wanted.echo else []
        return {
            "index": index,
            "text": self._echoes[index] + answer.text,
            "logprobs": self._logprobs(index, [*echoed, *answer.logprobs]),
            **ending(answer.finish_reason),
            **self.extras(answer),
            **self._prompt(index),
        }

    def chosen(self, answers: Sequence[Answer]) -> Sequence[Answer]:
        n, copies = self.wanted.n, self.wanted.copies
        if n == copies:
            return answers
        groups = [answers[start : start + copies] for start in range(0, len(answers), copies)]
        return [best for group in groups for best in sorted(group, key=_likelihood, reverse=True)[:n]]

    def begin(self, index: int) -> list[Choice]:
        return []

    def pieces(self, index: int, chunk: OutputChunk) -> list[Choice]:
        echo, prompt = "", {}
        entries: list[Logprob] = list(chunk.logprobs or ())
        if self._first[index]:
            self._first[index] = False
            prompt = self._prompt(index)
            echo = self._echoes[index]
            if self.wanted.echo:
                entries = [*(chunk.input_logprobs or ()), *entries]
        ids = {"token_ids": chunk.token_ids} if self.wanted.return_token_ids else {}
        ended = chunk.finish_reason is not None
        if not (echo or chunk.text or entries or ended or chunk.extra or (ids and chunk.token_ids)):
            return []
        piece: Choice = {
            "index": index,
            "text": echo + chunk.text,
            "logprobs": self._logprobs(index, entries),
            **ending(chunk.finish_reason),
            **prompt,
            **ids,
        }
        if self.wanted.return_hidden_states:
            piece["hidden_states"] = chunk.hidden_states
        if chunk.extra:
            piece["extra"] = chunk.extra
        return [piece]

    def plain(self, index: int, chunk: OutputChunk) -> str | None:
        wanted = self.wanted
        if (
            self._first[index]
            or chunk.finish_reason is not None
            or chunk.extra
            or wanted.logprobs is not None
            or wanted.return_hidden_states
            or wanted.return_token_ids
        ):
            return None
        return chunk.text

    def piece(self, index: int, text: str) -> Choice:
        return {"index": index, "text": text, "logprobs": None, **ending(None)}

    def _prompt(self, index: int) -> dict[str, object]:
        return {} if self.prompt_ids is None else {"prompt_token_ids": self.prompt_ids[index // self.wanted.n]}

    def _logprobs(self, index: int, entries: Sequence[Logprob]) -> dict[str, object] | None:
        return None if self.wanted.logprobs is None else self._columns[index].columns(entries)


def _likelihood(answer: Answer) -> float:
    """OpenAI's order: the mean of the tokens' logprobs."""
    values = [value for value, _, _ in answer.logprobs]
    return sum(values) / len(values) if values else float("-inf")


class Completions:
    """The route."""

    def __init__(self, surface: Surface) -> None:
        self._surface = surface
        self._body = with_declared(CompletionBody, surface.ctx.body_fields)

    def add_to(self, router: APIRouter) -> None:
        example = {
            "model": self._surface.model,
            "prompt": "The capital of France is",
            "max_tokens": 16,
            "temperature": 0,
        }
        docs = documented(self._body, Completion, example, 409, 504, events="Chunks of a completion, then [DONE].")
        router.post("/v1/completions", summary="Continue a text", **docs)(self.create)

    async def create(self, request: Request) -> Response:
        body = await parse_body(request, self._body)
        surface = self._surface
        surface.check_model(body.model)
        body.check()
        body.check_constraints(surface.client.info)
        grammar = body.grammar()
        rid = new_id("cmpl", body.rid)
        prompts, ids = body.prompts(), None
        if body.return_token_ids:
            special = body.add_special_tokens
            ids = await surface.token_ids(request, prompts, body.n, add_special_tokens=special)
            prompts = [*ids]
        requests = body.engine_requests(
            prompts,
            rid=rid,
            max_new_tokens=body.limit,
            add_special_tokens=body.add_special_tokens,
            logprob_start=0 if body.echo and body.logprobs is not None else None,
            grammar=grammar,
        )
        echoes = [self._text(prompt, body) if body.echo else "" for prompt in body.prompts() for _ in range(body.n)]
        writer = CompletionWriter(surface, rid, body, echoes, ids)
        return await writer.respond(request, requests, {**NAMES, **body.grammar_names})

    def _text(self, prompt: str | list[int], body: CompletionBody) -> str:
        if isinstance(prompt, str):
            return prompt
        return self._surface.client.tokenizer.decode(prompt, skip_special_tokens=body.skip_special_tokens)


class CompletionColumns(BaseModel):
    """Logprobs of a completion, token by token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class PromptLogprob(BaseModel):
    """What is known of one token at one place of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str


class CompletionChoice(BaseModel):
    """One answer."""

    index: int
    text: str
    logprobs: CompletionColumns | None
    finish_reason: Literal["stop", "length", "abort"]
    matched_stop: int | str | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    hidden_states: list[list[float]] | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    extra: dict[str, object] | None = None


class Completion(BaseModel):
    """The answer of `/v1/completions`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
