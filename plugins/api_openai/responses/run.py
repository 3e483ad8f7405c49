"""One response from its creation to its end: its body as it stands, and its stream of events."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.toolkit.answer_stream import AnswerWriter
from pegboard.core.toolkit.http import event
from pegboard.plugins.api_openai.logprobs import chat_logprobs
from pegboard.plugins.api_openai.responses.output import Event, Output

if TYPE_CHECKING:
    from pegboard.core.interfaces.client import OutputChunk
    from pegboard.core.toolkit.generation import Answer, Answers
    from pegboard.core.toolkit.tool_calls import Tools
    from pegboard.core.toolkit.turn import Turn
    from pegboard.plugins.api_openai.responses.body import ResponseBody
    from pegboard.plugins.api_openai.surface import Surface


class Run(AnswerWriter):
    """A response while it is generated, of one answer."""

    def __init__(self, surface: Surface, identity: str, body: ResponseBody, turn: Turn, answers: Answers) -> None:
        self._surface = surface
        self._answers = answers
        self._body = body
        self._output = Output(turn.stream())
        self._thinks = turn.reasoning_parser is not None
        self._sequence = 0
        self.response = _response(surface.model, identity, body, turn.tools)

    @property
    def over(self) -> bool:
        """Whether it has ended, whichever way."""
        return bool(self.response["status"] != "in_progress")

    @property
    def items(self) -> list[dict[str, Any]]:
        """What it has put out so far."""
        return self._output.items

    def collect(self, answer: Answer) -> dict[str, Any]:
        """The response of a whole answer."""
        self._output.feed(answer.text, self._logprobs(answer.logprobs))
        self._close(answer)
        return self.response

    def begin(self) -> bytes:
        kinds = ("response.created", "response.in_progress")
        return b"".join([self._event({"type": kind, "response": self.response}) for kind in kinds])

    def more(self, index: int, chunk: OutputChunk) -> bytes:
        return b"".join([self._event(one) for one in self._chunk(chunk, self._answers.answers[0])])

    def end(self) -> bytes:
        """The event that says how it ended."""
        return self._event({"type": f"response.{_ENDS[self.response['status']]}", "response": self.response})

    def failed(self, error: InvalidRequest) -> bytes:
        """The event of a failure on the way."""
        self.response |= {
            "status": "failed",
            "error": {"code": "server_error", "message": error.message},
            "output": self._output.items,
        }
        return self._event({"type": "response.failed", "response": self.response})

    def _chunk(self, chunk: OutputChunk, answer: Answer) -> list[Event]:
        told = self._output.feed(chunk.text, self._logprobs(chunk.logprobs or []))
        return told if chunk.finish_reason is None else told + self._close(answer)

    def _close(self, answer: Answer) -> list[Event]:
        """End the response as its answer has ended."""
        kind = (answer.finish_reason or {}).get("type", "stop")
        told = self._output.finish(complete=kind == "stop")
        status = {"stop": "completed", "length": "incomplete"}.get(kind, "cancelled")
        self.response |= {
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self._output.items,
            "usage": self._usage(answer),
        }
        return told

    def _usage(self, answer: Answer) -> dict[str, Any]:
        thoughts = self._output.reasoning if self._thinks else ""
        encode = self._surface.client.tokenizer.encode
        return {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {
                "reasoning_tokens": len(encode(thoughts, add_special_tokens=False)) if thoughts else 0
            },
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        }

    def _logprobs(self, entries: Any) -> list[dict[str, Any]]:
        wanted = self._body.logprobs
        found = [] if wanted is None else chat_logprobs(self._surface.texts, entries, wanted)["content"]
        return list(found)

    def _event(self, told: Event) -> bytes:
        frame = event({**told, "sequence_number": self._sequence}, told["type"])
        self._sequence += 1
        return frame


_ENDS = {"completed": "completed", "incomplete": "incomplete", "cancelled": "incomplete"}


def _response(model: str, identity: str, body: ResponseBody, tools: Tools) -> dict[str, Any]:
    """A response that has just begun."""
    return {
        "id": identity,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions or None,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata,
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id or None,
        "reasoning": {"effort": body.reasoning.effort, "summary": body.reasoning.summary},
        "store": body.store,
        "temperature": body.temperature,
        "text": {"format": body.text.format or {"type": "text"}, "verbosity": body.text.verbosity or "medium"},
        "tool_choice": {"type": "function", "name": tools.name} if tools.name else tools.choice,
        "tools": [
            {"type": "function", "description": None, "strict": False, **function} for function in tools.functions
        ],
        "top_logprobs": body.top_logprobs,
        "top_p": body.top_p,
        "truncation": body.truncation,
        "usage": None,
        "user": body.user or None,
    }
