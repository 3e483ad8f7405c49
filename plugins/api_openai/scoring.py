"""/v1/score and /v1/rerank: how well texts fit each other; /v1/classify, for which a model needs a head of its own."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, RootModel, model_validator

from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.plugins.api_openai.embeddings import EmbeddingFields, EmbeddingUsage, embedding_usage
from pegboard.plugins.api_openai.surface import Surface, documented, new_id
from pegboard.plugins.api_openai.unsupported import RERANK, SCORE
from pegboard.toolkit.http.answers import json_response
from pegboard.toolkit.http.bodies import RequestModel, parse_body
from pegboard.toolkit.http.generation import MAX_REQUESTS
from pegboard.toolkit.http.openapi import body_docs, error_responses

if TYPE_CHECKING:
    from pegboard.core.interfaces.client import Embedding
    from pegboard.toolkit.http.generation import Answer

Texts = str | list[str]


class ScoreBody(EmbeddingFields):
    """Body of `/v1/score`, in one of three forms: `text_1` and `text_2` (one and one, one and many, or pairs), the same
    as `query` and `documents`, or `query` and `items` with `label_token_ids`: how likely each of these tokens is to
    follow them.
    """

    refused = SCORE

    text_1: Texts | None = None
    text_2: Texts | None = None
    query: str | list[str] | list[int] | None = None
    documents: Texts | None = None
    items: str | list[str] | list[list[int]] | None = None
    label_token_ids: list[int] = []
    apply_softmax: bool = False
    """Whether the labels' probabilities add up to one."""
    item_first: bool = False

    @property
    def names(self) -> tuple[str, str]:
        """The fields that have the texts."""
        return ("text_1", "text_2") if self.query is None and self.documents is None else ("query", "documents")

    def pairs(self) -> list[tuple[str, str]]:
        """Return the texts to compare."""
        names = self.names
        first, second = (self._texts(name) for name in names)
        if len(first) == 1:
            first *= len(second)
        if len(first) != len(second):
            raise InvalidRequest(
                f"{names[1]} must have as many entries as {names[0]} ({len(first)}), got {len(second)}", param=names[1]
            )
        return list(zip(first, second, strict=True))

    def _texts(self, name: str) -> list[str]:
        value = getattr(self, name)
        found = value if isinstance(value, list) else [value]
        if not value or not all(isinstance(one, str) and one for one in found):
            raise InvalidRequest(f"{name} must be a text, or a list of texts, and not empty", param=name)
        _check_count(name, found)
        return found

    def label_prompts(self) -> list[str | list[int]]:
        """Query and item as one prompt, for each item."""
        items: Any = self.items if isinstance(self.items, list) else [self.items]
        if not self.items or not all(items):
            raise InvalidRequest("items is empty", param="items")
        _check_count("items", items)
        query: Any = self.query
        whole = list if isinstance(items[0], list) else str
        if not isinstance(query, whole) or (whole is list and not all(isinstance(one, int) for one in query)):
            raise InvalidRequest("query and items must both be texts, or both token ids", param="query")
        return [item + query if self.item_first else query + item for item in items]


class RerankBody(EmbeddingFields):
    """Body of `/v1/rerank`. A document is a text, or an object that has one."""

    refused = RERANK

    query: str
    documents: list[str | dict[str, Any]]
    top_n: int | None = None
    """How many of the best to give; all by default. SGLang's router calls it `top_k`."""
    top_k: int | None = None
    return_documents: bool = True
    bare: bool = False
    """Whether the answer is a bare list with scores, as SGLang's. It is one too where the body has a `rid`, were it
    null, and does not say `false` here: SGLang's router, which reads nothing else, always writes one."""

    @model_validator(mode="before")
    @classmethod
    def _rid_means_bare(cls, data: object) -> object:
        if not isinstance(data, dict) or "rid" not in data or data.get("bare") is not None:
            return data
        return {**data, "bare": True}

    @property
    def most(self) -> int | None:
        """How many to give; None for all."""
        return self.top_k if self.top_n is None else self.top_n

    def texts(self) -> list[str]:
        """Return the documents' texts. Raises InvalidRequest for what has none."""
        if not self.query:
            raise InvalidRequest("query is empty", param="query")
        if not self.documents:
            raise InvalidRequest("documents is empty", param="documents")
        _check_count("documents", self.documents)
        for name, value in (("top_n", self.top_n), ("top_k", self.top_k)):
            if value is not None and value < 1:
                raise InvalidRequest(f"{name} must be at least 1, got {value}", param=name)
        found = [one.get("text") if isinstance(one, dict) else one for one in self.documents]
        for i, text in enumerate(found):
            if not isinstance(text, str) or not text:
                raise InvalidRequest(f"documents.{i} has no text", param=f"documents.{i}")
        return [str(text) for text in found]


