"""The runner: ForwardBatch in, tokens out, with the network, its attention and sampling in native code."""

from __future__ import annotations

import logging

import torch

from pegboard.core.interfaces.errors import ConfigError, ModelError, Unsupported
from pegboard.core.interfaces.forward import ForwardBatch, ForwardMode, ForwardOutput
from pegboard.core.interfaces.model_runner import ModelEnds, ModelRunner, ModelRunnerContext
from pegboard.core.interfaces.sampling import SamplingBatch
from pegboard.core.interfaces.weights import WeightStore
from pegboard.plugins.cpu_native.api import NAME, sites_of
from pegboard.plugins.cpu_native.library import NativeError, first_that_loads
from pegboard.plugins.cpu_native.model import NativeModel
from pegboard.plugins.cpu_native.options import CpuNativeOptions
from pegboard.plugins.cpu_native.sampler import CpuNativeSampler, native_sampling, with_no_tokens
from pegboard.plugins.cpu_native.share import objection
from pegboard.plugins.cpu_native.store import NativeStore
from pegboard.toolkit.model.coded import quantized_weights
from pegboard.toolkit.model.decoder_names import DecoderNames
from pegboard.toolkit.model.decoder_spec import DecoderSpec
from pegboard.toolkit.model.linear import tell_sites
from pegboard.toolkit.model.ranks import ranks_of
from pegboard.toolkit.sampling.logprobs import prompt_logprobs
from pegboard.toolkit.sampling.sample import sample
from pegboard.toolkit.system.cores import usable_cores

logger = logging.getLogger(__name__)

MAX_GROUP = 16
"""Most query heads per KV head."""


