"""What callers of the engine pass, made into requests' prompts and parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pegboard.core.interfaces.client import AnnotatedPrompt
from pegboard.core.interfaces.conversion import listed, token_ids
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import SamplingParams

Prompt = str | list[int] | AnnotatedPrompt
OneSampling = SamplingParams | Mapping[str, object] | None
Sampling = OneSampling | Sequence[OneSampling]


def prompts_of(asked: object) -> tuple[list[Prompt], bool]:
    """Return prompts, and whether it is a single one: a text, token ids, or one with items.

    Token ids may be a list, a tuple, or a row of numpy or torch; several prompts are a list of these, or an array with
    a row each. Raises InvalidRequest, naming the place, for anything else.
    """
    if isinstance(asked, str | AnnotatedPrompt):
        return [asked], True
    rows = listed(asked)
    if isinstance(rows, Mapping) or not hasattr(rows, "__iter__"):
        raise InvalidRequest(
            f"a prompt is a text, a list of token ids, or a MediaPrompt, not {type(asked).__name__}", param="prompt"
        )
    rows = list(rows)
    if rows and not isinstance(rows[0], str | AnnotatedPrompt | list | tuple) and not hasattr(rows[0], "__len__"):
        return [token_ids("prompt", rows)], True
    return [_prompt(f"prompt[{place}]", one) for place, one in enumerate(rows)], False


def _prompt(name: str, asked: object) -> Prompt:
    return asked if isinstance(asked, str | AnnotatedPrompt) else token_ids(name, asked)


def one_prompt(asked: object) -> Prompt:
    """Return one prompt, as `prompts_of` reads it. Raises InvalidRequest for several."""
    prompts, single = prompts_of(asked)
    if not single:
        raise InvalidRequest(f"one prompt is needed here, got a list of {len(prompts)}", param="prompt")
    return prompts[0]


def plain_prompts(asked: object) -> list[str | list[int]]:
    """Return prompts without items, a single one as a list of one. Raises InvalidRequest for items."""
    found: list[str | list[int]] = []
    for prompt in prompts_of(asked)[0]:
        if isinstance(prompt, AnnotatedPrompt):
            raise prompt.refusal(embedding=True)
        found.append(prompt)
    return found


def params_of(sampling: object, place: str = "sampling") -> SamplingParams:
    """Return the parameters; those of a mapping, and none at all, leave the rest to the model's defaults."""
    if isinstance(sampling, SamplingParams):
        return sampling
    if sampling is None or isinstance(sampling, Mapping):
        return SamplingParams.of(sampling)
    raise InvalidRequest(
        f"{place} must be SamplingParams or a mapping of parameters, got {type(sampling).__name__}", param="sampling"
    )


def spread(sampling: Sampling, n: int) -> Sequence[SamplingParams]:
    """Return the parameters of each of `n` prompts: one for all, or a list with an entry for each."""
    if not isinstance(sampling, list | tuple):
        return [params_of(sampling)] * n
    if len(sampling) != n:
        raise InvalidRequest(f"{n} prompts, but {len(sampling)} sampling params", param="sampling")
    return [params_of(one, f"sampling[{place}]") for place, one in enumerate(sampling)]
