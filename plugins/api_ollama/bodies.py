"""Bodies of the routes that generate or embed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import Grammar
from pegboard.toolkit.chat.thinking import effort_hints
from pegboard.toolkit.grammars.grammar import grammar_of
from pegboard.toolkit.http.generation import SamplingFields
from pegboard.toolkit.http.refusals import Refusal, RefusingModel
from pegboard.toolkit.http.request_fields import RequestFields
from pegboard.toolkit.media.inputs import MediaPrompt

_FORMAT = {"json_schema": "format", "json_object": "format"}
NAMES = {
    **{name: f"options.{name}" for name in SamplingFields.model_fields},
    "prompt": "messages",
    "max_new_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    **_FORMAT,
}
"""What the engine's fields are called here."""

Think = bool | Literal["low", "medium", "high", "max"]


class RunOptions(SamplingFields, RefusingModel):
    """`options`: sampling in Ollama's words. What says how a model is loaded is ignored: this one is."""

    refused = {
        "mirostat": Refusal(),
        "tfs_z": Refusal(neutral=(1.0,)),
        "typical_p": Refusal(neutral=(1.0,)),
    }

    num_predict: int | None = None
    """Most tokens to generate; below 0: until the context is full."""
    repeat_penalty: float = 1.0
    num_ctx: object = None
    repeat_last_n: object = None
    num_keep: object = None


class GeneratingBody(RequestFields, RefusingModel):
    """What bodies share that ask for text."""

    refused = {
        "logprobs": Refusal("; /v1/chat/completions has them"),
        "top_logprobs": Refusal("; /v1/chat/completions has them"),
    }

    model: str
    stream: bool = True
    format: str | dict[str, Any] | None = None
    """`json`, or a JSON schema that the answer follows."""
    think: Think | None = None
    """Whether the model is to think, or how much, where its template can say so."""
    options: RunOptions = RunOptions()
    keep_alive: object = None

    def grammar(self) -> Grammar | None:
        """Return what the answer has to look like."""
        if isinstance(self.format, dict):
            return grammar_of(json_schema=self.format, names=_FORMAT)
        if self.format not in (None, "", "json"):
            raise InvalidRequest('format must be "json" or a JSON schema', param="format")
        return grammar_of(json_object=self.format == "json", names=_FORMAT)

    @property
    def hints(self) -> Mapping[str, object]:
        """What the template is told of thinking, if it reads such a thing."""
        if isinstance(self.think, str):
            return effort_hints(self.think)
        return {} if self.think is None else {"enable_thinking": self.think}

    def engine_request(
        self,
        prompt: str | MediaPrompt,
        grammar: Grammar | None,
        *,
        skip_special_tokens: bool = True,
        add_special_tokens: bool = False,
    ) -> GenerateRequest:
        """Return what the engine is asked for."""
        options = self.options
        most = options.num_predict
        unset = () if "repeat_penalty" in options.model_fields_set else ("repetition_penalty",)
        sampling = options.sampling_params(
            max_new_tokens=None if most is None or most < 0 else most,
            min_new_tokens=0,
            prefix="options.",
            grammar=grammar,
            skip_special_tokens=options.skip_special_tokens and skip_special_tokens,
            **({} if unset else {"repetition_penalty": options.repeat_penalty}),
        )
        return GenerateRequest(
            prompt=prompt,
            sampling=sampling,
            stream=self.stream,
            priority=self.priority,
            cache_salt=self.salt,
            add_special_tokens=add_special_tokens,
            params=self.params_of((1,))[0],
        )


class ChatBody(GeneratingBody):
    """Body of `/api/chat`."""

    messages: list[dict[str, object]] = []
    tools: list[dict[str, object]] = []


class GenerateBody(GeneratingBody):
    """Body of `/api/generate`."""

    refused = {
        **GeneratingBody.refused,
        "context": Refusal("; /api/chat takes the conversation"),
        "suffix": Refusal(),
        "template": Refusal("; the model's own is used, or none with raw"),
        "width": Refusal(": this model writes text only"),
        "height": Refusal(": this model writes text only"),
        "steps": Refusal(": this model writes text only"),
    }

    prompt: str = ""
    system: str = ""
    images: list[str] = []
    raw: bool = False
    """Whether the prompt is read as it stands, without the chat template."""


class EmbedBody(RequestFields):
    """Body of `/api/embed`. What is longer than the context is refused, whatever `truncate` says."""

    model: str
    input: str | list[str]
    dimensions: int | None = None
    truncate: bool = True
    keep_alive: object = None
    options: dict[str, object] = {}


class EmbeddingBody(RequestFields):
    """Body of `/api/embeddings`, which `/api/embed` has replaced: one text, whose vector keeps its length."""

    model: str
    prompt: str
    keep_alive: object = None
    options: dict[str, object] = {}


class ModelBody(RefusingModel):
    """Body of `/api/show`."""

    model: str = ""
    name: str = ""
    """What `model` was called."""
    verbose: bool = False
