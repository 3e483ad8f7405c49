"""The conformance suite of ModelRunner.

A runner executes batches over plain paged memory (see `rig.paged`), step by step as the pipeline would, and its
logits are compared with the same checkpoint in transformers. So nothing is asked of how it computes: a runner that
reads the weights from the model's directory and calls neither network, attention nor sampler is measured by the same
tests.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pegboard.conformance.model_runner.additions import RunnerAdditionTests
from pegboard.conformance.model_runner.base import best_sampler, reference
from pegboard.conformance.model_runner.fakes import Rig, ScriptedProcessor, ScriptedSampler
from pegboard.conformance.model_runner.overlay import RunnerOverlayTests
from pegboard.conformance.model_runner.prefill_graphs import RunnerPrefillGraphTests
from pegboard.conformance.model_runner.ranks import RunnerRankTests
from pegboard.conformance.model_runner.state_graphs import RunnerStateGraphTests
from pegboard.conformance.model_runner.taps import RunnerTapTests
from pegboard.conformance.model_runner.trees import RunnerTreeTests
from pegboard.conformance.model_runner.updates import RunnerUpdateTests
from pegboard.conformance.rig.paged import PagedRun
from pegboard.conformance.suite import capability, lacks
from pegboard.core.interfaces.errors import Unsupported
from pegboard.core.interfaces.forward import ForwardBatch, ForwardMode, ForwardOutput, KVGroupView
from pegboard.core.interfaces.sampling import LogprobRequest


class ModelRunnerContract(
    RunnerAdditionTests,
    RunnerPrefillGraphTests,
    RunnerOverlayTests,
    RunnerRankTests,
    RunnerStateGraphTests,
    RunnerTapTests,
    RunnerTreeTests,
    RunnerUpdateTests,
):
    """What every model runner owes the pipeline. An author names the provider, and sets the other attributes only where
    the runner cannot run the default model.
    """

    contract = "runner"

    # The forward pass.

    def test_prefill(self, prompts: list[list[int]]) -> None:
        rig = self.rig()
        output = rig.step({0: prompts[0]}, return_logits=True)
        self.check_greedy(output, self.expected(prompts[0])[-1:])

    @pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
    def test_ragged_prefill(self, prompts: list[list[int]], order: tuple[int, ...]) -> None:
        """Results come in the order of the rows."""
        output = self.rig().step({one: prompts[one] for one in order}, return_logits=True)
        self.check_greedy(output, torch.stack([self.expected(prompts[one])[-1] for one in order]))

    def test_prefill_in_chunks(self, prompts: list[list[int]]) -> None:
        """A chunk that samples nothing leaves its KV behind, which the next one needs."""
        rig, prompt = self.rig(), prompts[0]
        for start, stop in ((0, 7), (7, 8), (8, 20)):
            output = rig.step({0: prompt[start:stop]}, None)
            self.check_tokens(output.next_token_ids, [])
        self.check_greedy(rig.step({0: prompt[20:]}, return_logits=True), self.expected(prompt)[-1:])

    def test_some_requests_are_sampled(self, prompts: list[list[int]]) -> None:
        rig = self.rig()
        new = {0: prompts[0][:20], 1: prompts[1], 2: prompts[2]}
        output = rig.step(new, sampled=[1, 2], return_logits=True)
        self.check_greedy(output, torch.stack([self.expected(prompts[one])[-1] for one in (1, 2)]))
        output = rig.step({0: prompts[0][20:]}, return_logits=True)
        self.check_greedy(output, self.expected(prompts[0])[-1:])

    def test_stage_times(self, prompts: list[list[int]]) -> None:
        """What is measured is no more than the time that passed, and is told once."""
        rig = self.rig()
        rig.runner.stage_times()
        start = time.perf_counter()
        rig.step({0: prompts[0]})
        passed = time.perf_counter() - start
        times = rig.runner.stage_times()
        assert all(seconds >= 0 for seconds in times.values())
        assert sum(times.values()) <= passed
        assert not times or sum(times.values()) > 0
        assert not sum(rig.runner.stage_times().values())

    def test_weight_bytes(self, prompts: list[list[int]]) -> None:
        """A step changes nothing about them."""
        rig = self.rig()
        before = rig.runner.weight_bytes()
        rig.step({0: prompts[0]})
        assert before is None or before > 0
        assert rig.runner.weight_bytes() == before

    @pytest.mark.parametrize("sizes", [(3, 3, 3), (1, 3, 2), (3, 1, 3)])
    def test_decode(self, prompts: list[list[int]], sizes: tuple[int, ...]) -> None:
        """Decode steps of changing size go on from where each request is."""
        rig = self.rig()
        done = [len(prompt) - 4 for prompt in prompts]
        rig.step({one: prompt[: done[one]] for one, prompt in enumerate(prompts)}, None)
        for size in sizes:
            new = {one: [prompts[one][done[one]]] for one in range(size)}
            output = rig.step(new, decode=True, return_logits=True)
            self.check_greedy(output, torch.stack([self.expected(prompts[one])[done[one]] for one in new]))
            for one in new:
                done[one] += 1

    def test_mixed_batch(self, prompts: list[list[int]]) -> None:
        """One request extends after a prefix, one begins, one decodes."""
        rig = self.rig()
        rig.step({0: prompts[0][:10], 1: prompts[1][:-1]}, None)
        output = rig.step({0: prompts[0][10:], 2: prompts[2], 1: prompts[1][-1:]}, return_logits=True)
        self.check_greedy(output, torch.stack([self.expected(prompts[one])[-1] for one in (0, 2, 1)]))

    @pytest.mark.parametrize("samples", [False, True])
    def test_kv_of_all_tokens_is_in_the_pool(self, prompts: list[list[int]], samples: bool) -> None:
        """KV stands at the batch's slots, in every layer, whichever row is sampled; no other slot is touched."""
        rig = self.rig()
        rig.step({0: prompts[0][:-1], 2: prompts[2]}, () if samples else None, sampled=[2])
        rig.step({0: prompts[0][-1:]}, () if samples else None, decode=True)
        table = rig.run.table
        own = {*table[1, : len(prompts[0])].tolist(), *table[3, : len(prompts[2])].tolist()}
        padding = set(range(self.page_size))
        for layer in rig.run.spec.layers:
            for buffer in (rig.pool.keys(layer.layer_id), rig.pool.values(layer.layer_id)):
                finite = set(buffer.flatten(1).isfinite().all(-1).nonzero().flatten().tolist())
                touched = set((~buffer.isnan()).flatten(1).any(-1).nonzero().flatten().tolist())
                assert own <= finite, f"layer {layer.layer_id}: no KV at slots {sorted(own - finite)}"
                assert touched - padding == own, f"layer {layer.layer_id}: wrote to others' slots {touched - own}"

    def test_only_sampled_rows_get_logits(self, prompts: list[list[int]]) -> None:
        network = self.watched()
        output = self.rig(network=network).step(dict(enumerate(prompts)), sampled=[0, 2])
        assert len(output.next_token_ids) == 2
        assert sum(network.rows) <= 2, f"2 rows are sampled, and logits of {network.rows} rows were computed"
        assert output.logits is None, "logits came unasked"

    def test_nothing_sampled_computes_no_logits(self, prompts: list[list[int]]) -> None:
        network = self.watched()
        sampler = ScriptedSampler(self.make_model().spec.vocab_size)
        output = self.rig(network=network, sampler=sampler).step({0: prompts[0]}, None)
        self.check_tokens(output.next_token_ids, [])
        assert network.rows == [], "logits were computed though nothing is sampled"
        assert not sampler.seen
        assert output.logits is None
        assert output.logprobs is None

    def test_idle_batch(self) -> None:
        rig = self.rig()
        nothing = torch.empty(0, dtype=torch.int64)
        table = torch.from_numpy(rig.run.table)
        batch = ForwardBatch(
            forward_mode=ForwardMode.IDLE,
            batch_size=0,
            input_ids=nothing,
            positions=nothing,
            req_pool_indices=nothing,
            seq_lens=nothing,
            seq_lens_cpu=np.empty(0, dtype=np.int64),
            kv_groups=(KVGroupView(table, nothing),) * len(rig.run.spec.kv_groups),
            kv_pool=rig.pool,
            attn_backend=rig.run.attention,
        )
        output = rig.runner.execute(batch, None)
        self.check_tokens(output.next_token_ids, [])
        assert output.logprobs is None
        output = rig.runner.execute(batch, None, return_logits=True)
        assert output.logits is None or output.logits.shape == (0, rig.run.spec.vocab_size)
        assert rig.pool.written == []

    # Processors.

    def test_processors_run_in_order(self, prompts: list[list[int]]) -> None:
        """Token 7 is raised above all, then everything is negated: the other way round 7 would win."""
        log: list[tuple[str, Any]] = []

        def raise_seven(logits: torch.Tensor) -> None:
            logits[:, 7] = 1e4

        processors = [ScriptedProcessor("raise", log, raise_seven), ScriptedProcessor("negate", log, torch.neg_)]
        output = self.rig(processors=processors).step(
            {0: prompts[0], 1: prompts[1]}, processed=True, return_logits=True
        )
        expected = torch.stack([self.expected(prompts[one])[-1] for one in (0, 1)])
        expected[:, 7] = 1e4
        assert output.logits is not None
        torch.testing.assert_close(output.logits[:, 7], torch.full((2,), -1e4))
        keep = torch.arange(expected.shape[1]) != 7
        self.check_logits(output.logits[:, keep], -expected[:, keep])
        self.check_tokens(output.next_token_ids, output.logits.argmax(-1).tolist())
        order = [name for name, _ in log]
        assert order.index("apply raise") < order.index("apply negate")
        assert order.index("prepare raise") < order.index("prepare negate")

    def test_processors_are_given_the_rows(self, prompts: list[list[int]]) -> None:
        log: list[tuple[str, Any]] = []
        processor = ScriptedProcessor("one", log, torch.abs_)
        self.rig(processors=[processor]).step(dict(enumerate(prompts)), sampled=[2, 0], processed=True)
        (_, rows), (_, count) = log
        assert [row.prompt_ids.tolist() for row in rows] == [prompts[2], prompts[0]]
        assert count == 2

    def test_processors_with_nothing_to_do(self, prompts: list[list[int]]) -> None:
        """One that prepares None is not applied, and none is prepared for a batch in which no request takes part."""
        log: list[tuple[str, Any]] = []
        processors = [ScriptedProcessor("idle", log, torch.zero_, idle=True)]
        rig = self.rig(processors=processors)
        output = rig.step({0: prompts[0]}, processed=True, return_logits=True)
        self.check_greedy(output, self.expected(prompts[0])[-1:])
        assert [name for name, _ in log] == ["prepare idle"]
        rig.step({1: prompts[1]})
        rig.step({2: prompts[2]}, None)
        assert len(log) == 1, "a processor was prepared though `rows` is empty"

    # Sampling.

    @lacks("fused_sampling")
    def test_tokens_are_the_samplers(self, prompts: list[list[int]]) -> None:
        """The sampler gets the processed logits and the batch's parameters, and may do with them what it likes."""
        sampler = ScriptedSampler(self.make_model().spec.vocab_size)
        processors = [ScriptedProcessor("negate", [], torch.neg_)]
        rig = self.rig(sampler=sampler, processors=processors)
        rows = [{"temperature": 0.5, "seed": 3}, {"temperature": 2.0, "seed": 4}]
        new = {0: prompts[0], 1: prompts[1]}
        output = rig.step(new, rows, processed=True, return_logits=True, logprobs=[LogprobRequest(), None])
        self.check_tokens(output.next_token_ids, [5, 6])
        expected = -torch.stack([self.expected(prompt)[-1] for prompt in prompts[:2]])
        self.check_logits(sampler.seen[0], expected)
        self.check_logits(output.logits, expected)
        assert sampler.batches[0].seeds.tolist() == [3, 4]
        assert output.logprobs is not None
        assert bool(output.logprobs.token_logprobs.isfinite().all()), "logprobs of logits that the sampler overwrote"

    def test_greedy_beside_sampled(self, prompts: list[list[int]]) -> None:
        rows = [{}, {"temperature": 5.0, "seed": 1}, {"temperature": 1.0, "top_k": 1}]
        output = self.rig().step(dict(enumerate(prompts)), rows, return_logits=True)
        assert output.logits is not None
        best = output.logits.argmax(-1).tolist()
        tokens = output.next_token_ids.tolist()
        assert [tokens[0], tokens[2]] == [best[0], best[2]]

    def test_only_what_the_mask_allows(self, prompts: list[list[int]]) -> None:
        """Sampled and in the logprobs, after all processors; a row without a mask is left as it is, and one all whose
        tokens the processors have forbidden gets one of them all the same.
        """
        vocab = self.make_model().spec.vocab_size
        allowed = {0: [3, 31, 32, vocab - 1], 2: [6, 7]}

        def forbid(logits: torch.Tensor) -> None:
            logits[:, [6, 7]] = -torch.inf
            logits[:, [5, 33]] = 1e4

        rows = [{}, {}, {"temperature": 1.0, "seed": 5}]
        output = self.rig(processors=[ScriptedProcessor("forbid", [], forbid)]).step(
            dict(enumerate(prompts)),
            rows,
            processed=True,
            allowed=allowed,
            logprobs=[LogprobRequest(top=4, token_ids=(5,)), None, None],
            return_logits=True,
        )
        logits, tokens = output.logits, output.next_token_ids.tolist()
        assert logits is not None
        expected = torch.stack([self.expected(prompt)[-1] for prompt in prompts])
        assert tokens[0] == allowed[0][int(logits[0, allowed[0]].argmax())], "the best of those that are allowed"
        error = (logits[0, allowed[0]] - expected[0, allowed[0]]).abs().max() / expected[0].abs().max()
        assert float(error) <= self.tolerance, f"logits are off by {float(error):.3g} relative"
        assert tokens[1] in (5, 33), "a row without a mask"
        assert tokens[2] in allowed[2], "all that the grammar allows was forbidden, and the grammar has the last word"
        for row, few in allowed.items():
            others = [token for token in range(vocab) if token not in few]
            assert bool((logits[row, others] == -torch.inf).all()), "other tokens are left in the logits"
        assert output.logprobs is not None
        exact = expected[0, allowed[0]].double().log_softmax(-1)
        close = float(output.logprobs.token_logprobs[0]) - float(exact.max())
        bound = 2 * self.tolerance * float(expected[0].abs().max()) + 1e-5
        assert abs(close) < bound, "logprobs are those of the tokens that are allowed"
        assert float(output.logprobs.chosen[0][0]) == -torch.inf

    def test_logprobs(self, prompts: list[list[int]]) -> None:
        """Of the processed logits, free of the temperature; log_softmax in float64 of the logits returned beside them,
        so 1e-5 is what float32 sums cost.
        """
        processors = [ScriptedProcessor("negate", [], torch.neg_)]
        rows = [{"temperature": 0.3, "top_k": 1}, {}, {"temperature": 2.0, "top_k": 1}]
        wants = [LogprobRequest(top=3), None, LogprobRequest(top=1, token_ids=(4, 2))]
        output = self.rig(processors=processors).step(
            dict(enumerate(prompts)), rows, processed=True, logprobs=wants, return_logits=True
        )
        self.check_logits(output.logits, -torch.stack([self.expected(prompt)[-1] for prompt in prompts]))
        found = output.logprobs
        assert found is not None
        assert output.logits is not None
        exact = output.logits.double().log_softmax(-1).float()
        close = torch.testing.assert_close
        for row, token in enumerate(output.next_token_ids.tolist()):
            if wants[row] is not None:
                close(found.token_logprobs[row], exact[row, token], rtol=1e-5, atol=1e-5)
        assert found.top_values is not None
        assert found.top_ids is not None
        close(found.top_values[0], exact[0].topk(3).values, rtol=1e-5, atol=1e-5)
        assert int(found.top_ids[2, 0]) == int(exact[2].argmax())
        assert set(found.chosen) == {2}
        close(found.chosen[2], exact[2, [4, 2]], rtol=1e-5, atol=1e-5)

    def test_logprobs_only_where_asked(self, prompts: list[list[int]]) -> None:
        output = self.rig().step({0: prompts[0]}, logprobs=[None])
        assert output.logprobs is None
        assert output.hidden_states is None
        assert output.logits is None

    # Split prefill.

    def test_other_batches_run_in_the_pauses(self, prompts: list[list[int]]) -> None:
        """In parts or at once, with whatever pauses there are: the same answers, also of requests that decode."""
        whole = self.rig()
        first = whole.step({0: prompts[0], 2: prompts[2]}, return_logits=True)
        at_once = first.next_token_ids.tolist()
        rig = self.rig()
        rig.step({1: prompts[1][:-1]}, None)
        parts = rig.in_parts({0: prompts[0], 2: prompts[2]})
        decoded = None
        while True:
            try:
                next(parts)
            except StopIteration as end:
                output: ForwardOutput = end.value
                break
            if decoded is None:
                decoded = rig.step({1: prompts[1][-1:]}, decode=True, return_logits=True)
        if decoded is None:
            decoded = rig.step({1: prompts[1][-1:]}, decode=True, return_logits=True)
        self.check_tokens(output.next_token_ids, at_once)
        assert first.logits is not None
        self.check_greedy(output, first.logits)
        self.check_greedy(decoded, self.expected(prompts[1])[-1:])
        both = rig.step({0: at_once[:1], 2: at_once[1:]}, decode=True, return_logits=True)
        again = whole.step({0: at_once[:1], 2: at_once[1:]}, decode=True, return_logits=True)
        assert again.logits is not None
        self.check_greedy(both, again.logits)

    @capability("prefers_mixed")
    def test_decodes_share_the_batch_of_a_chunk(self, prompts: list[list[int]]) -> None:
        """As the scheduler has it by itself then: between decodes a chunk that does not end its prompt, so that nothing
        of it is sampled, and then the one that does.
        """
        rig = self.rig()
        rig.step({0: prompts[1][:-2], 1: prompts[0][:10], 2: prompts[2][:-2]}, None)
        for last, chunk in ((-1, prompts[0][10:20]), (None, prompts[0][20:])):
            new = {0: prompts[1][:last][-1:], 1: chunk, 2: prompts[2][:last][-1:]}
            sampled = [0, 2] if last else [0, 1, 2]
            output = rig.step(new, sampled=sampled, return_logits=True)
            sequences = (prompts[1][:last], prompts[0], prompts[2][:last])
            self.check_greedy(output, torch.stack([self.expected(sequences[one])[-1] for one in sampled]))

    @capability("split_prefill")
    def test_there_is_a_pause_after_every_layer(self, prompts: list[list[int]]) -> None:
        rig = self.rig()
        pauses = sum(1 for _ in rig.in_parts({0: prompts[0]}))
        assert pauses == len(self.make_model().spec.layers)

    @lacks("split_prefill")
    def test_there_is_no_pause(self, prompts: list[list[int]]) -> None:
        """The core splits prefills only where it finds the capability; without it all is one part."""
        assert sum(1 for _ in self.rig().in_parts({0: prompts[0]})) == 0

    # Weights.

    def rig_without_network(self) -> Rig:
        model = self.make_model()
        run = PagedRun(model.network, model.spec, dtype=model.model.dtype, page_size=self.page_size)
        context = self.make_context(run, model, model.network, best_sampler(model.spec.vocab_size), ())
        return Rig(self.build(replace(context, network=None)), run)

    @capability("own_weights")
    def test_it_reads_the_weights_itself(self, prompts: list[list[int]]) -> None:
        """The pipeline loads no network for it."""
        output = self.rig_without_network().step({0: prompts[0]}, return_logits=True)
        self.check_greedy(output, self.expected(prompts[0])[-1:])

    @lacks("own_weights")
    def test_it_says_that_it_needs_a_network(self) -> None:
        with pytest.raises(ValueError, match="network"):
            self.rig_without_network()

    # Hidden states.

    @capability("hidden_states")
    def test_hidden_states(self, prompts: list[list[int]]) -> None:
        output = self.rig().step(dict(enumerate(prompts)), sampled=[2, 0], return_hidden_states=True)
        assert len(output.next_token_ids) == 2
        found = output.hidden_states
        assert found is not None
        directory = self.make_model().model.directory
        expected = torch.stack([reference(directory, tuple(prompts[one]))[1][-1] for one in (2, 0)])
        assert found.shape == expected.shape
        error = ((found.float() - expected).abs().amax(-1) / expected.abs().amax(-1)).max()
        assert float(error) <= self.tolerance, f"hidden states are off by {float(error):.3g} relative"

    @lacks("hidden_states")
    def test_hidden_states_are_refused(self, prompts: list[list[int]]) -> None:
        with pytest.raises(Unsupported, match="hidden_states"):
            self.rig().step({0: prompts[0]}, return_hidden_states=True)

    @capability("hidden_states")
    def test_hidden_states_of_any_rows(self, prompts: list[list[int]]) -> None:
        """Of tokens in the middle, in any order, some twice, beside a sampled row that is none of them."""
        rows = [4, 33 + 17, 0, 4]
        rig = self.rig()
        output = rig.run_wanted({0: prompts[0], 1: prompts[1]}, hidden_rows=rows, sampled=[1])
        assert len(output.next_token_ids) == 1
        directory = self.make_model().model.directory
        states = torch.cat([reference(directory, tuple(prompts[one]))[1] for one in (0, 1)])
        found, expected = output.row_states, states[rows]
        assert found is not None
        assert found.shape == expected.shape
        error = ((found.float() - expected).abs().amax(-1) / expected.abs().amax(-1)).max()
        assert float(error) <= self.tolerance, f"hidden states are off by {float(error):.3g} relative"

    @lacks("hidden_states")
    def test_hidden_states_of_rows_are_refused(self, prompts: list[list[int]]) -> None:
        with pytest.raises(Unsupported, match="hidden_states"):
            self.rig().run_wanted({0: prompts[0]}, hidden_rows=[0])

    # Logprobs of prompts.

    @capability("input_logprobs")
    @pytest.mark.parametrize("samples", [False, True])
    def test_prompt_logprobs(self, prompts: list[list[int]], samples: bool) -> None:
        """Of the model's own logits: neither processors nor temperature have a say."""
        negate = ScriptedProcessor("negate", [], torch.neg_)
        rig = self.rig(processors=[negate])
        rows = [*range(5, 32), 33, 33 + 16]
        packed = prompts[0] + prompts[1]
        targets = [packed[row + 1] for row in rows]
        requests = [LogprobRequest(top=3)] * 27 + [LogprobRequest(token_ids=(4, 2)), LogprobRequest()]
        output = rig.run_wanted(
            {0: prompts[0], 1: prompts[1]},
            logprobs=(rows, targets, requests),
            sampled=[1] if samples else [],
            processed=samples,
        )
        found = output.prompt_logprobs
        assert found is not None
        logits = torch.cat([self.expected(prompts[one]) for one in (0, 1)])[rows]
        exact = logits.double().log_softmax(-1).float()
        # A logit may be off by the tolerance of the row's largest, and its log-probability by twice that.
        close = 2 * self.tolerance * float(logits.abs().max()) + 1e-5
        expected = exact.gather(1, torch.tensor(targets)[:, None]).squeeze(1)
        torch.testing.assert_close(found.token_logprobs, expected, rtol=0, atol=close)
        assert found.top_values is not None
        torch.testing.assert_close(found.top_values[:27], exact[:27].topk(3).values, rtol=0, atol=close)
        assert set(found.chosen) == {27}
        torch.testing.assert_close(found.chosen[27], exact[27, [4, 2]], rtol=0, atol=close)

    @capability("input_logprobs")
    def test_not_all_logits_of_prompts_exist_at_once(self) -> None:
        """Blocks of at most 256 rows: a vocabulary is wide. Here 297 of three prompts, which want different things."""
        network = self.watched()
        vocab = self.make_model().spec.vocab_size
        draw = torch.Generator().manual_seed(2)
        prompts = [torch.randint(0, vocab, (100,), generator=draw).tolist() for _ in range(3)]
        rows = [100 * one + row for one in range(3) for row in range(99)]
        targets = [token for prompt in prompts for token in prompt[1:]]
        wants = (rows, targets, [LogprobRequest(top=1)] * 198 + [LogprobRequest(top=4)] * 99)
        output = self.rig(network=network).run_wanted(dict(enumerate(prompts)), logprobs=wants, sampled=[])
        assert max(network.rows, default=0) <= 256
        found = output.prompt_logprobs
        assert found is not None
        logits = torch.cat([self.expected(prompt)[:-1] for prompt in prompts])
        exact = logits.double().log_softmax(-1).float()
        close = 2 * self.tolerance * float(logits.abs().max()) + 1e-5
        expected = exact.gather(1, torch.tensor(targets)[:, None]).squeeze(1)
        torch.testing.assert_close(found.token_logprobs, expected, rtol=0, atol=close)
        assert found.top_values is not None
        torch.testing.assert_close(found.top_values[198:], exact[198:].topk(4).values, rtol=0, atol=close)

    @lacks("input_logprobs")
    def test_prompt_logprobs_are_refused(self, prompts: list[list[int]]) -> None:
        with pytest.raises(Unsupported, match="input_logprobs"):
            self.rig().run_wanted({0: prompts[0]}, logprobs=([0], [5], [LogprobRequest()]))
