"""What operators, plugin authors and kernel engineers look for is at most two clicks from the site's first page.

A click is a tab, an entry of the side bar (which shows the whole tab, its groups open) or a link on a page. The site is
not built for this: links and navigation are read from the pages and mkdocs.yml.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.test_site import Loader, pages

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MKDOCS: Mapping[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), Loader)
TABS = [list(pages(tab)) for tab in MKDOCS["nav"]]
FIRST = "index.md"
WANTED = {
    "operator": {
        "start a model on a GPU": ("gpu.md", "pegboard serve"),
        "know whether my model is supported": ("models.md", "architectures"),
        "translate a vLLM flag": ("coming-from.md", "--max-model-len"),
        "require API keys": ("operation.md", "api_key_file"),
        "probe whether it is ready": ("operation.md", "/ready"),
        "limit what a request may cost": ("operation.md", "request_bytes"),
        "know which metrics there are": ("metrics.md", "pegboard_num_requests_waiting"),
        "understand an error message": ("troubleshooting.md", "context_length_exceeded"),
        "fit more requests into memory": ("gpu.md", "memory.kv_dtype"),
        "keep prefixes over a restart": ("tiers.md", "survive a restart"),
        "separate prefill and decode": ("disaggregation.md", "role: prefill"),
        "find the best policy for my load": ("policy-lab.md", "pegboard simulate"),
    },
    "plugin author": {
        "write a first plugin": ("plugins.md", "[project.entry-points.pegboard]"),
        "check it with the suite": ("plugins.md", "pegboard plugins check"),
        "give it options": ("plugins.md", "class ShortestJobOptions(Options)"),
        "know what may be imported": ("plugins.md", "pegboard.core.interfaces"),
        "watch steps": ("hooks.md", "batch_committed"),
        "add a key to a section of the core": ("hooks.md", "SectionFields"),
        "add HTTP routes": ("writing-a-router.md", "dependencies=[USER, LARGE]"),
        "hold requests back": ("writing-a-gate.md", "Verdict.blocked"),
        "change logits": ("sampling.md", "LogitsProcessor"),
        "take part in steps": ("writing-a-stage.md", "class Green(Stage)"),
        "look up a contract": ("reference/schedule_policy.md", ""),
        "see what the toolkit has": ("reference/toolkit.md", ""),
    },
    "kernel engineer": {
        "read the contract of attention": ("reference/attention.md", ""),
        "read the contract of samplers": ("reference/sampler.md", ""),
        "know how KV is laid out": ("reference/kv_pool.md", ""),
        "know what a batch brings": ("reference/requests.md", ""),
        "launch a kernel that tests count": ("reference/toolkit-kernels.md", ""),
        "see registers and shared memory": ("gpu-kernels.md", "sm_90"),
        "see how far steps are from the roof": ("gpu-results.md", "roof"),
        "know how decodes are split": ("gpu.md", "attention.kv_parts"),
        "record graphs without a GPU": ("gpu.md", "TapeCapture"),
        "compile for other targets": ("gpu.md", "benchmarks.compile_kernels"),
        "derive a tolerance": ("style.md", "norm(a) · norm(b)"),
        "know what limits a CPU": ("performance.md", "benchmarks.roofline"),
    },
}
"""Who looks for what: the page that has it, and words of it there; none for pages that the site's build writes."""


def links(page: str) -> Iterator[str]:
    """Yield the pages that a page links to."""
    path = DOCS / page
    if not path.is_file():  # of the reference, which is written when the site is built
        return
    for target in re.findall(r"\]\(([\w./-]+\.md)(?:#[\w-]*)?\)", path.read_text("utf-8")):
        yield (path.parent / target).resolve().relative_to(DOCS).as_posix()


def next_pages(page: str) -> set[str]:
    """Return what one click leads to from a page."""
    side_bar = next((tab for tab in TABS if page in tab), [])
    return {*links(page), *side_bar, *(tab[0] for tab in TABS)}


def test_groups_of_the_side_bar_are_open() -> None:
    assert {"navigation.tabs", "navigation.sections"} <= set(MKDOCS["theme"]["features"])


@pytest.mark.parametrize("who", WANTED)
def test_two_clicks_are_enough(who: str) -> None:
    once = next_pages(FIRST)
    twice = once.union(*(next_pages(page) for page in once))
    assert len(WANTED[who]) >= 10
    assert {wish: page for wish, (page, _) in WANTED[who].items() if page not in twice} == {}


@pytest.mark.parametrize("who", WANTED)
def test_the_pages_have_what_is_looked_for(who: str) -> None:
    named = [(page, words) for page, words in WANTED[who].values() if not page.startswith("reference/")]
    texts = {page: " ".join((DOCS / page).read_text("utf-8").split()) for page, _ in named}
    assert [(page, words) for page, words in named if words not in texts[page]] == []


def test_a_page_outside_the_navigation_leads_to_the_tabs() -> None:
    assert next_pages("nowhere.md") == {tab[0] for tab in TABS}
