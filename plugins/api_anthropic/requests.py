"""Bodies of Anthropic's routes."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any, Literal

from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.api_anthropic.conversation import continues, template_messages
from pegboard.plugins.api_anthropic.tools import message_tools
from pegboard.toolkit.grammars.grammar import grammar_of
from pegboard.toolkit.http.bodies import RequestModel
from pegboard.toolkit.http.generation import SamplingFields
from pegboard.toolkit.http.refusals import Refusal, RefusingModel
from pegboard.toolkit.http.request_fields import RequestFields

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pegboard.core.interfaces.sampling import Grammar
    from pegboard.plugins.api_anthropic.responses import Thinking
    from pegboard.toolkit.chat.tool_calls import Tools
    from pegboard.toolkit.chat.turn import Turn
    from pegboard.toolkit.media.service import MediaReader

FORMAT = "output_config.format"

NAMES = {
    "prompt": "messages",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop": "stop_sequences",
    "json_schema": f"{FORMAT}.schema",
    "structural_tag": "tools",
    "any_of": "tools",
}
"""What fields of the engine are called here."""

REFUSED = {
    **dict.fromkeys(
        (
            "bootstrap_host",
            "bootstrap_port",
            "bootstrap_room",
            "compaction",
            "disagg_prefill_dp_rank",
            "ec_transfer_params",
            "kv_transfer_params",
            "return_mm_kwargs",
            "routed_dp_rank",
            "vllm_xargs",
            "watermarking",
        ),
        Refusal(),
    ),
    **dict.fromkeys(("structured_outputs", "response_format"), Refusal("; use output_config.format, regex or ebnf")),
    **dict.fromkeys(("allowed_token_ids", "bad_words"), Refusal("; use custom_logit_processor")),
    "mm_payload": Refusal(neutral=("tensors",)),
}
"""Fields of Anthropic's, vLLM's and SGLang's that would change an answer and that this server does not have."""

BUDGET = "thinking.budget_tokens"
_EFFORT = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""What templates know as `reasoning_effort`."""


class ThinkingConfig(RequestModel):
    """`thinking`: whether the model is to think, for how many tokens, and whether that is shown. A budget counts where
    this server can end thoughts; elsewhere `max_tokens` is the limit of thinking and answer together."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] = "summarized"


