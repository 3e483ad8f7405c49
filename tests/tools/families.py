"""Which families of models are served: tiny random checkpoints of each, tried and compared with transformers.

    python -m tests.tools.families [NAME ...] [--write]

Each is built in float32, and answers two prompts in an engine, of which one is cut into chunks. It is served where its
tokens and its logits (relative 1e-3) equal those of transformers' own eager attention, without a cache. Others are
listed with the reason why the engine refuses them. For those that are served it says whether decode steps can be
recorded as graphs. `--write` puts what was found into docs/_build/families.json, from
which `make docs` writes the table of docs/models.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pegboard.conformance.checkpoints import write_tiny_tokenizer
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.errors import ConfigError, ModelError
from pegboard.core.interfaces.model_family import ModelContext
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.plugins.model_transformers.configs import NotServable
from pegboard.plugins.model_transformers.family import TransformersFamily, relative_errors
from pegboard.plugins.model_transformers.limits import examine
from tests.e2e.reference import forced_logits
from tests.plugins.model_transformers.tiny import context
from tests.tools.family_configs import FAMILIES
from tests.tools.family_parts import VOCAB, Family

FOUND = Path(__file__).parents[2] / "docs" / "_build" / "families.json"

PROMPTS = [[(7 * step) % (VOCAB - 8) + 3 for step in range(length)] for length in (41, 5)]
NEW = 12
CHUNK = 16
NEAR_TIE = 1e-3
"""Difference of the two largest logits below which either token is right."""
TOLERANCE = 1e-3
"""Relative error of a position's logits. Models that mix requests, or lose a state between chunks, are off by 5e-3 to
1; float32 makes 1e-5 of that."""


@dataclass(frozen=True)
class Row:
    """What was found: the plugin's family that serves an architecture, or the reason why none does. `keeps` is what its
    layers keep of the tokens so far: "keys and values", "states" or both; "" where that is not known. `graphs` is "yes"
    where its decode steps can be recorded, or the reason why they cannot.
    """

    architecture: str
    family: str = ""
    reason: str = ""
    keeps: str = ""
    graphs: str = ""


def build(family: Family, directory: Path) -> str:
    """Write a random checkpoint; its architecture."""
    import transformers

    config = getattr(transformers, f"{family.prefix}Config")(**family.fields)
    torch.manual_seed(0)
    if family.model is None:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    else:
        model = getattr(transformers, family.model)(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.eval().save_pretrained(directory)
    write_tiny_tokenizer(directory, vocab_size=VOCAB)
    (directory / "generation_config.json").unlink(missing_ok=True)
    return str(type(model).__name__)


def tried(name: str) -> Row:
    """Build the checkpoint of a family, and try it."""
    with tempfile.TemporaryDirectory(prefix="pegboard-family-") as folder:
        directory = Path(folder)
        architecture = build(FAMILIES[name], directory)
        data = {
            "model": {"path": folder, "dtype": "float32", "device": "cpu", **_length(FAMILIES[name])},
            "attention": {"use": "torch"},
            "memory": {"max_total_tokens": 512},
            "scheduler": {"chunked_prefill_size": CHUNK},
            "log_level": "error",
        }
        try:
            with Engine.from_config(data) as engine:
                wrong = difference(engine, directory, architecture)
                (family,) = engine.info.providers["model_family"]
                network = engine.built.runner.ctx.network
                assert network is not None
                graphs = network.capture_objection() or "yes"
        except (ConfigError, ModelError) as error:
            ctx = _context(directory, FAMILIES[name])
            return Row(architecture, reason=reason_of(ctx, error), keeps=_kept(ctx))
        kept = _kept(_context(directory, FAMILIES[name]))
        return Row(architecture, "" if wrong else family, wrong, kept, "" if wrong else graphs)


def _length(family: Family) -> Mapping[str, int]:
    return {} if family.context_length is None else {"context_length": family.context_length}


def _context(directory: Path, family: Family) -> ModelContext:
    return replace(context(directory), context_length=family.context_length)


def _kept(ctx: ModelContext) -> str:
    """Return what a model keeps, as a run without weights shows it."""
    try:
        found, _ = examine(ctx)
    except NotServable:
        return ""
    return " and ".join(["keys and values"] * bool(found.layers) + ["states"] * bool(found.states))


def reason_of(ctx: ModelContext, error: Exception) -> str:
    """Return why the model is refused: by the family that takes most, or else by the engine."""
    said = TransformersFamily.supports(None, ctx)  # type: ignore[arg-type]
    return (said or str(error)).removeprefix(f"{ctx.architecture} ").splitlines()[0].replace(str(ctx.directory), "DIR")


@torch.inference_mode()
def difference(engine: Engine, directory: Path, architecture: str) -> str:
    """Return how answers differ from those of transformers; "" where they do not."""
    import transformers

    model = getattr(transformers, architecture).from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    answers = engine.generate(PROMPTS, SamplingParams(temperature=0.0, max_new_tokens=NEW, ignore_eos=True))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        if len(answer.token_ids) != NEW:
            return f"answers {len(answer.token_ids)} tokens of {NEW}"
        text = [*prompt, *answer.token_ids]
        logits = model.eval()(input_ids=torch.tensor([text]), use_cache=False).logits[0].float()
        best = logits[len(prompt) - 1 : -1].topk(2)
        for place, token in enumerate(answer.token_ids):
            clear = float(best.values[place, 0] - best.values[place, 1]) >= NEAR_TIE
            if clear and token != int(best.indices[place, 0]):
                return f"answers token {place} differently from transformers"
        found = forced_logits(engine, text, len(text), chunk=CHUNK)
        error = float(relative_errors(found, logits).max())
        if not error <= TOLERANCE:
            return f"has logits that are off by {error:.2g} relative"
    return ""


def read() -> dict[str, Row]:
    """Return what was found last."""
    rows: Mapping[str, Mapping[str, Any]] = json.loads(FOUND.read_text("utf-8"))
    return {name: Row(**row) for name, row in rows.items()}


def main(arguments: Sequence[str]) -> int:
    """Try families, and print what was found, as a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"by default all {len(FAMILIES)}")
    parser.add_argument("--write", action="store_true", help="put what was found into docs/_build/families.json")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    rows = read() if options.write and FOUND.exists() else {}
    for name in options.names or FAMILIES:
        row = rows[name] = tried(name)
        print(f"| {name} | {row.architecture} | {row.family or row.reason} | {row.graphs} |", flush=True)  # noqa: T201
    if options.write:
        kept = {name: asdict(rows[name]) for name in FAMILIES if name in rows}
        FOUND.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
