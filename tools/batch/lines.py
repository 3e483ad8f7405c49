"""The lines of `pegboard generate --file`: what they may say, and what is asked of the engine for each.

Nothing here needs the model, so that every line can be checked before it is loaded.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from pegboard.core.interfaces.errors import InvalidRequest, PegboardError
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.toolkit.grammars.grammar import grammar_of
from pegboard.toolkit.http.bodies import validate_part
from pegboard.toolkit.http.generation import SamplingFields
from pegboard.toolkit.http.refusals import Refusal
from pegboard.tools.chat.conversation import check_messages

_SPOOL_BYTES = 16 * 2**20
"""Standard input beyond this is kept in a temporary file: it is read twice."""


class LineSampling(SamplingFields):
    """`sampling_params` of a line, in the words of the native API."""

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    json_object: bool = False

    def params(self) -> SamplingParams:
        """Return the parameters, checked as far as that is possible without a model. Raises InvalidRequest."""
        grammar = grammar_of(
            json_schema=self.json_schema,
            json_object=self.json_object,
            regex=self.regex,
            ebnf=self.ebnf,
            structural_tag=self.structural_tag,
        )
        params = self.sampling_params(
            max_new_tokens=self.max_new_tokens, min_new_tokens=self.min_new_tokens, grammar=grammar
        )
        params.validate()
        return params


def sampling_of(values: Mapping[str, Any], where: str = "") -> SamplingParams:
    """Return the sampling parameters of plain values. Raises InvalidRequest, naming the field (below `where`), for
    unknown names and for values that cannot be.
    """
    if unknown := sorted(values.keys() - LineSampling.model_fields.keys()):
        prefix = f"{where}: " if where else ""
        raise InvalidRequest(f"{prefix}there is no sampling parameter {unknown[0]!r}", param=where or unknown[0])
    return validate_part(values, LineSampling, where).params()


_LINE_KEYS = frozenset({"id", "prompt", "messages", "sampling_params"})
_BATCH_KEYS = frozenset({"custom_id", "method", "url", "body"})
_SAMPLING = frozenset(LineSampling.model_fields)
_BODY_NAMES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
}
_BODY_IGNORED = frozenset(
    {
        *("messages", "prompt", "user", "metadata", "store", "stream_options", "service_tier"),
        *("safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    }
)
_BODY_NEUTRAL: Mapping[str, Refusal] = {
    **dict.fromkeys(
        (
            *("stream", "tools", "functions", "top_logprobs", "audio", "prediction", "web_search_options", "echo"),
            *("suffix", "priority", "chat_template_kwargs", "continue_final_message", "return_token_ids"),
            *("include_stop_str_in_output", "bad_words", "allowed_token_ids", "structured_outputs"),
        ),
        Refusal(),
    ),
    "n": Refusal(neutral=(1,), false_asks=True),
    "best_of": Refusal(neutral=(1,), false_asks=True),
    "tool_choice": Refusal(neutral=("none", "auto")),
    "function_call": Refusal(neutral=("none", "auto")),
    "parallel_tool_calls": Refusal(neutral=(True,)),
    "modalities": Refusal(neutral=(["text"],)),
    "add_generation_prompt": Refusal(neutral=(True,), false_asks=True),
}
"""Fields that only a server has, with the values that ask for nothing: clients send some whatever they want."""
_URLS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}


@dataclass(frozen=True, slots=True)
class Line:
    """One request of the file. It has a `prompt` (text or token ids) or `messages`. `index` counts requests from 0,
    `number` lines from 1. Equal digests are equal requests, with equal options, to the same model. `model` is what the
    line calls it, or an adapter for it; "": nothing.
    """

    index: int
    number: int
    id: str | int
    prompt: str | list[int]
    messages: list[dict[str, Any]]
    sampling: SamplingParams
    digest: str
    model: str = ""


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is not a request, and why."""

    index: int
    number: int
    id: str | int
    problem: str
    digest: str


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the command's options say for all lines; `chat` puts prompts into the chat template."""

    sampling: Mapping[str, Any]
    model: str = ""
    chat: bool = False
    system: str = ""


class PromptFile:
    """The input, line by line, as often as needed."""

    def __init__(self, path: Path) -> None:
        """Open the file; `-` is standard input, which is read at once. Raises PegboardError where there is nothing to
        read.
        """
        self.name = "stdin" if str(path) == "-" else str(path)
        self._stream: IO[bytes]
        if str(path) == "-":
            self._stream = tempfile.SpooledTemporaryFile(_SPOOL_BYTES)  # noqa: SIM115 - see close
            shutil.copyfileobj(sys.stdin.buffer, self._stream)
            return
        try:
            self._stream = path.open("rb")
            if not self._stream.seekable():
                raise PegboardError(f"--file: {path} cannot be read twice; use `--file - < {path}`")
        except OSError as error:
            raise PegboardError(f"--file: {path} cannot be read: {error.strerror}") from None

    def close(self) -> None:
        self._stream.close()

    def lines(self, defaults: Defaults, duplicates: frozenset[int] = frozenset()) -> Iterator[Line | BadLine]:
        """Yield every line that is not blank. `duplicates` are numbers of lines whose ids are others'."""
        self._stream.seek(0)
        index = 0
        for number, raw in enumerate(self._stream, 1):
            raw = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            if raw.strip():
                line = parse_line(raw, index, number, defaults)
                if number in duplicates and isinstance(line, Line):
                    line = BadLine(index, number, line.id, "its id is that of an earlier line", line.digest)
                yield line
                index += 1


