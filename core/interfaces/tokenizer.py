"""What the pipeline asks of a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """Text to ids and back; no torch, no transformers, safe to use from several threads."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """The chat templates' jinja2 sources by name ("default", "tool_use"): code that came with the model."""
        ...

    @property
    def named_tokens(self) -> Mapping[str, str]:
        """Texts of the tokens that templates know by name, such as `bos_token`."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out."""
        ...

    def id_to_token(self, token_id: int) -> str | None:
        """Return the token as the vocabulary spells it; None for an unknown id."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def encode_literal(self, text: str) -> list[int]:
        """Return the ids of a text in which nothing that spells an added token, special or not, is one."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the prompt text of a conversation. Raises InvalidRequest without a template, or where it refuses."""
        ...
