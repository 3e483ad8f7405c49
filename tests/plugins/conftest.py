"""What `make test` leaves to `make test-full`: cases that only repeat others with more parameters or providers.

A suite runs for every provider of a plugin, and some of its tests take a second each time. `make test` runs those for
one provider, or for a few that cover all values between them; `make test-full` runs them all.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent

FULL: dict[str, tuple[str, ...]] = {
    # Each page size meets the machine in two classes, each policy of eviction meets it once.
    "cache_radix/test_conformance.py": (
        r"TestRadixCache(Fifo)?::test_any_sequence_of_calls_agrees_with_a_dict\[(1|16)\]",
        r"TestRadixCache(Lfu|Priority)::test_any_sequence_of_calls_agrees_with_a_dict\[(4|16)\]",
        r"Test(RadixCacheSlru|ContractsDefaults)::test_any_sequence_of_calls_agrees_with_a_dict\[(1|4)\]",
    ),
    "cpu_native/test_conformance.py": (r"Test(Qwen2|Qwen3|Mistral|Avx512)::",),
    "cache_block/test_conformance.py": (r"test_any_sequence_of_calls_agrees_with_a_dict\[(1|16)\]",),
    # The other four classes read text with the same shared readers; make test-full cuts these texts, too.
    "parsers_tools/test_conformance.py": (
        r"Test(MistralByName|Mistral|DeepSeekV31|Pythonic)::test_(how_the_text_is_cut|the_work_is_in_proportion)",
    ),
    # llguidance meets every format; xgrammar, which takes longer to compile, meets one of JSON and one of tags.
    "parsers_tools/test_formats.py": (
        r"TestGrammars::test_(every_shape|references|a_backend)\w+\[xgrammar-(?!HermesParser|XmlParser)",
    ),
    # Variants of a policy share most of its code; what is theirs alone is looked at by make test-full.
    "policy_basic/test_conformance.py": (
        r"TestPriorityWithout(Aging|Preemption)::test_(order_is|victims_are)_a_permutation",
        r"TestPriorityWithout(Aging|Preemption)::test_(arguments_stay|preempt_names|the_cost_grows)",
        r"Test(Lof|Srtf)::test_(victims_are_a_permutation|arguments_stay)",
    ),
    "policy_cache_aware/test_conformance.py": (
        r"TestLpmWithout\w+::test_(order_is_a_perm|victims_are_a_perm|arguments_stay|the_cost_grows)",
    ),
    "logits_custom/test_conformance.py": (r"TestDryInAShortRange::test_a_(row_depends|long_decode)",),
    # Other tests compare what the instruction sets draw; the best one meets the large vocabulary here.
    "cpu_native/test_sampler_conformance.py": (r"TestAvx2::test_distribution_over_a_large_vocabulary",),
    # Every shape of batch stays with one size; the interpreter of Triton needs a second for each.
    "attn_triton/test_conformance.py": (
        r"test_(windows|layers)_of_a_batch\[cpu-decode\]",
        r"test_kv_groups\[cpu-decode\]",
        r"test_grouped_heads\[cpu-9-3\]",
        r"test_reads_only_own_slots\[cpu-\w+-16\]",
        r"test_page_sizes\[cpu-\w+-16\]",
        r"test_window\[cpu-(2|16)\]",
        r"test_neighbours_do_not_matter\[cpu-decode\]",
    ),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    patterns = {HERE / name: re.compile("|".join(some)) for name, some in FULL.items()}
    for item in items:
        pattern = patterns.get(item.path)
        if pattern is not None and pattern.search(item.nodeid):
            item.add_marker(pytest.mark.full)