def parse_line(raw: bytes, index: int, number: int, defaults: Defaults) -> Line | BadLine:
    """Return one line's request, or what is wrong with it."""
    name: str | int = index
    try:
        data = _object(raw)
        name = _name(data, index)
        asked = _asked(data, defaults)
        sampling = sampling_of({**defaults.sampling, **asked.sampling}, asked.where)
    except ValueError as error:
        problem = str(error)
    except InvalidRequest as error:
        problem = error.message
    except RecursionError:
        problem = "it is nested too deeply"
    else:
        plain = msgspec.to_builtins(sampling, str_keys=True)
        named = [asked.model] if asked.model else []
        digest = _digest([defaults.model, asked.prompt, asked.messages, plain, *named])
        return Line(index, number, name, asked.prompt, asked.messages, sampling, digest, asked.model)
    return BadLine(index, number, name, problem, hashlib.sha256(raw).hexdigest()[:16])


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a line says, whatever form it has."""

    prompt: str | list[int]
    messages: list[dict[str, Any]]
    sampling: Mapping[str, Any]
    where: str
    model: str = ""


def _object(raw: bytes) -> dict[str, Any]:
    try:
        data = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"no valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError("a line must be a JSON object")
    return data


def _name(data: Mapping[str, Any], index: int) -> str | int:
    key = "custom_id" if "custom_id" in data else "id"
    name = data.get(key)
    if name is None:
        return index
    if isinstance(name, bool) or not isinstance(name, (str, int)) or name == "":
        raise ValueError(f"{key} must be a string or an integer")
    return name


def _asked(data: Mapping[str, Any], defaults: Defaults) -> _Asked:
    batch = bool(_BATCH_KEYS & data.keys())
    known = _BATCH_KEYS if batch else _LINE_KEYS
    if unknown := sorted(data.keys() - known):
        raise ValueError(f"unknown key {unknown[0]!r}; a line has {', '.join(sorted(known))}")
    if batch:
        body, params = _body(data)
        return _Asked(*_question(body, defaults), params, "body", body["model"])
    sampling = data.get("sampling_params") or {}
    if not isinstance(sampling, dict):
        raise ValueError("sampling_params must be an object")
    return _Asked(*_question(data, defaults), sampling, "sampling_params")


def _question(body: Mapping[str, Any], defaults: Defaults) -> tuple[str | list[int], list[dict[str, Any]]]:
    """Prompt and messages, one of which is empty."""
    prompt, messages = body.get("prompt"), body.get("messages")
    if (prompt is None) == (messages is None):
        raise ValueError(
            "either prompt or messages is needed" if prompt is None else "prompt and messages exclude each other"
        )
    if messages is None:
        if isinstance(prompt, list) and prompt and all(type(one) is int for one in prompt):
            return prompt, []
        if not isinstance(prompt, str) or not prompt:
            raise ValueError("prompt must be text, or a list of token ids, and not empty")
        if not defaults.chat:
            return prompt, []
        messages = [{"role": "user", "content": prompt}]
    checked = check_messages(messages)
    if defaults.system and checked[0]["role"] not in ("system", "developer"):
        checked.insert(0, {"role": "system", "content": defaults.system})
    return "", checked


def _body(data: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Return a line of OpenAI's batch format: its question and model, and the sampling parameters in it."""
    url, body = data.get("url", "/v1/chat/completions"), data.get("body")
    if url not in _URLS:
        raise ValueError(f"url must be one of {', '.join(_URLS)}, got {str(url)[:64]!r}")
    if data.get("method", "POST") != "POST":
        raise ValueError("method must be POST")
    if not isinstance(body, dict):
        raise ValueError("body must be an object")
    if _URLS[url] not in body:
        raise ValueError(f"body.{_URLS[url]} is missing")
    model = body.get("model") or ""
    if not isinstance(model, str):
        raise ValueError("body.model must be a string")
    sampling: dict[str, Any] = {}
    for key, value in body.items():
        if value is None or key == "model" or key in _BODY_IGNORED or _asks_nothing(key, value):
            continue
        if key == "response_format":
            sampling |= _response_format(value)
        elif (name := _BODY_NAMES.get(key, key)) in _SAMPLING:
            sampling[name] = value
        else:
            raise ValueError(f"body.{key} is not supported offline, only by a server")
    return {_URLS[url]: body[_URLS[url]], "model": model}, sampling


def _asks_nothing(key: str, value: object) -> bool:
    if key == "logprobs":
        # In completions 0 asks for the log-probability of each token.
        return value is False
    return key in _BODY_NEUTRAL and not _BODY_NEUTRAL[key].concerns(value)


def _response_format(form: Any) -> dict[str, Any]:
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_object": True} if form.get("schema") is None else {"json_schema": form["schema"]}
    schema = form.get("json_schema") if kind == "json_schema" else None
    if not isinstance(schema, dict) or schema.get("schema") is None:
        raise ValueError("body.response_format must have the type text, json_object, or json_schema with a schema")
    return {"json_schema": schema["schema"]}


def _digest(parts: Any) -> str:
    """Return the same for equal requests, today and tomorrow."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
