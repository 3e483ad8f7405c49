"""EleutherAI's harness: how likely texts are, by echo and logprobs of text completions; and what it generates."""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["OPENAI_API_KEY"] = "sk-user-key"

from common import MODEL, THANKS, TURN, V1, ask, tell
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

PAIRS: list[list[str]] = json.loads(os.environ["PAIRS"])


def model(**more: Any) -> LocalCompletionsAPI:
    options = {"base_url": f"{V1}/completions", "model": MODEL, "max_length": 1024, "max_retries": 1}
    return LocalCompletionsAPI(**{**options, **more})


def scored(one: LocalCompletionsAPI) -> Any:
    asked: Any = [Instance("loglikelihood", {}, tuple(pair), i) for i, pair in enumerate(PAIRS)]
    return one.loglikelihood(asked)


@ask
def loglikelihood() -> Any:
    return scored(model(tokenizer_backend="huggingface", tokenizer=os.environ["TOKENIZER"]))


@ask
def in_batches() -> Any:
    return scored(model(tokenizer_backend="huggingface", tokenizer=os.environ["TOKENIZER"], batch_size=8))


@ask
def remote_tokenizer() -> Any:
    return scored(model(tokenizer_backend="remote", auth_token=os.environ["OPENAI_API_KEY"]))


@ask
def generate_until() -> Any:
    prompt = f"<|im_start|>user\n{THANKS}{TURN}"
    settings: Any = {"until": ["<|im_end|>"], "max_gen_toks": 50, "temperature": 0}
    one = model(tokenizer_backend="huggingface", tokenizer=os.environ["TOKENIZER"])
    return one.generate_until([Instance("generate_until", {}, (prompt, settings), 0)])


tell()
