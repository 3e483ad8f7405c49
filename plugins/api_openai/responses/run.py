"""One response from its creation to its end: its body as it stands, and its stream of events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.api_openai.logprobs import chat_logprobs
from pegboard.plugins.api_openai.responses.content_logprobs import TextByToken
from pegboard.plugins.api_openai.responses.custom import names_of
from pegboard.plugins.api_openai.responses.echo import response_of
from pegboard.plugins.api_openai.responses.events import Event
from pegboard.plugins.api_openai.responses.output import Output
from pegboard.plugins.api_openai.responses.replay import Tape, beginning, ending, replay
from pegboard.plugins.api_openai.usage import media_details
from pegboard.toolkit.http.answer_stream import AnswerWriter
from pegboard.toolkit.http.events import event

if TYPE_CHECKING:
    from pegboard.core.interfaces.client import Logprob, OutputChunk
    from pegboard.plugins.api_openai.responses.body import ResponseBody
    from pegboard.plugins.api_openai.surface import Surface
    from pegboard.toolkit.chat.turn import Turn
    from pegboard.toolkit.http.generation import Answer, Answers


class Run(AnswerWriter):
    """A response while it is generated, of one answer. `keep` is called before its client hears that a stream is over,
    since the next request may refer to it.
    """

    def __init__(
        self,
        surface: Surface,
        identity: str,
        body: ResponseBody,
        turn: Turn,
        answers: Answers,
        keep: Callable[[], None],
    ) -> None:
        self._surface = surface
        self._answers = answers
        self._body = body
        self._keep = keep
        self._output = Output(turn.stream(), names_of(body.tools))
        self._tokens = (
            None
            if body.logprobs is None
            else TextByToken(surface.client.tokenizer, skip_special_tokens=turn.skip_special_tokens)
        )
        self._thinks = turn.reasoning_parser is not None
        self._sequence = 0
        self._left = False
        self._waiting: list[asyncio.Future[None]] = []
        self.owner = ""
        """The key whose it is."""
        self.response = response_of(surface.client.info, identity, body, turn.tools)

    @property
    def over(self) -> bool:
        """Whether it has ended, whichever way."""
        return bool(self.response["status"] != "in_progress")

    @property
    def tape(self) -> Tape:
        """Where its items were cut."""
        return self._output.tape

    def replay(self) -> Iterator[Event | None]:
        """Yield its events from the start, as `replay` gives them. A whole answer's are there when it is over, since it
        may be read in a thread.
        """
        if not self._body.stream:
            while not self._left:
                yield None
        yield from replay(self.response, self._output.items, self.tape, lambda: not (self._left or self.over))

    async def news(self) -> None:
        """Wait until there is more, or the end."""
        if not self._left:
            self._waiting.append(asyncio.get_running_loop().create_future())
            await self._waiting[-1]

    def leave(self) -> None:
        """There will be no more."""
        self._left = True
        self._tell()

    def _tell(self) -> None:
        for one in self._waiting:
            if not one.done():
                one.set_result(None)
        self._waiting.clear()

    def collect(self, answer: Answer) -> dict[str, object]:
        """Return the response of a whole answer."""
        self._feed(answer.text, answer.logprobs)
        self._close(answer)
        return self.response

    def begin(self) -> bytes:
        return b"".join([self._event(one) for one in beginning(self.response)])

    def more(self, index: int, chunk: OutputChunk) -> bytes:
        told = b"".join([self._event(one) for one in self._chunk(chunk, self._answers.answers[0])])
        if self._waiting:
            self._tell()
        return told

    def end(self) -> bytes:
        """Return the event that says how it ended."""
        self._keep()
        return self._event(ending(self.response))

    def failed(self, error: InvalidRequest) -> bytes:
        """Return the event of a failure on the way."""
        self._output.settle()
        self.response |= {
            "status": "failed",
            "error": {"code": "server_error", "message": error.message},
            "output": self._output.items,
        }
        return self.end()

    def _chunk(self, chunk: OutputChunk, answer: Answer) -> list[Event]:
        told = self._feed(chunk.text, chunk.logprobs or [])
        return told if chunk.finish_reason is None else told + self._close(answer)

    def _close(self, answer: Answer) -> list[Event]:
        """End the response as its answer has ended."""
        kind = (answer.finish_reason or {}).get("type", "stop")
        told: list[Event] = []
        if self._tokens is not None:
            told += self._output.feed_tokens(self._tokens.finish()) + self._output.feed(self._tokens.rest())
        told += self._output.finish(complete=kind == "stop")
        status = {"stop": "completed", "length": "incomplete"}.get(kind, "cancelled")
        self.response |= {
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self._output.items,
            "usage": self._usage(answer),
        }
        return told

    def _usage(self, answer: Answer) -> dict[str, object]:
        thoughts = self._output.reasoning if self._thinks else ""
        encode = self._surface.client.tokenizer.encode
        return {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": answer.cached_tokens,
                "cache_write_tokens": 0,
                **media_details([answer]),
            },
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {
                "reasoning_tokens": len(encode(thoughts, add_special_tokens=False)) if thoughts else 0
            },
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        }

    def _feed(self, text: str, entries: Sequence[Logprob]) -> list[Event]:
        """Return what the next piece of the answer adds; where logprobs are wanted, token by token."""
        wanted = self._body.logprobs
        if self._tokens is None or wanted is None:
            return self._output.feed(text)
        shown = chat_logprobs(self._surface.texts, entries, wanted)["content"]
        return self._output.feed_tokens(self._tokens.feed(text, [token for _, token, _ in entries], shown))

    def _event(self, told: Event) -> bytes:
        frame = event({**told, "sequence_number": self._sequence}, told["type"])
        self._sequence += 1
        return frame
