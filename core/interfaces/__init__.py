"""The contracts: dataclasses and abstract classes, one file each. Nothing here imports torch at run time.

Names load on first use, so that reading a plugin record does not cost an import of numpy or msgspec.
"""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "api_router": ("ApiContext", "ApiRouter"),
    "attention": ("AttentionBackend", "AttentionContext"),
    "batch": ("ModelWorkerBatch", "SamplingInfo", "ScheduleBatch"),
    "client": ("EngineClient", "GenerateRequest", "ModelInfo", "OutputChunk", "OutputStream"),
    "contracts": ("CONTRACTS", "Cardinality", "Contract"),
    "errors": (
        "ConfigError",
        "InvalidRequest",
        "ModelError",
        "OutOfMemory",
        "PegboardError",
        "PluginError",
        "Unsupported",
    ),
    "forward": ("ForwardBatch", "ForwardMode", "ForwardOutput", "KVGroupView", "LogprobOutput"),
    "hooks": ("HookSpecs", "hookimpl", "hookspec"),
    "keys": ("PrefixKey",),
    "kv_pool": ("KVPool", "KVPoolContext"),
    "layers": ("KVGroupSpec", "KVKind", "LayerSpec", "ModelSpec"),
    "logits_processor": ("LogitsProcessor", "LogitsProcessorContext"),
    "model_family": ("ModelContext", "ModelFamily", "Network", "ProbeRun"),
    "model_runner": ("ModelRunner", "ModelRunnerContext"),
    "model_source": ("ModelSource", "ModelSourceContext"),
    "options": ("NoOptions", "Options"),
    "plugin": ("API_VERSION", "ENTRY_POINT_GROUP", "Plugin", "Provider", "Requirement"),
    "prefix_cache": ("CacheHandle", "InsertResult", "PrefixCache", "PrefixCacheContext", "PrefixMatch"),
    "req": ("Req", "ReqKV", "ReqLogprobs", "ReqOutput", "ReqSlot", "ReqTiming", "TokenBuffer"),
    "sampler": ("Sampler", "SamplerContext"),
    "sampling": ("LogprobRequest", "SamplingBatch", "SamplingParams", "SamplingRow"),
    "schedule_policy": ("SchedulePolicy", "SchedulePolicyContext"),
    "status": ("FinishReason", "FinishType", "IllegalTransition", "ReqStatus"),
    "token_allocator": ("TokenAllocator", "TokenAllocatorContext"),
    "tokenizer": ("Tokenizer",),
}
_HOME = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = sorted(_HOME)  # noqa: PLE0605 - one table, so that the list cannot drift from it


def __getattr__(name: str) -> Any:
    try:
        module = _HOME[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
