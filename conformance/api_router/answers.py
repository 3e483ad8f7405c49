"""The part of ApiRouter's suite that is about answers: whose text it is, what was asked for, and the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from pegboard.conformance.api_router.base import ApiSuite, Sample, leaves, with_suffix
from pegboard.conformance.api_router.sampling import parameters_of
from pegboard.conformance.api_router.texts import mark, numbers_in, own_script, wrong_with
from pegboard.conformance.asgi import PATIENCE, Exchange, call
from pegboard.conformance.fake_client import TEMPLATE, FakeEngineClient, FakeTokenizer
from pegboard.conformance.rig.loop_watch import watched
from pegboard.core.interfaces.sampling import SAMPLING_DEFAULTS

CLIENTS = 8

LONG = " and on" * 400
"""What makes a prompt long."""


class AnswerTests(ApiSuite):
    """Answers of an API, whole and in pieces."""

    contract = "api"

    # ---- whose text -----------------------------------------------------------------------------------------------

    def test_answer_holds_the_text(self) -> None:
        """Every character of it, in any content type that the suite can read."""
        for sample in self.generating(whole=True):
            assert sample.whole is not None
            self.check_text(asyncio.run(self.ask(sample, sample.whole, 5)), 5 if sample.prompt else 0)

    def test_stream_holds_the_text(self) -> None:
        for sample in self.generating(streams=True):
            assert sample.stream is not None
            done = asyncio.run(self.ask(sample, sample.stream, 6))
            assert done.complete, "the stream does not end"
            self.check_text(done, 6 if sample.prompt else 0)

    def test_pieces_are_sent_as_they_come(self) -> None:
        """A first piece is there while the engine has nothing more."""

        async def scene(sample: Sample) -> None:
            client = FakeEngineClient(own_script, stall_at=1)
            body = {**self.asking(sample, 0), **(sample.stream or {})}
            exchange = Exchange(self.make_app(client), "POST", sample.path, sample.encode(**body))
            try:
                await exchange.until(lambda one: mark(0) in one.body)
            except TimeoutError:
                pytest.fail(f"{sample.path}: the stream is held back: no piece was sent while the engine was silent")
            finally:
                client.release.set()
                exchange.leave()
            await exchange.end()

        for sample in self.generating(streams=True):
            asyncio.run(scene(sample))

    def test_answers_are_not_mixed_up(self) -> None:
        """Several clients ask at one time, and each gets what is its own."""

        async def scene(sample: Sample, way: Mapping[str, Any]) -> list[Exchange]:
            app = self.make_app(FakeEngineClient(own_script, uneven=True))
            bodies = [{**self.asking(sample, number), **way} for number in range(1, CLIENTS + 1)]
            exchanges = [Exchange(app, "POST", sample.path, sample.encode(**body)) for body in bodies]
            done = await asyncio.gather(*(one.end() for one in exchanges), return_exceptions=True)
            failed = [one for one in done if isinstance(one, BaseException)]
            assert not failed, (
                f"{sample.path}: {len(failed)} of {CLIENTS} clients at one time got no answer: {failed[0]!r}"
            )
            return exchanges

        for sample in self.generating():
            for way in sample.ways:
                done = asyncio.run(scene(sample, way))
                if sample.prompt:
                    self._check_owners(sample, done)
                else:
                    whose = [tuple(sorted(numbers_in(self.said(one)))) for one in done]
                    assert sorted(whose) == [(number,) for number in range(CLIENTS)], f"mixed up: {whose}"

    def _check_owners(self, sample: Sample, done: Sequence[Exchange]) -> None:
        found = [wrong_with(self.said(one), number) for number, one in enumerate(done, 1)]
        wrong = sorted(filter(None, found), key=lambda one: "another client's" not in one)
        assert not wrong, (
            f"{sample.path}: answers are mixed up: {len(wrong)} of {CLIENTS} clients at one time got a wrong one, as "
            f"if the router kept something for all of them. One of them: {wrong[0]}"
        )

    # ---- what was asked for ---------------------------------------------------------------------------------------

    def test_sampling_parameters_reach_the_engine(self) -> None:
        """What a body's schema names like a sampling parameter is one, or is refused by name."""

        async def scene(sample: Sample, way: Mapping[str, Any]) -> list[str]:
            lost = []
            found = parameters_of(sample.schema, self.sampling_names)
            client = FakeEngineClient()
            app = self.make_app(client)
            for one in found:
                client.requests.clear()
                done = await call(app, "POST", sample.path, {**one.put_into(sample.body, found), **way})
                if done.status == 200 and client.requests:
                    arrived = [getattr(request.sampling, one.name) for request in client.requests]
                    if not all(one.has_arrived(value) for value in arrived):
                        lost.append(f"{one} = {one.value!r} became {one.name} = {arrived[0]!r}")
                elif one.path[-1] not in done.body.decode(errors="replace"):
                    lost.append(f"{one} = {one.value!r} is answered with {done.status}: {done.body[:200]!r}")
            return lost

        for sample in self.generating():
            for way in sample.ways:
                lost = asyncio.run(scene(sample, way))
                assert not lost, (
                    f"{sample.path}, {dict(way) or 'whole'}: documented sampling parameters are dropped: "
                    f"{'; '.join(lost)}. A field that means something else stands in the test class's `sampling_names`"
                )

    def test_what_a_request_leaves_out_is_left_to_the_model(self) -> None:
        """A model's sampling defaults hold where the client says nothing: the router must not say it instead."""

        async def scene(sample: Sample) -> list[str]:
            lost = []
            found = parameters_of(sample.schema, self.sampling_names)
            for one in found:
                client = FakeEngineClient()
                body = one.left_out(sample.body, found)
                done = await call(self.make_app(client), "POST", sample.path, body)
                # What a body must have is said in each.
                if one.name in SAMPLING_DEFAULTS and done.status == 200:
                    lost += [str(one) for request in client.requests if one.name not in request.sampling.unset]
            return lost

        for sample in self.generating():
            lost = asyncio.run(scene(sample))
            assert not lost, (
                f"{sample.path}: {', '.join(lost)} are not in the body, and yet `SamplingParams.unset` does not name "
                "them, so that the model's defaults are lost; SamplingFields.sampling_params and SamplingParams.of do"
            )

    # ---- the event loop -------------------------------------------------------------------------------------------

    def test_requests_run_side_by_side(self) -> None:
        async def scene(sample: Sample) -> None:
            client = FakeEngineClient(stall_at=0)
            app = self.make_app(client)
            first = Exchange(app, "POST", sample.path, sample.encode())
            await asyncio.wait_for(client.submitted.wait(), PATIENCE)
            client.stall_at = None
            second = Exchange(app, "POST", sample.path, sample.encode())
            try:
                assert (await second.end()).status == 200
            except TimeoutError:
                pytest.fail("a request waits for another one")
            finally:
                client.release.set()
            await first.end()

        for sample in self.generating():
            asyncio.run(scene(sample))

    def test_templates_do_not_block_the_loop(self) -> None:
        for sample in self.generating():
            bodies = [{**sample.body, **way} for way in sample.ways]
            found = [one for one in asyncio.run(self._blocking(sample, bodies)) if "template" in one]
            assert not found, f"{sample.path} renders on the event loop, where all others wait for it: {found[0]}"

    def test_nothing_blocks_the_loop(self) -> None:
        """Sleeping, connecting, tokenising long prompts: while one request does it in the loop, no other is served."""
        reaching = {one.path: one for one in self.generating()}
        for sample in self.samples():
            if sample.path in reaching:
                sample = reaching[sample.path]
                bodies = [{**self.asking(sample, 0, LONG), **way} for way in sample.ways]
            else:
                bodies = [with_suffix(sample.body, path, LONG) for path in leaves(sample.body)]
            found = asyncio.run(self._blocking(sample, bodies))
            assert not found, f"{sample.path} blocks the event loop, so all others wait for it: {'; '.join(found)}"

    async def _blocking(self, sample: Sample, bodies: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return what held up the loop while these bodies were served."""
        found: list[str] = []
        for number, body in enumerate(bodies):
            # A template that has not been compiled yet.
            tokenizer = FakeTokenizer(template=f"{{# {sample.path} {number} #}}{TEMPLATE}")
            app = self.make_app(FakeEngineClient(tokenizer=tokenizer))
            with watched() as notes:
                await call(app, "POST", sample.path, body)
            found += [*tokenizer.blocking, *notes]
        return found