class OutputConfig(RequestModel):
    """`output_config`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None


class Metadata(RequestModel):
    """`metadata`, of which nothing is kept."""

    user_id: str = ""


class PromptBody(RefusingModel):
    """What is to be read: shared by the routes that answer and that count."""

    refused = REFUSED

    model: str
    messages: list[Any]
    system: str | list[Any] = ""
    tools: list[Any] = []
    tool_choice: dict[str, Any] | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] = {}
    mcp_servers: Any = None
    container: Any = None
    thread: Any = None

    def check_prompt(self) -> None:
        """Raise InvalidRequest for what this server would have to keep, or to run, by itself."""
        if self.thread:
            # Anthropic's client goes on without a thread where it reads this code.
            raise InvalidRequest(
                "thread: this server keeps no conversations; send the whole one, without a thread",
                param="thread",
                code="thread_unsupported_request",
            )
        for name in ("mcp_servers", "container"):
            if getattr(self, name):
                raise InvalidRequest(f"{name} is not supported by this server", param=name, code="unsupported")

    def checked_tools(self) -> Tools:
        """Return the tools. Raises InvalidRequest for those that this server would have to run itself."""
        return message_tools(self.tools, self.tool_choice)

    def template_messages(self, processor: MediaReader | None = None) -> list[dict[str, object]]:
        """Return the conversation as chat templates read it, of a model whose `processor` reads images, if it has
        one.
        """
        converted = template_messages(self.system, self.messages, processor)
        if self.prefilled and converted[-1].get("tool_calls"):
            where = f"messages.{len(self.messages) - 1}"
            raise InvalidRequest(
                f"{where}: a tool_use block needs a tool_result block in the message after it", param=where
            )
        return converted

    @property
    def prefilled(self) -> bool:
        """Whether the answer has begun already, as the last message."""
        return continues(self.messages)

    @property
    def thinks(self) -> bool | None:
        """Whether the model is asked to think, or not to; None leaves it to the model."""
        if self.thinking is None or self.thinking.type in ("adaptive", "between_tools"):
            return None
        return self.thinking.type == "enabled"

    @property
    def budget(self) -> int | None:
        """Tokens that the model may think for; None: as many as it likes."""
        return self.thinking.budget_tokens if self.thinking is not None and self.thinks else None

    @property
    def shown_thinking(self) -> Thinking:
        """What becomes of the thinking."""
        if self.thinks is False:
            return "dropped"
        return "omitted" if self.thinking is not None and self.thinking.display == "omitted" else "shown"

    def template_hints(self) -> dict[str, object]:
        """Return what else the template is told, if it reads such a thing."""
        hints: dict[str, object] = {}
        if self.thinks is not None:
            hints["enable_thinking"] = self.thinks
        if self.output_config is not None and self.output_config.effort is not None:
            hints["reasoning_effort"] = _EFFORT[self.output_config.effort]
        return hints


class MessagesBody(RequestFields, SamplingFields, PromptBody):
    """Body of `/v1/messages`: Anthropic's fields, and the field's usual extras."""

    max_tokens: int
    stop_sequences: list[str] = []
    stream: bool = False
    metadata: Metadata = Metadata()
    output_format: dict[str, Any] | None = None
    """What `output_config.format` was called in its beta."""
    regex: Any = None
    ebnf: Any = None
    min_tokens: int = 0
    rid: str = ""

    def check(self) -> None:
        """Raise InvalidRequest for what is impossible on its own."""
        self.check_prompt()
        if self.max_tokens < 0:
            raise InvalidRequest(f"max_tokens must be at least 0, got {self.max_tokens}", param="max_tokens")
        if "temperature" in self.model_fields_set and not 0 <= self.temperature <= 1:
            raise InvalidRequest(f"temperature must be from 0 to 1, got {self.temperature}", param="temperature")
        if self.budget is not None and not 0 < self.budget < self.max_tokens:
            raise InvalidRequest(
                f"{BUDGET} must be above 0 and below max_tokens ({self.max_tokens}), got {self.budget}", param=BUDGET
            )

    def grammar(self) -> Grammar | None:
        """Return what the answer has to look like, apart from tools."""
        given = self.output_config.format if self.output_config is not None else None
        where, older = FORMAT, self.output_format
        if older is not None:
            if given is not None:
                raise InvalidRequest(f"output_format: {FORMAT} is there too; leave it out", param="output_format")
            where, given = "output_format", older
        if given is not None and (given.get("type") != "json_schema" or "schema" not in given):
            raise InvalidRequest(
                f'{where} must be {{"type": "json_schema", "schema": {{...}}}}', param=where, code="invalid_type"
            )
        schema = given["schema"] if given is not None else None
        return grammar_of(json_schema=schema, regex=self.regex, ebnf=self.ebnf, names=self.names)

    @property
    def names(self) -> dict[str, str]:
        """What fields of the engine are called here."""
        return NAMES if self.output_format is None else {**NAMES, "json_schema": "output_format.schema"}

    def engine_request(self, turn: Turn, rid: str, params: Mapping[str, object]) -> GenerateRequest:
        """Return what the engine is asked for. `params` are further ones, for plugins."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        return GenerateRequest(
            prompt=turn.prompt,
            sampling=self.sampling_params(
                max_new_tokens=self.max_tokens,
                min_new_tokens=self.min_tokens,
                stop=(*self.stop_sequences, *stop),
                grammar=turn.grammar,
                skip_special_tokens=self.skip_special_tokens and turn.skip_special_tokens,
            ),
            rid=rid,
            stream=self.stream,
            priority=self.priority,
            cache_salt=self.salt,
            add_special_tokens=False,
            params={**self.params_of((1,))[0], **params},
            model=self.model,
        )


def new_id(rid: str) -> str:
    """Return the message's id, which aborts the request: the caller's own, or a new one."""
    return rid or f"msg_{uuid.uuid4().hex}"
