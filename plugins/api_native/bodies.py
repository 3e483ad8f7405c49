"""What bodies of several routes have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, create_model

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.http.bodies import RequestModel, parse_body
from pegboard.toolkit.http.model_names import ADAPTER
from pegboard.toolkit.http.openapi import body_docs, error_responses, json_answer
from pegboard.toolkit.http.refusals import RefusingModel, Unknown

if TYPE_CHECKING:
    from pegboard.core.interfaces.client import ModelInfo

M = TypeVar("M", bound=RequestModel)
P = TypeVar("P", bound="PromptBody")

NOTHING: tuple[object, ...] = (None, "", [], False)
_UNSUPPORTED = ("input_embeds", "image_data", "video_data", "audio_data", "lora_path", "routed_dp_rank")


class PromptBody(RefusingModel):
    """One prompt, or a batch where `text` or `input_ids` is a list of prompts. A subclass says which of its own fields
    are `unsupported`, and which of those below are `taken` all the same.
    """

    unknown = Unknown.GUESSED
    unsupported: ClassVar[Sequence[str]] = ()
    taken: ClassVar[Sequence[str]] = ()

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    rid: str | list[str] = ""
    """The request's id, with which it can be aborted: one for each prompt, or one for all of them together."""
    input_embeds: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    lora_path: Any = None
    """The adapter to use, by name; in a batch also a list with a name or null for each prompt."""
    routed_dp_rank: int | None = None
    """0: there is one engine."""

    @classmethod
    def not_taken(cls) -> list[str]:
        """Return the fields that it has to refuse them."""
        return [name for name in (*_UNSUPPORTED, *cls.unsupported) if name not in cls.taken]

    def check_supported(self) -> None:
        """Raise InvalidRequest for a field that would change the answer and that this server does not have."""
        refuse_unsupported(self, self.not_taken())

    def adapters(self, prompts: int) -> list[dict[str, object]]:
        """Return the `params` that say which adapter each prompt is for. Raises InvalidRequest."""
        if self.lora_path in NOTHING or "lora_path" not in self.taken:
            return [{}] * prompts
        found = each(self.lora_path, prompts, "lora_path")
        if not all(name is None or isinstance(name, str) for name in found):
            raise InvalidRequest("lora_path must be the name of an adapter, or a list of names", param="lora_path")
        return [{ADAPTER: name} if name else {} for name in found]

    @property
    def batch(self) -> bool:
        """Whether the answer is a list."""
        return isinstance(self.text, list) or bool(self.input_ids and isinstance(self.input_ids[0], list))

    @property
    def prompt_field(self) -> str:
        """The field that has the prompt."""
        return "input_ids" if self.text is None and self.input_ids is not None else "text"

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, one for a single request. Raises InvalidRequest where there is none, or two kinds."""
        if (self.text is None) == (self.input_ids is None):
            what = "text or input_ids is needed" if self.text is None else "text and input_ids exclude each other"
            raise InvalidRequest(what, param="text")
        prompts: list[str | list[int]]
        if self.text is not None:
            prompts = list(self.text) if isinstance(self.text, list) else [self.text]
        else:
            ids: Any = self.input_ids
            prompts = ids if self.batch else [ids]
        name = self.prompt_field
        if not prompts or not all(prompts):
            raise InvalidRequest(f"{name} is empty", param=name)
        return prompts

    def rids(self, answers: Sequence[int]) -> list[str]:
        """Return one id per answer; those of several answers are ``<rid>_<number>``, which aborting <rid> aborts
        together.
        """
        if isinstance(self.rid, list):
            rids: list[str] = []
            for rid, n in zip(each(self.rid, len(answers), "rid"), answers, strict=True):
                rids += [rid] if n == 1 else [f"{rid}_{i}" for i in range(n)]
            return rids
        total = sum(answers)
        if total == 1 or not self.rid:
            return [self.rid] * total
        return [f"{self.rid}_{i}" for i in range(total)]


class Described(BaseModel):
    """Base of what only describes answers: they may have more fields."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True, protected_namespaces=())


class Done(Described):
    """It has been done."""

    success: bool
    message: str | None = None


def adapter_fields(info: ModelInfo) -> tuple[str, ...]:
    """Return the fields that say which adapter is meant, if the engine has any."""
    return ("lora_path",) if ADAPTER in info.features else ()


def taking(model: type[P], *names: str) -> type[P]:
    """Return a body that takes fields of these names, which it refuses otherwise."""
    if not names:
        return model
    made = create_model(model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__)
    made.taken = (*model.taken, *names)
    return made


def each(value: Any, count: int, name: str) -> list[Any]:
    """Return one value per prompt: a list as it is, anything else for all."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(f"{name} has {len(value)} entries for {count} prompts", param=name)
    return value


def refuse_unsupported(body: BaseModel, names: Sequence[str], prefix: str = "") -> None:
    """Raise InvalidRequest for a field that would change the answer and that nothing here understands. Lists of nothing
    say nothing.
    """
    for name in names:
        value = getattr(body, name)
        if value not in NOTHING and not (isinstance(value, list) and all(one in NOTHING for one in value)):
            raise InvalidRequest(f"{prefix}{name} is not supported by this server", param=f"{prefix}{name}")


def answers(schema: type[BaseModel] | Mapping[str, Any], *errors: int, events: str = "") -> dict[str, Any]:
    """Return arguments of a route that say what it answers; `events` describes its stream, if it has one."""
    responses = {**json_answer(schema), **error_responses(*errors)}
    if events:
        responses[200]["content"]["text/event-stream"] = {"schema": {"type": "string", "description": events}}
    return {"responses": responses}


def takes(model: type[RequestModel], example: dict[str, Any] | None = None, *, required: bool = True) -> dict[str, Any]:
    """Return arguments of a route that say what it takes. Without an example it is not tried: it changes something, or
    speaks of something that has to be there first.
    """
    docs = body_docs(model, example or {})
    docs["requestBody"]["required"] = required
    if example is None:
        del docs["requestBody"]["content"]["application/json"]["example"]
    return {"openapi_extra": docs}


async def optional_body(request: Request, model: type[M]) -> M:
    """Return the body, where there is one; `model`'s defaults otherwise. Raises InvalidRequest with the field's
    name.
    """
    return await parse_body(request, model) if await request.body() else model()
