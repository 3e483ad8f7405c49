"""Which built-in providers are tested by their contracts' suites from one table, and what the suites are told of them.

Every provider of the registry gets the class that `pegboard plugins check` runs. A row of CASES adds to it what a suite
has to be told, or is a further class with other options: "radix lfu" is a second one for `radix`. Its tests are
`test_builtins.py::Test_cache_radix_radix_lfu::...`, by plugin, provider and variant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pegboard.core.interfaces.sampling import Grammar, SamplingParams

if TYPE_CHECKING:
    from pegboard.conformance.suite import ContractSuite

OWN: Mapping[str, str] = {
    **dict.fromkeys(
        ("attn_triton", "memory_host", "memory_paged", "sampler_triton"), "`make gpu-test` runs the folder on a device"
    ),
    "attn_flashinfer": "an imitation of its library stands in for it",
    "cpu_native": "it has to be compiled, and is tested with each instruction set",
    "disagg": "the other side is played by a world of its own",
    "gate_prefetch": "it waits for a cache that its tests play",
    "gate_session": "its tests say what sessions ask",
    "grammar_llguidance": "its schemas are its own",
    "grammar_none": "its one sentence of refusal is compared",
    "grammar_xgrammar": "its schemas are its own",
    "launch_ray": "it needs Ray",
    "mm_qwen_vl": "media and checkpoints of each family",
    "parsers_plain": "two contracts have a provider of one name",
    "quantization": "checkpoints are written for each format",
    "spec_eagle": "it reads a checkpoint, which has to be written",
    "storage_files": "blocks are damaged in their files",
    "storage_mooncake": "a fake store, or a real one where it is installed",
    "storage_redis": "a fake server, or a real one where it is installed",
    "transfer_mooncake": "a fake library, or the real one where it is installed",
    "transfer_nixl": "a fake library, or the real one where it is installed",
}
"""Plugins whose classes are in their folders below tests/plugins, and what they have there that a table cannot say."""

COMPUTE = frozenset({"attention", "model_family", "pooler", "runner", "sampler"})
"""Contracts whose suites compare sums: tests/numeric.py runs them again, as other machines would add."""

_LAYERED = {"prefill_graphs": {"prefill_graph_sizes": [24, 4, 8]}}
_NOT_AGING = ("test_nobody_is_overtaken_for_ever", "test_waiting_does_not_start_anew_after_a_retraction")
_THINK = {"begin": "<think>", "end": "</think>"}


def _asking(*params: SamplingParams) -> dict[str, object]:
    """Requests that ask for a logits processor."""
    return {"asking": lambda self: list(params)}


def _extra(**extra: object) -> SamplingParams:
    return SamplingParams(extra=extra)


CASES: Mapping[str, Mapping[str, Mapping[str, object]]] = {
    "api_anthropic": {"anthropic with_media": {"takes_media": True}},
    "api_native": {"native with_media": {"takes_media": True}},
    "api_ollama": {"ollama with_media": {"takes_media": True}},
    "api_openai": {"openai with_media": {"takes_media": True}},
    "cache_hiradix": {
        "hiradix selective": {
            "options": {"write_policy": "write_through_selective", "eviction": "slru", "protected_share": 0.2}
        },
        "hiradix write_back": {"options": {"write_policy": "write_back", "eviction": "priority"}},
    },
    "cache_radix": {
        "radix lfu": {"options": {"eviction": "lfu"}},
        "radix fifo": {"options": {"eviction": "fifo"}},
        # So small that protection is lost again all the time.
        "radix slru": {"options": {"eviction": "slru", "protected_share": 0.2}},
        "radix priority": {"options": {"eviction": "priority"}},
    },
    "logits_basic": {
        "penalties": _asking(
            SamplingParams(repetition_penalty=1.3),
            SamplingParams(frequency_penalty=0.7),
            SamplingParams(presence_penalty=-1.1),
            SamplingParams(repetition_penalty=0.6, frequency_penalty=-0.2, presence_penalty=0.5),
        ),
        "logit_bias": _asking(SamplingParams(logit_bias={97: 2.5, 3: -100.0}), SamplingParams(logit_bias={0: 1.0})),
        "min_new_tokens": _asking(
            SamplingParams(min_new_tokens=1),
            SamplingParams(min_new_tokens=12, stop_token_ids=(97, 2)),
            SamplingParams(min_new_tokens=30, grammar=Grammar("regex", "a*")),
        ),
    },
    "logits_custom": {
        "dry": _asking(
            _extra(dry={}),
            _extra(dry={"multiplier": 2, "base": 1.1, "allowed_length": 1, "range": 20}),
            _extra(dry={"sequence_breakers": ["b"], "allowed_length": 1}),
        ),
        "dry in_a_short_range": {"options": {"longest_range": 16}},
        "bad_words": _asking(
            _extra(bad_words={"words": ["a", "ba", " c"]}),
            _extra(bad_words={"words": ["ab"]}),
            SamplingParams(extra={"bad_words": {"words": ["b"]}}, grammar=Grammar("regex", "a*")),
        ),
        "allowed_token_ids": _asking(
            _extra(allowed_token_ids={"ids": [97, 98, 97]}),
            SamplingParams(extra={"allowed_token_ids": {"ids": [3]}}, min_new_tokens=4),
            SamplingParams(extra={"allowed_token_ids": {"ids": [50]}}, grammar=Grammar("regex", "a*")),
        ),
    },
    "model_dense": {
        "dense": {
            "architectures": (
                *("llama", "mistral", "qwen2", "qwen3", "qwen3_moe"),
                *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
            )
        }
    },
    "parsers_reasoning": {
        "deepseek_r1": {"chat_template": "{{ content.split('</think>')[-1] }}<think>\n", **_THINK},
        "qwen3": {
            "chat_template": (
                "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
            ),
            **_THINK,
        },
        "gemma4": {"chat_template": "<|channel>", "begin": "<|channel>thought", "end": "<channel|>"},
        "harmony": {
            "chat_template": "<|channel|>analysis<|message|>",
            "begin": "<|channel|>analysis<|message|>",
            "end": "<|end|>",
        },
        "hunyuan": {"chat_template": "<think>\n\n</think>\n<answer>", **_THINK},
        "granite": {
            "chat_template": "Here is my thought process: and after it 'Here is my response:'",
            "begin": "Here is my thought process:",
            "end": "Here is my response:",
        },
        "marked": {
            "options": {"begin": "[THINK]", "end": "[/THINK]"},
            "begin": "[THINK]",
            "end": "[/THINK]",
        },
    },
    "parsers_tools": {
        "gemma4": {"chat_template": "<|tool_call>call:"},
        "harmony": {"chat_template": "<|start|>assistant<|channel|>"},
        "glm": {"chat_template": "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>"},
        "glm of_47": {"chat_template": "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>"},
        "minimax_m2": {"chat_template": "<minimax:tool_call>"},
        "deepseek_v32": {"chat_template": "<｜DSML｜function_calls>"},  # noqa: RUF001 - its own characters
        "kimi_k2": {"chat_template": "<|tool_call_argument_begin|>"},
        "hunyuan": {"chat_template": "<tool_calls>"},
        "granite": {"chat_template": "<|tool_call|>"},
        "olmo3": {"chat_template": "<function_calls>"},
        "hermes": {"chat_template": "{% if tools %}<tool_call>{% endif %}"},
        "llama3_json": {"chat_template": "<|python_tag|>", "leads": False},
        "mistral": {"chat_template": "[TOOL_CALLS]"},
        "mistral by_name": {"chat_template": "[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}"},
        "pythonic": {"chat_template": "[func_name1(params_name1=params_value1)]", "leads": False},
        "qwen3_coder": {"chat_template": "<tool_call>\n<function=name>"},
        # Its own characters.
        "deepseek_v3": {"chat_template": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>```json"},  # noqa: RUF001
        "deepseek_v3 of_v31": {"chat_template": "<｜tool▁call▁begin｜>"},  # noqa: RUF001
    },
    "policy_basic": {
        "priority without_aging": {
            "options": {"aging": None, "preempt_threshold": 1},
            "expected_failures": dict.fromkeys(_NOT_AGING, "aging is off"),
        },
        "priority without_preemption": {
            "options": {"preempt": False},
            "expected_failures": {"test_somebody_makes_way": "preemption is off"},
        },
    },
    "policy_cache_aware": {
        "lpm without_fallback": {"options": {"fallback_above": 0}},
        "lpm without_in_batch_check": {"options": {"in_batch_check_threshold": -1}},
    },
    "pooler_basic": {
        "declared": {
            "files": {"1_Pooling/config.json": {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}}
        }
    },
    "runner_layered": {
        "layered": _LAYERED,
        # A sliding window shorter than the prompts, and pages of one token; axes in chunks.
        "layered on_windows": {
            **_LAYERED,
            "architecture": "mistral",
            "checkpoint_settings": {"sliding_window": 8},
            "page_size": 1,
            "tower": "qwen2_vl",
        },
    },
    "sessions_in_memory": {"in_memory small": {"options": {"max_sessions": 3, "max_session_tokens": 100}}},
    "spec_ngram": {
        "ngram shared": {"options": {"shared": True, "capacity": 300}},
        "ngram short_matches": {"options": {"min_match": 1, "max_match": 1, "longest_pause": 1}},
        "ngram thresholds": {"options": {"accept": "thresholds"}},
        "ngram low_thresholds": {
            "options": {"accept": "thresholds", "accept_threshold_single": 0.3, "accept_threshold_acc": 0.5},
            "lossless": False,
        },
    },
}


def classes(module: str, *, compute: bool) -> Iterator[tuple[str, type[ContractSuite]]]:
    """Yield the classes of a test module, with their names: those of the contracts that compute, or all others."""
    from pegboard.conformance.check import conformance_classes
    from pegboard.conformance.subject import installed_registry

    registry = installed_registry()
    for contract in registry.contracts.values():
        if not contract.suite or (contract.name in COMPUTE) != compute:
            continue
        for record in registry.providers(contract.name):
            plugin = record.plugin.name
            if not record.origin.builtin or plugin in OWN:
                continue
            variants = [key for key in CASES.get(plugin, {}) if key.split()[0] == record.name]
            for base in conformance_classes(record).values():
                for key in dict.fromkeys((record.name, *variants)):
                    name = f"Test_{plugin}_{key}".replace(" ", "_").replace("-", "_")
                    yield name, type(name, (base,), {"__module__": module, **CASES.get(plugin, {}).get(key, {})})
