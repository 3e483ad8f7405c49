"""The page on several processes: its example refuses two ranks with the message that it shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pegboard.core.config.compose import compose
from pegboard.core.interfaces.errors import ModelError
from pegboard.toolkit.model.decoder_ranks import shared
from pegboard.toolkit.model.decoder_spec import DecoderSpec
from pegboard.toolkit.model.ranks import Ranks
from tests.docs.test_docs import blocks

PAGE = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text("utf-8")


def test_the_sizes_of_the_example_do_not_divide_by_two() -> None:
    """As in the demo model's config.json."""
    sizes = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 30, "vocab_size": 49152, **sizes}
    spec = DecoderSpec.from_config({"rms_norm_eps": 1e-5, "max_position_embeddings": 8192, **config})
    assert shared(spec, Ranks(3)).num_heads == 3
    with pytest.raises(ModelError) as caught:
        shared(spec, Ranks(2))
    command, shown, *_ = blocks(PAGE, "console")[0].splitlines()
    assert command == "$ pegboard serve config.yaml --set parallel.tensor=2"
    assert str(caught.value) in shown


def test_its_config_is_one() -> None:
    resolved = compose(data=yaml.safe_load(blocks(PAGE, "yaml")[0]), env={})
    assert resolved.engine.model.path == "demo:smollm2-135m-instruct"