class CpuNativeRunner(ModelRunner[CpuNativeOptions]):
    """Computes everything up to the tokens in one call of the library, where its own sampler is the chosen one and
    no request wants logits or logprobs; else the logits, on which processors, masks and samplers work as everywhere.

    It reads the weights itself. Sums, the residual stream, norms and softmax are float32; products take bf16. Taps get
    states of the residual stream rounded to bf16, the model's dtype.
    """

    def __init__(self, options: CpuNativeOptions, ctx: ModelRunnerContext) -> None:
        super().__init__(options, ctx)
        try:
            name, library = first_that_loads(options.instructions, quiet=options.instructions == "auto")
        except NativeError as error:
            raise ConfigError(f"runner.instructions: {error}") from error
        ranks = self._ranks = ranks_of(ctx.model)
        threads = options.threads or (usable_cores() if ranks.size == 1 else torch.get_num_threads())
        coded = quantized_weights(ctx.model)
        spec = DecoderSpec.from_config(ctx.model.hf_config, coded=coded is not None)
        self._model = NativeModel(library, spec, ctx.model.directory, threads, options.weights, coded, ranks)
        self._store = self._replaceable(spec, quantised=coded is not None)
        tell_sites(ctx.model.services, sites_of(spec), computed_by=NAME)
        counts = self.weights_by_format().values()
        kept = ", ".join(f"{numbers / 1e6:.1f} M in {stored * 8 / numbers:.3g} bits" for numbers, stored in counts)
        logger.info("the native runner computes with %s in %d threads; weights: %s", name, threads, kept)

    def _replaceable(self, spec: DecoderSpec, *, quantised: bool) -> NativeStore | str:
        """Return the weights, to be replaced, or why they cannot be."""
        if self._ranks.size > 1:
            return "ranks share its weights"
        if quantised:
            return "its weights are quantised"
        if spec.moe is not None:
            return "it is a mixture of experts"
        if spec.tower:
            return "the encoder of its pictures would keep its weights"
        return NativeStore(self._model, DecoderNames.of(spec, self.ctx.model.directory))

    @classmethod
    def supports(cls, options: CpuNativeOptions, ctx: ModelRunnerContext) -> str | None:
        if ctx.device.type != "cpu":
            return f"it runs on a CPU, not on {ctx.device}"
        if (sections := ranks_of(ctx.model).sections.count) > 1:
            return f"each of its ranks computes all layers, and parallel.pipeline is {sections}"
        if "attention" in ctx.explicit:
            return "it has attention of its own, and attention.use names another"
        if "model_family" in ctx.explicit:
            return "it computes the network itself, and model.use names a family for that"
        if ctx.model.dtype is not torch.bfloat16:
            return f"it computes in bfloat16, and model.dtype is {str(ctx.model.dtype).removeprefix('torch.')}"
        if ctx.kv_dtype is not None:
            kept = str(ctx.kv_dtype).removeprefix("torch.")
            return f"it keeps KV in bfloat16, not in {kept}; set memory.kv_dtype to auto or bfloat16"
        coded = quantized_weights(ctx.model) is not None
        try:
            spec = DecoderSpec.from_config(ctx.model.hf_config, coded=coded)
        except ModelError as error:
            return str(error)
        if (why := objection(spec, ranks_of(ctx.model), coded=coded)) is not None:
            return why
        if spec.num_heads // spec.num_kv_heads > MAX_GROUP:
            return f"{spec.num_heads} query heads share {spec.num_kv_heads} KV heads; at most {MAX_GROUP} may share one"
        try:
            first_that_loads("auto")
        except NativeError as error:
            return str(error)
        return None

    def numerics(self) -> str:
        """Weights of another format are other numbers, or are summed up in another order."""
        return f"cpu_native, weights in {self.options.weights}"

    @torch.inference_mode()
    def execute(
        self,
        batch: ForwardBatch,
        sampling: SamplingBatch | None,
        *,
        return_logits: bool = False,
        return_hidden_states: bool = False,
    ) -> ForwardOutput:
        if batch.forward_mode is ForwardMode.IDLE or batch.num_tokens == 0:
            return self._nothing(return_logits, return_hidden_states)
        self._ranks.known(batch)
        sampled = _sampled(batch, sampling)
        wanted = sampling if sampled else None
        fused = wanted if wanted is not None and not return_logits and self._samples(wanted) else None
        apart = wanted if fused is None else None
        logits = torch.empty(sampled, self._model.spec.vocab_size) if return_logits or apart is not None else None
        tokens = torch.empty(sampled, dtype=torch.int64) if fused is not None else None
        kept, native = None, None
        if fused is not None and not _all_greedy(fused):
            kept, native = native_sampling(fused, masked=True)
        rows = _hidden_rows(batch, sampled, return_hidden_states)
        hidden = None if rows is None else torch.empty(len(rows), self.ctx.spec.hidden_size)
        self._model.forward(
            batch,
            sampled=0 if logits is None and tokens is None else sampled,
            logits=logits,
            tokens=tokens,
            sampling=native,
            hidden_rows=rows,
            hidden=hidden,
        )
        logits = None if logits is None else self._ranks.logits(logits, self.ctx.spec.vocab_size)
        output = ForwardOutput(torch.empty(0, dtype=torch.int64), logits=logits if return_logits else None)
        self._share_out(batch, hidden, output, return_hidden_states)
        del kept
        if tokens is not None:
            output.next_token_ids = with_no_tokens(tokens)
        elif apart is not None and logits is not None:
            sample(logits, apart, self.ctx, output, return_logits=return_logits)
        return output

    def _samples(self, sampling: SamplingBatch) -> bool:
        """Return whether tokens are all that comes of the logits, and of its own sampler in this process."""
        own = isinstance(self.ctx.sampler, CpuNativeSampler) and self._ranks.size == 1
        return own and not sampling.rows and not sampling.want_logprobs

    def weights(self) -> WeightStore:
        if isinstance(self._store, str):
            raise Unsupported("the runner 'cpu_native'", "updates", self._store)
        return self._store

    def ends(self) -> ModelEnds:
        if self._ranks.size > 1:
            raise Unsupported("the runner 'cpu_native'", "ends", "ranks share its embeddings and its head")
        return ModelEnds(self._model.embed, self._model.logits)

    def stage_times(self) -> dict[str, float]:
        return self._model.take_seconds()

    def weights_by_format(self) -> dict[str, tuple[int, int]]:
        """See `NativeModel.weights_by_format`."""
        return self._model.weights_by_format()

    def weight_bytes(self) -> int | None:
        return sum(stored for _, stored in self.weights_by_format().values())

    def _share_out(
        self, batch: ForwardBatch, hidden: torch.Tensor | None, output: ForwardOutput, of_sampled: bool
    ) -> None:
        """Give hidden states, which came for all together, to the requests that want them."""
        if hidden is None:
            return
        at = 0
        if of_sampled:
            at = hidden.shape[0] - _count(batch.hidden_rows) - _count(batch.logprob_rows)
            output.hidden_states = hidden[:at]
        if batch.hidden_rows is not None:
            output.row_states = hidden[at : at + len(batch.hidden_rows)]
            at += len(batch.hidden_rows)
        if batch.logprob_rows is not None and batch.logprob_targets is not None:
            places = torch.arange(at, hidden.shape[0])
            output.prompt_logprobs = prompt_logprobs(
                hidden, places, batch.logprob_targets, batch.logprob_requests, self._logits
            )

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._ranks.logits(self._model.logits(hidden), self.ctx.spec.vocab_size)

    def _nothing(self, return_logits: bool, return_hidden_states: bool) -> ForwardOutput:
        spec = self.ctx.spec
        return ForwardOutput(
            next_token_ids=torch.empty(0, dtype=torch.int64),
            logits=torch.empty(0, spec.vocab_size) if return_logits else None,
            hidden_states=torch.empty(0, spec.hidden_size) if return_hidden_states else None,
        )


def _sampled(batch: ForwardBatch, sampling: SamplingBatch | None) -> int:
    """Return how many rows are sampled. Raise ValueError where the sampling parameters are of another number."""
    sampled = batch.batch_size if batch.logits_indices is None else batch.logits_indices.shape[0]
    if sampling is not None and len(sampling) != sampled:
        raise ValueError(f"{len(sampling)} rows of sampling parameters for {sampled} sampled rows")
    return sampled


def _all_greedy(sampling: SamplingBatch) -> bool:
    """Return whether the first largest logit of each row is all that matters."""
    return sampling.all_greedy and sampling.mask is None


def _hidden_rows(batch: ForwardBatch, sampled: int, of_sampled: bool) -> torch.Tensor | None:
    """Packed tokens whose hidden states are wanted: sampled rows, `hidden_rows`, those that predict prompts."""
    wanted = [rows for rows in (batch.hidden_rows, batch.logprob_rows) if rows is not None]
    if of_sampled:
        wanted.insert(0, torch.arange(sampled) if batch.logits_indices is None else batch.logits_indices)
    return torch.cat(wanted) if wanted else None


def _count(rows: torch.Tensor | None) -> int:
    return 0 if rows is None else len(rows)