class ClassifyBody(RequestModel):
    """Body of `/v1/classify`."""

    model: str = ""
    input: str | list[str] | list[int] | list[list[int]]


class Scoring:
    """The routes."""

    def __init__(self, surface: Surface) -> None:
        self._surface = surface

    def add_to(self, router: APIRouter) -> None:
        model, texts = self._surface.model, ["Paris is its capital.", "Cats purr."]
        score = documented(ScoreBody, Scores, {"model": model, "text_1": "France", "text_2": texts}, 504)
        rerank = documented(
            RerankBody, RankingAnswer, {"model": model, "query": "France", "documents": texts, "top_n": 1}, 504
        )
        for prefix in ("/v1", ""):
            router.post(f"{prefix}/score", summary="How alike texts are, or how likely labels are", **score)(self.score)
            router.post(f"{prefix}/rerank", summary="Documents in the order in which they fit", **rerank)(self.rerank)
        docs = body_docs(ClassifyBody, {})
        # There is no example that works.
        del docs["requestBody"]["content"]["application/json"]["example"]
        router.post(
            "/v1/classify",
            summary="Classify texts: for models with a head for it, which this server does not run",
            openapi_extra=docs,
            responses=error_responses(404),
        )(self.classify)

    async def score(self, request: Request) -> Response:
        body = await parse_body(request, ScoreBody)
        self._surface.check_model(body.model)
        if body.label_token_ids or body.items is not None:
            return await self._labels(request, body)
        pairs = body.pairs()
        texts = [text for pair in pairs for text in pair]
        found, places = await self._embedded(request, body, texts, body.names[1])
        data = [
            {"object": "score", "index": i, "score": _cosine(found[places[one]], found[places[other]])}
            for i, (one, other) in enumerate(pairs)
        ]
        return json_response({**self._head("score"), "object": "list", "data": data, "usage": embedding_usage(found)})

    async def rerank(self, request: Request) -> Response:
        body = await parse_body(request, RerankBody)
        self._surface.check_model(body.model)
        texts = body.texts()
        found, places = await self._embedded(request, body, [body.query, *texts], "documents")
        query = found[places[body.query]]
        scores = [_cosine(query, found[places[text]]) for text in texts]
        # Of equals the first one first.
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.most]
        if body.bare:
            rid, usage = new_id("rerank", body.rid), embedding_usage(found)
            return json_response([_bare(i, scores[i], texts, body.return_documents, rid, usage) for i in order])
        results = [
            {
                "index": i,
                "relevance_score": scores[i],
                **({"document": {"text": texts[i]}} if body.return_documents else {}),
            }
            for i in order
        ]
        return json_response({**self._head("rerank"), "results": results, "usage": embedding_usage(found)})

    async def classify(self, request: Request) -> Response:
        body = await parse_body(request, ClassifyBody)
        self._surface.check_model(body.model)
        raise InvalidRequest(
            f"the model {self._surface.model!r} generates text and has no head that classifies; /v1/score with "
            "label_token_ids says how likely each of several answers is",
            param="model",
            code="unsupported",
        )

    async def _embedded(
        self, request: Request, body: EmbeddingFields, texts: Sequence[str], field: str
    ) -> tuple[list[Embedding], dict[str, int]]:
        """Embeddings of texts, equal ones once, and where each text's is. `field` is what errors name."""
        places = {text: i for i, text in enumerate(dict.fromkeys(texts))}
        requests = body.embed_requests(list(places), rid=new_id("embd", body.rid))
        return await self._surface.embed(request, requests, {"prompt": field}), places

    async def _labels(self, request: Request, body: ScoreBody) -> Response:
        if not body.label_token_ids:
            raise InvalidRequest("label_token_ids is needed with items", param="label_token_ids")
        rid = new_id("score", body.rid)
        prompts = body.label_prompts()
        requests = [
            GenerateRequest(
                prompt=prompt,
                sampling=SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True),
                rid=rid if len(prompts) == 1 else f"{rid}_{i}",
                priority=body.priority,
                cache_salt=body.salt,
                logprobs=0,
                token_ids_logprob=tuple(body.label_token_ids),
                add_special_tokens=body.add_special_tokens,
                params=body.params,
                model=body.model,
            )
            for i, prompt in enumerate(prompts)
        ]
        names = {"token_ids_logprob": "label_token_ids", "prompt": "items"}
        answers = await self._surface.submit(request, requests, names)
        done = await self._surface.collect(request, answers, names)
        scores = [_probabilities(one, body.apply_softmax) for one in done]
        return json_response(
            {**self._head("score"), "object": "scoring", "scores": scores, "usage": embedding_usage(done)}
        )

    def _head(self, prefix: str) -> dict[str, Any]:
        return {"id": new_id(prefix), "created": int(time.time()), "model": self._surface.model}


