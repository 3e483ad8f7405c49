"""A model in the native library: its weights, packed, and one call per forward pass."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pegboard.core.interfaces.errors import OutOfMemory, Unsupported
from pegboard.plugins.cpu_native.api import NativeAdditions
from pegboard.plugins.cpu_native.library import FORMATS, RANK_LOST, SITES, STAGES, Batch, Sampling, Shape
from pegboard.plugins.cpu_native.share import Share, Waiting
from pegboard.plugins.cpu_native.weights import KEEP_CODES, NO_EXPERT, LayerVectors, Site, WeightsSource
from pegboard.toolkit.model.ranks import Ranks
from pegboard.toolkit.model.rope import RotaryEmbedding
from pegboard.toolkit.system.progress import progress

if TYPE_CHECKING:
    from pegboard.core.interfaces.forward import Additions, EmbedOverlay, ForwardBatch, Taps
    from pegboard.core.interfaces.kv_pool import KVPool
    from pegboard.toolkit.model.coded import QuantizedWeights
    from pegboard.toolkit.model.decoder_spec import DecoderSpec

ACTIVATIONS = {"silu": 0, "swish": 0, "gelu": 1, "gelu_pytorch_tanh": 2, "relu": 3}

WANTED = {"plain": 0, "bf16": 1, "int8": 2, "bf12": 3}
"""Wanted of the source, by what options.weights says."""


class NativeModel:
    """Weights of a decoder, read from a model directory as bf16 or as codes, and packed as the library wants them: one
    rank's share of them, whose sizes `spec` has.

    While it loads, one matrix is there twice; afterwards the token embeddings are there as they came, too.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        spec: DecoderSpec,
        directory: Path,
        threads: int,
        weights: str,
        coded: QuantizedWeights | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks or Ranks()
        share = Share(spec, self._ranks)
        source = WeightsSource(spec, directory, coded, share, codes=weights in KEEP_CODES)
        self.spec = share.spec
        self._library = library
        self._rope = RotaryEmbedding(spec.rope)
        self._shape = _shape(share, self._ranks, threads, weights)
        self._waiting = Waiting(self._ranks)
        self._region: torch.Tensor | None = None
        self._handle: int | None = None
        self._process = self._getpid()
        self._embedding = torch.empty(0)
        self.renew()
        self._pools: dict[int, tuple[KVPool, ctypes.Array[ctypes.c_void_p], ctypes.Array[ctypes.c_void_p]]] = {}
        self._load(source)

    def forget(self) -> None:
        """Give the memory of all weights back; no batch runs after that."""
        self.close()
        self._region = None
        self._embedding = torch.empty(0)

    def renew(self) -> None:
        """Forget all weights; no batch runs until they are all set again."""
        self.forget()
        self._handle = self._library.pb_create(ctypes.byref(self._shape))
        self._check(0 if self._handle else 1)

    def set_site(self, layer: int, site: str, parts: Site, expert: int = NO_EXPERT) -> None:
        """Set a matrix of a layer, or of one of its experts, or the head."""
        self._check(self._library.pb_set_matrix(self._handle, layer, SITES.index(site), expert, parts.pointers))

    def set_vectors(self, layer: int, vectors: LayerVectors) -> None:
        """Set what a layer has besides its matrices, which are set already."""
        self._check(self._library.pb_set_vectors(self._handle, layer, ctypes.byref(vectors.pointers)))

    def set_ends(self, embedding: torch.Tensor, norm: torch.Tensor) -> None:
        """Set the token embeddings bf16, which are kept as they are, and the last norm float32."""
        self._check(self._library.pb_set_ends(self._handle, embedding.data_ptr(), norm.data_ptr()))
        self._embedding = embedding

    @property
    def embedding(self) -> torch.Tensor:
        """The token embeddings bf16 [vocab, hidden]; nothing where there are no weights."""
        return self._embedding

    def _load(self, source: WeightsSource) -> None:
        """Give all weights to the library, a matrix at a time."""
        left = source.nbytes
        with progress("reading weights", source.nbytes) as read:
            for index in range(self.spec.num_layers):
                for site in SITES[:-1]:
                    for expert in source.experts(index, site):
                        parts = source.layer_site(index, site, expert)
                        self.set_site(index, site, parts, expert)
                        read(parts.nbytes)
                        left -= parts.nbytes
                        del parts
                vectors = source.vectors(index)
                self.set_vectors(index, vectors)
                read(vectors.nbytes)
                left -= vectors.nbytes
            self.set_ends(source.embedding(), source.final_norm())
            self.set_site(0, "head", source.head(self._embedding))
            read(left)

    # Modules may be gone when the last objects of a process are.
    _getpid = staticmethod(os.getpid)

    def close(self) -> None:
        """Give the memory back. May be called twice."""
        # A forked child has none of the threads that would have to be waited for.
        if self._handle and self._process == self._getpid():
            self._library.pb_destroy(self._handle)
        self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()

    def forward(
        self,
        batch: ForwardBatch,
        *,
        sampled: int,
        logits: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
        sampling: Sampling | None = None,
        hidden_rows: torch.Tensor | None = None,
        hidden: torch.Tensor | None = None,
    ) -> None:
        """KV of all tokens into the pool; and into those tensors that are given, of the sampled rows either logits
        float32 [sampled, vocab] or tokens int64 [sampled], by `sampling` or greedily, below zero where a row cannot be
        sampled; hidden states float32 [n, hidden] of `hidden_rows` int64 [n]. The batch's taps are given their states.
        The other ranks compute the same batch. Raises RuntimeError if one of them has ended, and TimeoutError if one
        does not come.
        """
        self._check_threads()
        self._join()
        native, kept = self._native(batch)
        if batch.additions is not None:
            if self._ranks.size > 1:
                raise Unsupported("the runner 'cpu_native'", "additions", "ranks have shares of its matrices")
            native.additions = _added(batch.additions, native.tokens)
        native.sampled = sampled
        native.hidden_count = 0 if hidden is None else hidden.shape[0]
        native.hidden_rows, native.hidden = _pointer(hidden_rows), _pointer(hidden)
        native.logits, native.drawn = _pointer(logits), _pointer(tokens)
        native.sampling = None if sampling is None else ctypes.addressof(sampling)
        tapped = None if batch.taps is None else self._tap(native, batch.taps)
        self._check(self._library.pb_forward(self._handle, ctypes.byref(native)))
        del kept
        if batch.taps is not None and tapped is not None:
            for place, states in zip(*tapped, strict=True):
                batch.taps.note(int(place), states)

    def _join(self) -> None:
        """Before the first pass: get the memory in which ranks add up."""
        if self._ranks.size > 1 and self._region is None:
            self._region = self._ranks.together.region(self._library.pb_ranks_bytes(self._handle))
            self._library.pb_join(self._handle, self._region.data_ptr(), self._waiting.lost)

    def attend(self, batch: ForwardBatch, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Attention of one layer and nothing else, for tests and measurements: bf16 [tokens, heads, head_dim] of
        queries float32 of that shape, which are turned already, with the keys and values that the pool has.
        """
        native, kept = self._native(batch)
        queries, answers = queries.contiguous(), torch.empty(queries.shape, dtype=torch.bfloat16)
        arguments = (ctypes.byref(native), layer, queries.data_ptr(), answers.data_ptr())
        self._check(self._library.pb_attend(self._handle, *arguments))
        del kept
        return answers

    def _native(self, batch: ForwardBatch) -> tuple[Batch, list[torch.Tensor]]:
        """Return a batch as the library takes it, without what is to come out; and tensors that it points to."""
        tokens, count = batch.num_tokens, batch.batch_size
        starts = torch.empty(count + 1, dtype=torch.int64)
        if batch.extend_start_loc is None:
            torch.arange(count + 1, out=starts)
        else:
            starts[:count] = batch.extend_start_loc
            starts[count] = tokens
        cos, sin = self._rope(batch.positions, torch.float32)
        group = batch.kv_groups[0]
        keys, values = self._buffers(batch.kv_pool)
        kept = [
            one.contiguous()
            for one in (batch.input_ids, batch.req_pool_indices, batch.seq_lens, group.out_cache_loc, cos, sin)
        ]
        ids, rows, seq_lens, out_loc, cos, sin = kept
        kept.append(starts)
        native = Batch(
            tokens=tokens,
            batch=count,
            ids=ids.data_ptr(),
            rows=rows.data_ptr(),
            seq_lens=seq_lens.data_ptr(),
            starts=starts.data_ptr(),
            out_loc=out_loc.data_ptr(),
            logits_indices=_pointer(batch.logits_indices),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            table=group.row_table.data_ptr(),
            table_stride=group.row_table.stride(0),
            keys=ctypes.cast(keys, ctypes.c_void_p),
            values=ctypes.cast(values, ctypes.c_void_p),
        )
        if batch.overlay is not None:
            kept += self._lay_over(native, batch.overlay)
        if batch.tail_lens is not None and batch.tail_bits is not None:
            kept += _set_tails(native, batch.tail_lens, batch.tail_bits, batch.seq_lens)
        return native, kept

    def _lay_over(self, native: Batch, overlay: EmbedOverlay) -> list[torch.Tensor]:
        """Put an overlay into a native batch. Return the tensors that it points to. Raise ValueError for one that does
        not fit the batch, since native code would read and write beyond its memory.
        """
        rows, count = overlay.rows.contiguous(), len(overlay.rows)
        bounded = not count or (int(rows[0]) >= 0 and int(rows[-1]) < native.tokens and bool((rows.diff() > 0).all()))
        if not bounded or any(one.shape != (count, self.spec.hidden_size) for one in (overlay.states, *overlay.deep)):
            raise ValueError(
                f"an overlay needs ascending rows below {native.tokens} and states [{count}, {self.spec.hidden_size}]"
            )
        states = overlay.states.float().contiguous()
        native.embed_count, native.embed_rows, native.embeds = count, rows.data_ptr(), states.data_ptr()
        kept = [rows, states]
        if overlay.deep:
            deep = torch.stack(overlay.deep).float()
            native.deep_levels, native.deep = len(overlay.deep), deep.data_ptr()
            kept.append(deep)
        return kept

    def _tap(self, native: Batch, taps: Taps) -> tuple[torch.Tensor, torch.Tensor]:
        """Put taps into a native batch. Return their places int32 [n], without those that there are not, and where the
        states go: bf16 [n, tokens, hidden].
        """
        found = sorted({*taps.places} & {*range(self.spec.num_layers + 2)})
        places = torch.tensor(found, dtype=torch.int32)
        states = torch.empty(len(found), native.tokens, self.spec.hidden_size, dtype=torch.bfloat16)
        native.tap_count, native.tap_places, native.tapped = len(found), places.data_ptr(), states.data_ptr()
        return places, states

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings bf16 [n, hidden] of ids int64 [n]. Raise IndexError for one that is none."""
        return torch.nn.functional.embedding(ids, self._embedding)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits float32 [n, vocab] of hidden states [n, hidden] after the final norm, of any float dtype. Uses
        the threads and the memory of `forward`, and not beside it.
        """
        self._check_threads()
        logits = torch.empty(hidden.shape[0], self.spec.vocab_size)
        if hidden.shape[0]:
            hidden = hidden.float().contiguous()
            self._check(self._library.pb_project(self._handle, hidden.data_ptr(), hidden.shape[0], logits.data_ptr()))
        return logits

    def weights_by_format(self) -> dict[str, tuple[int, int]]:
        """Of the matrices in each of FORMATS that occurs: how many numbers, and in how many bytes."""
        if not self._handle:
            return {}
        counts = (ctypes.c_int64 * (2 * len(FORMATS)))()
        self._library.pb_count_weights(self._handle, counts)
        found = zip(FORMATS, counts[::2], counts[1::2], strict=True)
        return {name: (numbers, stored) for name, numbers, stored in found if numbers}

    def take_seconds(self) -> dict[str, float]:
        """Return seconds of each stage of all forward passes since the last call."""
        if not self._handle:
            return {}
        seconds = (ctypes.c_double * len(STAGES))()
        self._library.pb_take_seconds(self._handle, seconds)
        return dict(zip(STAGES, seconds, strict=True))

    def _buffers(self, pool: KVPool) -> tuple[ctypes.Array[ctypes.c_void_p], ctypes.Array[ctypes.c_void_p]]:
        """Return where each layer's K and V begin."""
        known = self._pools.get(id(pool))
        if known is None or known[0] is not pool:
            kind = ctypes.c_void_p * self.spec.num_layers
            keys = kind(*[pool.keys(layer).data_ptr() for layer in range(self.spec.num_layers)])
            values = kind(*[pool.values(layer).data_ptr() for layer in range(self.spec.num_layers)])
            # One engine has one pool; a probe or a test may bring another.
            self._pools = {id(pool): (pool, keys, values)}
            return keys, values
        return known[1], known[2]

    def _check_threads(self) -> None:
        if self._process != self._getpid():
            raise RuntimeError(
                "this process was forked from the one that loaded the model, whose threads it has not got"
            )

    def _check(self, code: int) -> None:
        if code == RANK_LOST:
            assert self._waiting.error is not None
            raise self._waiting.error
        if code:
            raise OutOfMemory("the native runner could not get memory on the host, or threads")


def _set_tails(
    native: Batch, lens: torch.Tensor, bits: torch.Tensor, seq_lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put tails into a native batch. Return the tensors that it points to. Raise ValueError for those that do not fit
    the batch, since native code would read beyond its memory.
    """
    fit = lens.shape == (native.batch,) and bits.shape == (native.tokens,)
    if not fit or not bool(((lens >= 0) & (lens <= seq_lens.clamp(max=64))).all()):
        raise ValueError(
            f"tails of {native.batch} requests need lengths of 0 to 64, and bits of {native.tokens} tokens"
        )
    lens, bits = lens.contiguous(), bits.contiguous()
    native.tails, native.bits = lens.data_ptr(), bits.data_ptr()
    return lens, bits


def _added(additions: Additions, tokens: int) -> int:
    """Return where the library finds what a batch adds. Raise Unsupported for what is not in the library's form, and
    ValueError for what does not fit the batch, since native code would read beyond its memory.
    """
    if not isinstance(additions, NativeAdditions):
        raise Unsupported("the runner 'cpu_native'", "additions", "they are not those of its own backend")
    if additions.tokens != tokens:
        raise ValueError(f"what is added is for {additions.tokens} tokens, and the batch has {tokens}")
    return additions.pointer


def _shape(share: Share, ranks: Ranks, threads: int, weights: str) -> Shape:
    spec = share.spec
    return Shape(
        vocab=spec.vocab_size,
        hidden=spec.hidden_size,
        inter=spec.intermediate_size,
        layers=spec.num_layers,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        act=ACTIVATIONS[spec.hidden_act],
        qk_norm=int(spec.qk_norm),
        threads=threads,
        wanted=WANTED[weights],
        experts=0 if spec.moe is None else spec.moe.num_experts,
        per_token=0 if spec.moe is None else spec.moe.per_token,
        expert_inter=0 if spec.moe is None else spec.moe.intermediate_size,
        normalised=int(spec.moe is not None and spec.moe.normalised),
        eps=spec.rms_norm_eps,
        scale=spec.head_dim**-0.5,
        ranks=ranks.size,
        rank=ranks.index,
        first_id=share.first_id,
    )


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
