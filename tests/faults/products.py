"""Fields of bodies that say how much: their bounds on each generating route, and bodies with any of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pegboard.core.config.sections import ServerSection
from pegboard.plugins.grammar.options import GrammarSection
from pegboard.toolkit.text.encoding import CHARS_PER_TOKEN

CONTEXT = 128
"""Of the model that is asked: short, so that all of these requests are over soon."""
MAX_BODY = 4 * 2**20
"""Bytes of a body: texts and lists that would not fit together share it."""
LARGEST_BODY, LARGEST_SCHEMA = ServerSection().max_body_bytes, GrammarSection().max_source_bytes - 2048
"""What a server takes by itself; of the schema that is what `schema` is asked for, which makes a little more."""

_FIT = CONTEXT // 2
"""Characters of a text that fits into the context, with what a template puts around it."""
_LETTERS = CHARS_PER_TOKEN * CONTEXT - 16
"""Most characters of a text that is looked at, since it could fit."""
_TEXTS = frozenset({"characters", "characters_1", "characters_2", "query", "system", "instructions"})

MANY = frozenset(
    {"n", "best_of", "prompts", "tokens", "messages", "input", "items", "documents", "text_1", "text_2", "prompt"}
)
"""Fields that say how many times something is done."""
HURT = {
    frozenset(names)
    for names in (
        ("n", "stop"),
        ("n", "stop_regex"),
        ("n", "params"),
        ("n", "bad_words"),
        ("n", "token_ids_logprob"),
        ("prompts", "characters"),
        ("prompts", "token_ids_logprob"),
        ("tokens", "token_ids_logprob"),
        ("messages", "characters"),
        ("messages", "tools"),
        ("prompt", "characters"),
        ("documents", "query"),
        ("items", "label_token_ids"),
        ("input", "characters"),
        ("text_1", "characters_1"),
    )
}
"""Pairs that made servers large or silent, on whichever route and in whichever order."""

Sizes = Mapping[str, int]
Body = dict[str, Any]

SAMPLING = {
    "tokens": CONTEXT - 1,
    "stop": 64,
    "stop_length": 1024,
    "stop_regex": 16,
    "stop_regex_length": 1024,
    "stop_token_ids": 4096,
    "logit_bias": 300,
    "bad_words": 256,
    "params": 60 * 1024,
    "salt": 1024,
    "stream": 1,
}
"""Bounds of what all bodies with sampling have. A stream says more, and more often."""


@dataclass(frozen=True, slots=True)
class Route:
    """A route, its fields with their bounds, and how a body is made of some of them. Others have the least size."""

    path: str
    bounds: Sizes
    build: Callable[[Sizes], Body]

    def pairs(self, *, quick: bool = False) -> Iterator[tuple[tuple[str, ...], Body]]:
        """Names of two fields, and a body with both at their bounds. `quick`: of what is honest work for seconds, since
        it is done many times over, only those pairs that have hurt.
        """
        for names in itertools.combinations(self.bounds, 2):
            if not quick or MANY.isdisjoint(names) or frozenset(names) in HURT:
                yield names, self.build({name: self.bounds[name] for name in names})

    def largest(self) -> Iterator[tuple[tuple[str, ...], Body]]:
        """The same of the pairs that have hurt, and of schemas many times over, as large as a server takes them."""
        for names in itertools.combinations(self.bounds, 2):
            if frozenset(names) in HURT or ("schema" in names and not MANY.isdisjoint(names)):
                more = {"schema": LARGEST_SCHEMA, **dict.fromkeys(_TEXTS, _LETTERS)}
                sizes = {name: more.get(name, self.bounds[name]) for name in names}
                yield names, self.build({**sizes, "body": LARGEST_BODY})


# ---- parts of bodies ------------------------------------------------------------------------------------------------


def text(length: int) -> str:
    """Words of about this length together."""
    return ("some words of a text " * (length // 21 + 1))[: max(1, length)]


def room(sizes: Sizes) -> int:
    """For whatever grows with its number: the other field of a pair has the rest."""
    return sizes.get("body", MAX_BODY) - 300 * 1024


def texts(count: int, length: int, room: int) -> list[str]:
    """Different texts, cut so that all of them take less than `room`."""
    length = min(length, max(1, room // count - 16))
    return [f"{number} {text(length)}" for number in range(count)]


def ids(count: int, length: int, room: int) -> list[list[int]]:
    """Lists of token ids, no two of which begin alike; three bytes a token."""
    length = min(length, max(2, room // count // 3 - 2))
    return [[10 + number % 90, 10 + number // 90 % 90, *([10] * (length - 2))][:length] for number in range(count)]


def sampling(sizes: Sizes, limit: str = "max_tokens", stop: str = "stop") -> Body:
    """Fields that all bodies with sampling have; what their limit and their stop strings are called."""
    body: Body = {limit: sizes.get("tokens", 1), "ignore_eos": True}
    if "stop" in sizes or "stop_length" in sizes:
        length = sizes.get("stop_length", 8)
        body[stop] = [f"{number:03}{'ab' * 512}"[:length] for number in range(sizes.get("stop", 1))]
    if "stop_regex" in sizes or "stop_regex_length" in sizes:
        # A class of characters is one state of the automaton, however long it is.
        letters = "abcdefghij" * 103
        length = sizes.get("stop_regex_length", 60)
        patterns = [f"(x|y{number})[a-f]{{20}}[{letters}"[: length - 1] + "]" for number in range(16)]
        body["stop_regex"] = patterns[: sizes.get("stop_regex", 1)]
    if "stop_token_ids" in sizes:
        body["stop_token_ids"] = [7] * sizes["stop_token_ids"]
    if "logit_bias" in sizes:
        body["logit_bias"] = {str(token): 1.0 for token in range(sizes["logit_bias"])}
    if "bad_words" in sizes:
        body["custom_logit_processor"] = "bad_words"
        body["custom_params"] = {"words": [f"{number:03}{text(200)}" for number in range(sizes["bad_words"])]}
    return body


def common(sizes: Sizes) -> Body:
    """Fields beside those of sampling that all generating bodies have."""
    body: Body = {"params": {"other": "x" * sizes["params"]}} if "params" in sizes else {}
    if "salt" in sizes:
        body["cache_salt"] = "s" * sizes["salt"]
    return {**body, "stream": True} if "stream" in sizes else body


def schema(size: int) -> Body:
    """A JSON schema of about `size` bytes. Names are bounded by themselves, so that the rest is words about them."""
    names = [f"name_{number}" for number in range(min(size, 60_000) // 96)]
    properties = {name: {"type": "string", "maxLength": 20, "description": "some words"} for name in names}
    rest = {"description": text(size - 60_000)} if size > 60_000 else {}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False, **rest}


def tools(sizes: Sizes, key: str = "parameters", wrapped: bool = True) -> list[Body]:
    """Tools: their number, and the characters of all of them together."""
    if "tools" not in sizes and "tool_characters" not in sizes:
        return []
    count = sizes.get("tools", 1)
    words = text(sizes.get("tool_characters", 64) // count)
    made = [
        {"name": f"tool_{number}", "description": words, key: {"type": "object", "properties": {}}}
        for number in range(count)
    ]
    return [{"type": "function", "function": one} for one in made] if wrapped else made


def messages(sizes: Sizes) -> list[Body]:
    """A conversation: the number of its messages, and the characters of each."""
    found = texts(sizes.get("messages", 1), sizes.get("characters", 8), room(sizes) // 4)
    return [{"role": ("user", "assistant")[number % 2], "content": one} for number, one in enumerate(found)]


def _response_format(sizes: Sizes) -> Body:
    if "schema" not in sizes:
        return {}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema(sizes["schema"])}}}


# ---- bodies ---------------------------------------------------------------------------------------------------------


def _generate(sizes: Sizes) -> Body:
    inner = {**sampling(sizes, "max_new_tokens"), "n": sizes.get("n", 1)}
    if "schema" in sizes:
        inner["json_schema"] = schema(sizes["schema"])
    body: Body = {"sampling_params": inner, **common(sizes)}
    count = sizes.get("prompts", 1)
    if "ids" in sizes:
        many: list[Any] = ids(count, sizes["ids"], room(sizes))
        body["input_ids"] = many if count > 1 else many[0]
    else:
        many = texts(count, sizes.get("characters", 8), room(sizes))
        body["text"] = many if count > 1 else many[0]
    if any(name in sizes for name in ("top_logprobs_num", "token_ids_logprob", "prompt_logprobs")):
        body |= {
            "return_logprob": True,
            "top_logprobs_num": sizes.get("top_logprobs_num", 0),
            "token_ids_logprob": [5] * sizes.get("token_ids_logprob", 0),
        }
    if "prompt_logprobs" in sizes:
        body["logprob_start_len"] = 0
        if "ids" not in sizes and "characters" not in sizes:
            body.pop("text")
            body["input_ids"] = ids(count, CONTEXT - 2, room(sizes)) if count > 1 else ids(1, CONTEXT - 2, MAX_BODY)[0]
    return body


def _encode(sizes: Sizes) -> Body:
    count = sizes.get("prompts", 1)
    if "ids" in sizes:
        return {"input_ids": ids(count, sizes["ids"], room(sizes)), **common(sizes)}
    return {"text": texts(count, sizes.get("characters", 8), room(sizes)), **common(sizes)}


def _chat(sizes: Sizes) -> Body:
    body = {"messages": messages(sizes), "n": sizes.get("n", 1), **sampling(sizes), **common(sizes)}
    body |= {"tools": tools(sizes), **_response_format(sizes)}
    if "top_logprobs" in sizes:
        body |= {"logprobs": True, "top_logprobs": sizes["top_logprobs"]}
    if "prompt_logprobs" in sizes:
        body["prompt_logprobs"] = sizes["prompt_logprobs"]
    return body


def _completions(sizes: Sizes) -> Body:
    count = sizes.get("prompts", 1)
    prompts: list[Any] = (
        ids(count, sizes["ids"], room(sizes))
        if "ids" in sizes
        else texts(count, sizes.get("characters", 8), room(sizes))
    )
    body: Body = {"prompt": prompts, "n": sizes.get("n", 1), **sampling(sizes), **common(sizes)}
    body |= _response_format(sizes)
    if "best_of" in sizes:
        body["best_of"] = sizes["best_of"]
    if "logprobs" in sizes:
        body |= {"logprobs": sizes["logprobs"], "echo": True}
    if "prompt_logprobs" in sizes:
        body["prompt_logprobs"] = sizes["prompt_logprobs"]
    return body


def _responses(sizes: Sizes) -> Body:
    body = {"input": messages(sizes), "store": False, **sampling(sizes, "max_output_tokens"), **common(sizes)}
    flat = [{"type": "function", **one["function"]} for one in tools(sizes)]
    body |= {"tools": flat, "instructions": text(sizes.get("instructions", 1))}
    if "top_logprobs" in sizes:
        body["top_logprobs"] = sizes["top_logprobs"]
    if "schema" in sizes:
        body["text"] = {"format": {"type": "json_schema", "name": "a", "schema": schema(sizes["schema"])}}
    return body


def _anthropic(sizes: Sizes) -> Body:
    body = {"model": "tiny", "messages": messages(sizes), "system": text(sizes.get("system", 1))}
    made = tools(sizes, "input_schema", wrapped=False)
    return {**body, "tools": made} if made else body


def _anthropic_messages(sizes: Sizes) -> Body:
    body = {**_anthropic(sizes), **sampling(sizes, stop="stop_sequences"), **common(sizes)}
    if "schema" in sizes:
        body["output_config"] = {"format": {"type": "json_schema", "schema": schema(sizes["schema"])}}
    return body


def _embeddings(sizes: Sizes) -> Body:
    count = sizes.get("input", 1)
    if "ids" in sizes:
        return {"input": ids(count, sizes["ids"], room(sizes)), **common(sizes)}
    return {"input": texts(count, sizes.get("characters", 8), room(sizes)), **common(sizes)}


def _score(sizes: Sizes) -> Body:
    half = room(sizes) // 2
    found = {
        "text_1": texts(sizes.get("text_1", 1), sizes.get("characters_1", 8), half),
        "text_2": texts(sizes.get("text_2", 1), sizes.get("characters_2", 8), half),
    }
    if len(found["text_1"]) > 1 and len(found["text_2"]) == 1:
        found = {"text_1": found["text_2"], "text_2": found["text_1"]}
    return {**found, **common(sizes)}


def _labels(sizes: Sizes) -> Body:
    return {
        "query": text(sizes.get("query", 8)),
        "items": texts(sizes.get("items", 1), sizes.get("characters", 8), room(sizes)),
        "label_token_ids": [5] * sizes.get("label_token_ids", 1),
        **common(sizes),
    }


def _rerank(sizes: Sizes) -> Body:
    documents = texts(sizes.get("documents", 1), sizes.get("characters", 8), room(sizes))
    return {"query": text(sizes.get("query", 8)), "documents": documents, **common(sizes)}


def _tokenize(sizes: Sizes) -> Body:
    if "messages" in sizes or "tools" in sizes or "tool_characters" in sizes:
        return {"messages": messages(sizes), "tools": tools(sizes), "return_token_strs": True}
    return {"prompt": texts(sizes.get("prompt", 1), sizes.get("characters", 8), room(sizes)), "return_token_strs": True}


def _detokenize(sizes: Sizes) -> Body:
    return {"tokens": ids(sizes.get("lists", 1), sizes.get("ids", 1), room(sizes))}


_CHAT_SIZES = {"messages": 40_000, "characters": _FIT, "tools": 128, "tool_characters": 500_000, "schema": 60_000}
_SCORED = {"query": _FIT, "characters": _FIT, "params": 60 * 1024}

ROUTES = {
    "generate": Route(
        "/generate",
        {
            "n": 1024,
            "prompts": 1024,
            "characters": _FIT,
            "ids": CONTEXT - 1,
            **SAMPLING,
            "top_logprobs_num": 128,
            "token_ids_logprob": 4096,
            "prompt_logprobs": 1,
            "schema": 60_000,
        },
        _generate,
    ),
    "encode": Route("/encode", {"prompts": 1024, "characters": _FIT, "ids": CONTEXT - 1, "params": 60 * 1024}, _encode),
    "chat": Route(
        "/v1/chat/completions",
        {"n": 128, **_CHAT_SIZES, **SAMPLING, "top_logprobs": 20, "prompt_logprobs": 20},
        _chat,
    ),
    "completions": Route(
        "/v1/completions",
        {
            "n": 128,
            "best_of": 128,
            "prompts": 1024,
            "characters": _FIT,
            "ids": CONTEXT - 1,
            **SAMPLING,
            "logprobs": 20,
            "prompt_logprobs": 20,
            "schema": 60_000,
        },
        _completions,
    ),
    "responses": Route(
        "/v1/responses", {**_CHAT_SIZES, "instructions": _FIT, **SAMPLING, "top_logprobs": 20}, _responses
    ),
    "embeddings": Route(
        "/v1/embeddings",
        {"input": 2048, "characters": _FIT, "ids": CONTEXT - 1, "params": 60 * 1024},
        _embeddings,
    ),
    "score": Route(
        "/v1/score",
        {"text_1": 1024, "text_2": 1024, "characters_1": _FIT, "characters_2": _FIT, "params": 60 * 1024},
        _score,
    ),
    "labels": Route("/v1/score", {"items": 1024, "label_token_ids": 4096, **_SCORED}, _labels),
    "rerank": Route("/v1/rerank", {"documents": 1024, **_SCORED}, _rerank),
    "tokenize": Route(
        "/tokenize",
        {"prompt": 1024, "characters": _FIT, "messages": 40_000, "tools": 128, "tool_characters": 500_000},
        _tokenize,
    ),
    "detokenize": Route("/detokenize", {"lists": 1024, "ids": CONTEXT}, _detokenize),
    "messages": Route("/v1/messages", {**_CHAT_SIZES, "system": _FIT, **SAMPLING}, _anthropic_messages),
    "count_tokens": Route(
        "/v1/messages/count_tokens",
        {
            "messages": 40_000,
            "characters": _FIT,
            "system": _FIT,
            "tools": 128,
            "tool_characters": 500_000,
        },
        _anthropic,
    ),
}