def _check_count(name: str, values: Sequence[object]) -> None:
    if len(values) > MAX_REQUESTS:
        raise InvalidRequest(f"{name} may have at most {MAX_REQUESTS} entries, got {len(values)}", param=name)


def _cosine(one: Embedding, other: Embedding) -> float:
    """Of vectors of length 1."""
    product: float = sum(map(operator.mul, one.vector, other.vector))
    return max(-1.0, min(1.0, product))


def _bare(
    index: int, score: float, texts: Sequence[str], with_text: bool, rid: str, usage: Mapping[str, int]
) -> dict[str, object]:
    """Return an entry of the bare list."""
    meta = {"id": f"{rid}_{index}", "prompt_tokens": usage["prompt_tokens"]}
    return {"score": score, "document": texts[index] if with_text else None, "index": index, "meta_info": meta}


def _probabilities(answer: Answer, softmax: bool) -> list[float]:
    """Of the labels, in their order: as they are, or as if there were no other tokens."""
    values = [value for value, _ in answer.logprobs[0][2]]
    most = max(values) if softmax and max(values) > -math.inf else 0.0
    found = [math.exp(value - most) for value in values]
    total = sum(found) if softmax else 1.0
    return [value / total if total else 0.0 for value in found]


class ScoreEntry(BaseModel):
    """How alike the texts of one pair are: the cosine of their embeddings, from -1 to 1."""

    object: Literal["score"]
    index: int
    score: float


class Scores(BaseModel):
    """The answer of `/v1/score`: `data` for texts, `scores` for labels, item by item."""

    id: str
    object: Literal["list", "scoring"]
    created: int
    model: str
    data: list[ScoreEntry] | None = None
    scores: list[list[float]] | None = None
    usage: EmbeddingUsage


class RankedText(BaseModel):
    """A document."""

    text: str


class RankEntry(BaseModel):
    """A document's place in the request, and how well it fits, from -1 to 1."""

    index: int
    relevance_score: float
    document: RankedText | None = None


class BareRankEntry(BaseModel):
    """A document's place in the request, and how well it fits, in SGLang's words. `meta_info` is of all together."""

    score: float
    document: str | None
    index: int
    meta_info: dict[str, Any]


class Ranking(BaseModel):
    """The answer of `/v1/rerank`, best first."""

    id: str
    created: int
    model: str
    results: list[RankEntry]
    usage: EmbeddingUsage


class RankingAnswer(RootModel[Ranking | list[BareRankEntry]]):
    """Either form of the answer; `bare` of the body says which."""
