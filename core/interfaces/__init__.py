"""The contracts: dataclasses and abstract classes, one file each. Nothing here imports torch at run time.

What plugins subclass, build, raise or get from a hook can be imported from here; the types of other values, for
annotations, from their modules. Names load on first use, so that reading a plugin record does not cost an import of
numpy or msgspec.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pegboard.core.interfaces.admission_gate import OPEN as OPEN
    from pegboard.core.interfaces.admission_gate import AdmissionGate as AdmissionGate
    from pegboard.core.interfaces.admission_gate import AdmissionGateContext as AdmissionGateContext
    from pegboard.core.interfaces.admission_gate import GateOptions as GateOptions
    from pegboard.core.interfaces.admission_gate import GateState as GateState
    from pegboard.core.interfaces.admission_gate import Verdict as Verdict
    from pegboard.core.interfaces.api_router import ApiContext as ApiContext
    from pegboard.core.interfaces.api_router import ApiRouter as ApiRouter
    from pegboard.core.interfaces.attention import AttentionBackend as AttentionBackend
    from pegboard.core.interfaces.attention import AttentionContext as AttentionContext
    from pegboard.core.interfaces.batch import BatchExtras as BatchExtras
    from pegboard.core.interfaces.batch import ScheduleBatch as ScheduleBatch
    from pegboard.core.interfaces.batch import StageWork as StageWork
    from pegboard.core.interfaces.choosing import MemoryContext as MemoryContext
    from pegboard.core.interfaces.client import AnnotatedPrompt as AnnotatedPrompt
    from pegboard.core.interfaces.client import EngineClient as EngineClient
    from pegboard.core.interfaces.client import GenerateRequest as GenerateRequest
    from pegboard.core.interfaces.client import ModelInfo as ModelInfo
    from pegboard.core.interfaces.client import OutputChunk as OutputChunk
    from pegboard.core.interfaces.contract import Cardinality as Cardinality
    from pegboard.core.interfaces.contract import Contract as Contract
    from pegboard.core.interfaces.contracts import CONTRACTS as CONTRACTS
    from pegboard.core.interfaces.engine_view import EngineView as EngineView
    from pegboard.core.interfaces.errors import ConfigError as ConfigError
    from pegboard.core.interfaces.errors import InvalidRequest as InvalidRequest
    from pegboard.core.interfaces.errors import ModelError as ModelError
    from pegboard.core.interfaces.errors import OutOfMemory as OutOfMemory
    from pegboard.core.interfaces.errors import PegboardError as PegboardError
    from pegboard.core.interfaces.errors import PluginError as PluginError
    from pegboard.core.interfaces.errors import Unsupported as Unsupported
    from pegboard.core.interfaces.forward import BatchStates as BatchStates
    from pegboard.core.interfaces.forward import EmbedOverlay as EmbedOverlay
    from pegboard.core.interfaces.forward import ForwardBatch as ForwardBatch
    from pegboard.core.interfaces.forward import ForwardMode as ForwardMode
    from pegboard.core.interfaces.forward import ForwardOutput as ForwardOutput
    from pegboard.core.interfaces.forward import LogprobOutput as LogprobOutput
    from pegboard.core.interfaces.frontend import Expanded as Expanded
    from pegboard.core.interfaces.frontend import FrontendContext as FrontendContext
    from pegboard.core.interfaces.frontend import FrontendStage as FrontendStage
    from pegboard.core.interfaces.frontend import Price as Price
    from pegboard.core.interfaces.frontend import PromptExpander as PromptExpander
    from pegboard.core.interfaces.hooks import hookimpl as hookimpl
    from pegboard.core.interfaces.http_front import HttpFront as HttpFront
    from pegboard.core.interfaces.http_front import HttpGuard as HttpGuard
    from pegboard.core.interfaces.json_value import JsonObject as JsonObject
    from pegboard.core.interfaces.json_value import JsonValue as JsonValue
    from pegboard.core.interfaces.keys import PrefixKey as PrefixKey
    from pegboard.core.interfaces.kv_pool import KVPool as KVPool
    from pegboard.core.interfaces.kv_pool import KVPoolContext as KVPoolContext
    from pegboard.core.interfaces.layers import KVGroupSpec as KVGroupSpec
    from pegboard.core.interfaces.layers import KVKind as KVKind
    from pegboard.core.interfaces.layers import LayerSpec as LayerSpec
    from pegboard.core.interfaces.layers import ModelSpec as ModelSpec
    from pegboard.core.interfaces.layers import StateSpec as StateSpec
    from pegboard.core.interfaces.logits_processor import LogitsProcessor as LogitsProcessor
    from pegboard.core.interfaces.logits_processor import LogitsProcessorContext as LogitsProcessorContext
    from pegboard.core.interfaces.model_family import ModelContext as ModelContext
    from pegboard.core.interfaces.model_family import ModelFamily as ModelFamily
    from pegboard.core.interfaces.model_family import Network as Network
    from pegboard.core.interfaces.model_runner import ModelRunner as ModelRunner
    from pegboard.core.interfaces.model_runner import ModelRunnerContext as ModelRunnerContext
    from pegboard.core.interfaces.model_source import ModelSource as ModelSource
    from pegboard.core.interfaces.model_source import ModelSourceContext as ModelSourceContext
    from pegboard.core.interfaces.options import NoOptions as NoOptions
    from pegboard.core.interfaces.options import Options as Options
    from pegboard.core.interfaces.options import SectionFields as SectionFields
    from pegboard.core.interfaces.plugin import BodyField as BodyField
    from pegboard.core.interfaces.plugin import Plugin as Plugin
    from pegboard.core.interfaces.plugin import Provider as Provider
    from pegboard.core.interfaces.plugin import Requirement as Requirement
    from pegboard.core.interfaces.prefix_cache import CacheHandle as CacheHandle
    from pegboard.core.interfaces.prefix_cache import InsertResult as InsertResult
    from pegboard.core.interfaces.prefix_cache import PrefixCache as PrefixCache
    from pegboard.core.interfaces.prefix_cache import PrefixCacheContext as PrefixCacheContext
    from pegboard.core.interfaces.prefix_cache import PrefixMatch as PrefixMatch
    from pegboard.core.interfaces.req import KeyedTokens as KeyedTokens
    from pegboard.core.interfaces.req import Req as Req
    from pegboard.core.interfaces.req import ReqSlot as ReqSlot
    from pegboard.core.interfaces.req import TokenPositions as TokenPositions
    from pegboard.core.interfaces.sampler import NO_TOKEN as NO_TOKEN
    from pegboard.core.interfaces.sampler import Sampler as Sampler
    from pegboard.core.interfaces.sampler import SamplerContext as SamplerContext
    from pegboard.core.interfaces.sampling import Grammar as Grammar
    from pegboard.core.interfaces.sampling import SamplingBatch as SamplingBatch
    from pegboard.core.interfaces.sampling import SamplingParams as SamplingParams
    from pegboard.core.interfaces.sampling import SamplingRow as SamplingRow
    from pegboard.core.interfaces.schedule_policy import SchedulePolicy as SchedulePolicy
    from pegboard.core.interfaces.schedule_policy import SchedulePolicyContext as SchedulePolicyContext
    from pegboard.core.interfaces.stage import Column as Column
    from pegboard.core.interfaces.stage import DevicePart as DevicePart
    from pegboard.core.interfaces.stage import Interest as Interest
    from pegboard.core.interfaces.stage import Sent as Sent
    from pegboard.core.interfaces.stage import Stage as Stage
    from pegboard.core.interfaces.stage import StageContext as StageContext
    from pegboard.core.interfaces.stage import StepResult as StepResult
    from pegboard.core.interfaces.stage import StepView as StepView
    from pegboard.core.interfaces.stage import Wait as Wait
    from pegboard.core.interfaces.status import FinishReason as FinishReason
    from pegboard.core.interfaces.status import FinishType as FinishType
    from pegboard.core.interfaces.step import SETTLE as SETTLE
    from pegboard.core.interfaces.step import BaseStep as BaseStep
    from pegboard.core.interfaces.step import BatchStep as BatchStep
    from pegboard.core.interfaces.step import CoreServices as CoreServices
    from pegboard.core.interfaces.step import StageStep as StageStep
    from pegboard.core.interfaces.step import StepLost as StepLost
    from pegboard.core.interfaces.step import StepSource as StepSource
    from pegboard.core.interfaces.token_allocator import TokenAllocator as TokenAllocator
    from pegboard.core.interfaces.token_allocator import TokenAllocatorContext as TokenAllocatorContext
    from pegboard.core.interfaces.tokenizer import Tokenizer as Tokenizer
    from pegboard.core.interfaces.trees import Accepted as Accepted
    from pegboard.core.interfaces.trees import TokenTrees as TokenTrees

_IMPORT = re.compile(r"^    from (\S+) import (\w+) as \2$", re.MULTILINE)
_HOME = {name: module for module, name in _IMPORT.findall(Path(__file__).read_text("utf-8"))}
"""The imports above, which only type checkers run: the module of each name."""

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    try:
        module = _HOME[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
