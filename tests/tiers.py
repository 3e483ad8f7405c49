"""What `make test` leaves to `make test-full`, and that to `make soak`.

`make test` has five minutes on two cores. It runs what shows that a thing works: every unit, every suite, and one way
through a real server for each API. What repeats that with other parameters, clients or accidents is in FULL; what looks
for trouble that only time brings is in SOAK, which CI leaves out. A test is moved by its id, so that both lists can be
read here; one that never runs in `make test` may as well have the marker at its own place.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ALL = ""
WHOLE_FILE = re.compile(r"^pytestmark = (?:\[[^]]*\]|.*$)", re.MULTILINE)

FULL: dict[str, tuple[str, ...]] = {
    # ---- end to end -------------------------------------------------------------------------------------------------
    "e2e/test_abort_storm.py": (ALL,),
    "e2e/test_bad_config.py": (
        r"test_it_is_refused\[\w+-(wrong type|key|disabl|malformed|missing)",
        r"test_(two_providers|not_in_the_hubs|the_demo_package|port_taken|address_of)",
        r"test_no_such_directory",
    ),
    # One server without features; its pipeline is that of tests/core/pipeline.
    "e2e/test_bare_core.py": (ALL,),
    # One with fewer slots than adapters stays; the routes are looked at without a server there.
    "e2e/test_adapters.py": (
        r"company\[(?!overlap-16-True-1-3)",
        r"test_(over_http|loading_and|bad_loads|drafts|split|prefixes\w+\[(block|hiradix))",
    ),
    "e2e/test_bench.py": (ALL,),
    "e2e/test_cached.py": (
        r"\[(radix-16|block-1|none-1)\b",
        r"\[none-16",
        r"test_(eviction_changes|shared_prefix_in_company)",
    ),
    "e2e/test_calls_or_format.py": (ALL,),
    # One SDK meets a real server in `make test`; what the routes of the others say is looked at without a server there.
    "e2e/test_clients_agents.py": (ALL,),
    "e2e/test_clients_anthropic.py": (ALL,),
    # tests/e2e/test_multimodal.py shows the answers, tests/plugins/*/test_media.py the routes.
    "e2e/test_clients_media.py": (ALL,),
    "e2e/test_clients_openai.py": (
        r"\[async",
        r"test_bad_requests\[True",
        r"test_(timeouts|many_at_once)",
        r"test_(cancelled|parsed|responses_call|results_of|the_stream_helper)",
    ),
    "e2e/test_clients_overflow.py": (ALL,),
    # Teaches a model and serves it for 15 s; what it shows is looked at without a server in `make test`.
    "e2e/test_served_formats.py": (ALL,),
    "e2e/test_correctness.py": (
        r"interpreted_triton",
        r"test_forced_logits_of_few",
        r"test_tiny\[((mistral|qwen2|qwen3)-transformers|(llama|qwen2)-dense)",
        r"test_tiny_through_transformers\[(gemma2-radix|gpt_neox)",
        r"test_more_through_transformers\[(gpt2|olmo2|phi3)",
        r"test_tiny\[mistral",
        r"test_tiny_through_transformers",
        r"test_more_through_transformers\[gpt_oss",
    ),
    "e2e/test_grammars.py": (r"\[xgrammar",),
    "e2e/test_jump_ahead.py": (
        r"\[(overlap|pages-chunks)",
        r"test_(aborted|retractions|a_failing|a_grammar_that)",
    ),
    "e2e/test_memory.py": (ALL,),
    # What stays has each value of each setting but the large pool; the native runner's overlays meet tests of its own.
    "e2e/test_multimodal.py": (
        r"\[triple",
        r"-hub\]",
        r"as_transformers\[qwen2_vl",
        r"test_the_native_runner",
        r"every_setting\[(7-1-|32-16-|0-16-)",
        r"as_transformers\[qwen3_vl-",
        r"test_drafts_behind",
        r"test_as_transformers\[qwen2_5",
        r"every_setting\[(?!0)",
        r"every_setting",
        r"test_(a_step_encodes|pictures_share)",
    ),
    # The settings of memory and loops meet each other under the policies that are used most; all in make test-full.
    "e2e/test_scheduling_matrix.py": (
        r"test_other_settings",
        r"\[(dfs-weight|lof|random|srtf|priority)-",
        r"test_every_pair\w+\[(?!fcfs)",
        r"test_every_pair",
    ),
    "e2e/test_sampling.py": (
        r"test_stop_regex\[(True-normal|False-overlap)",
        r"test_a_seed\w+runs_out\[normal",
        r"test_draws_follow\w+\[(?!.*top_k)",
        r"\[normal",
        r"normal\]",
        r"test_custom_processors",
    ),
    "e2e/test_schemathesis.py": (ALL,),
    "e2e/test_served_gates.py": (ALL,),
    "e2e/test_served_hooks.py": (ALL,),
    "e2e/test_served_native.py": (ALL,),
    "e2e/test_soak.py": (
        r"test_some_hundred_simulated\[(normal|overlap|few_rows)",
        r"test_some_hundred_simulated\[",
    ),
    # The same updates, and memory given back, are played without a server in e2e/test_weights.py.
    "e2e/test_served_weights.py": (ALL,),
    "e2e/test_third_party.py": (ALL,),
    "e2e/test_third_party_stages.py": (ALL,),
    "e2e/test_speculation_grammars.py": (
        r"\[0-tree",
        r"test_same_answers\[",
    ),
    "e2e/test_speculation_native.py": (ALL,),
    "e2e/test_vllm_fields.py": (ALL,),
    # Games of the plugin, and the suite of the runner on windows, stay.
    "e2e/test_windows.py": (r"test_answers_are",),
    "e2e/test_wanted.py": (
        r"\[(chunks|split|no-cache|tight|mixed-pages)\b(?!-overlap)",
        r"chunks-overlap-(cls|mean)",
        r"test_retractions",
    ),
    # ---- faults -----------------------------------------------------------------------------------------------------
    # The same faults, around a scheduler without a model, are in core/server/test_serve.py.
    "faults/test_served_faults.py": (ALL,),
    "faults/test_served_http.py": (ALL,),
    "faults/test_products.py": (ALL,),
    "faults/test_bad_checkpoints.py": (
        r"test_depth_bombs_in_(options\[value|files\[yaml)",
        r"test_memory_is_counted_anew",
        r"test_nonsense_is_named\[.*[02468]\]",
        r"test_json_that_cannot\w+\[.*[02468]\]",
        r"test_so_it_is",
        r"\[.*[13579]\]",
        r"test_(nonsense_is_named|json_that_cannot|indices|sizes_that)\w*\[(?!.*\b(0|bomb|digits|cut)\b)",
    ),
    "faults/test_bodies.py": (
        r"test_(what_the_engine_refuses_is_forgotten|four_senders|the_heaviest|bodies_that_never_end)",
        r"test_bodies_hold_no_room",
        r"test_(honest_bodies|values_are_counted)\w*\[(?!ids|/generate)",
        r"test_deep_nesting\w+\[\{",
    ),
    "faults/test_nothing_is_unpickled.py": (r"test_cve_2025_32444",),
    "faults/test_grammar_faults.py": (ALL,),
    "faults/test_helper_accidents.py": (ALL,),
    "faults/test_front.py": (
        r"test_(unfinished_handshakes|idle_connections_make)",
        r"test_(a_head_that_does_not_end|connections_are_bounded_while)",
        r"test_(whatever_the_host_with|probes_have)",
        r"test_a_rid_is",
        r"test_helpers_inherit",
    ),
    "faults/test_media_faults.py": (
        r"::test_(?!the_api_process)",
        r"test_",
    ),
    # ---- the server and the engine ----------------------------------------------------------------------------------
    "core/server/test_serve.py": (
        r"test_a_scheduler_that_(ends\w+\[[89]|is_stopped|raves)",
        r"test_(stopped_while_loading|drain_is_bounded|connections_are_bounded|a_port_is_taken|a_server_without)",
        r"test_failing_starts_say_why\[build_(badly|nothing|and_die)",
        r"test_scheduler_does_not_outlive",
        r"test_a_full_queue",
        r"test_(a_scheduler_that_ends|says_how)",
        r"test_listens_on_loopback",
    ),
    "core/server/test_operation.py": (
        r"test_ready_while_there_is",
        r"test_(silent_connections|wrong_files)",
        r"test_https_from",
    ),
    "toolkit/model/test_dtypes.py": (r"test_the_demo_is_no_float32",),
    "plugins/grammar/test_pool.py": (
        r"test_(slow_grammars_do_not_hold_up|one_that_gave_way|one_that_is_not_wanted)",
        r"test_(a_matcher_that_hangs|one_that_never_ends)\w*\[(?!1)",
        r"test_whoever_waits_too_long",
        r"test_(several_work|the_queue_is|a_grammar_comes)",
    ),
    "plugins/stop_expressions/test_stop_expressions.py": (
        r"test_ends_where_re_says",
        r"test_streams_show_the_same",
    ),
    "toolkit/chat/test_rendering.py": (
        r"test_helpers_end\w+\[at rest",
        r"test_time_is_bounded\[\{\{ x",
        r"test_(helpers_end|time_is_bounded)",
        r"test_cve_2025_61620",
    ),
    "core/server/test_pending.py": (r"test_nothing_is_kept",),
    "toolkit/speculation/test_distribution.py": (
        r"\[(top_p|min_p)\]",
        r"test_draw_and_match",
    ),
    "plugins/kv_handoff/test_handoff.py": (
        r"test_broken_hand_overs_are_noticed\[shared_before",
        r"test_any_traffic\w+\[(?![0-3]\b)",
        r"test_any_traffic\w+\[[0-3]-normal",
        r"test_broken_hand_overs",
    ),
    # Each kind of end meets chains or trees here.
    "plugins/speculation/test_verify.py": (
        r"test_an_end_within_what_was_accepted\[\d-(stop-chain|stop_token_ids-tree|length-tree)",
        r"test_an_end_within",
        r"test_same_tokens_whatever\w+\[[13579]",
        r"test_drafts_never_push",
    ),
    "plugins/media/test_media.py": (
        r"alone\[(page_size|chunk=7-(ample|tight)|chunk=32-page_size=16-(ample|tight)|cache)",
        r"alone\[.*=(overlap|True)-ample",
        r"alone\[chunk=16-split_prefill_layers=2-ample",
        r"test_the_same_tokens_as_alone\[(?!chunk=16)",
    ),
    "plugins/media/frontend/test_fetch.py": (
        r"test_(answers_that_are_no_answers\[(hea|tra)|no_tls_where)",
        r"test_slow_ones\w+\[(?!body)",
        r"answers\[continue",
    ),
    "plugins/media/frontend/test_prepare.py": (
        r"test_(one_accident|two_are)\w*\[1[59]",
        r"test_one_that_nothing_waits_for",
        r"test_(one_that_takes\w+\[hang\]|a_helper_makes_way|helpers_that_cannot_start\[start[02])",
        r"test_(what_is_refused_unread|a_request_with_many|the_queue_is)",
        r"test_(one_accident|two_are)",
        r"test_one_that_(takes|was_killed)",
    ),
    "plugins/tracing_otel/test_served.py": (ALL,),
    # Kernels of experts, and gpt-oss' codes without a GPU, are in toolkit/kernels and plugins/quantization.
    "plugins/model_transformers/test_coded.py": (r"test_experts_stay_codes",),
    "core/pipeline/test_group_company.py": (r"test_all_at_once\[[3-7]-",),
    "plugins/linear_triton/test_conformance.py": (r"\[float16\]",),
    "toolkit/kernels/test_experts.py": (r"\[cpu-False-",),
    "plugins/profiler/test_profiler.py": (r"test_a_process_may_end",),
    "core/cli/test_main.py": (
        r"test_check_(runs_the_suite_and_matrix|as_json)",
        r"test_nothing_heavy\w+\[arguments[1-9]",
        r"test_a_pipe",
    ),
    # ---- the kit and the tools --------------------------------------------------------------------------------------
    "conformance/test_check.py": (
        r"test_(without_pytest|a_built_in|one_that_hardly|a_failing_test_of)",
        r"test_a_class\w+\[(lost|foreign)",
        r"test_(a_plain_speculator|what_stands_beside|the_class_of_the_record|a_broken_one|nothing_to_check)",
        r"test_one_that_refuses",
        r"test_a_class\w+\[odd",
        r"test_a_class_that\w+\[bad",
    ),
    "conformance/test_suite.py": (
        r"test_collection_errors",
        r"test_one_that_passes_after_all",
        r"TestExpectedFailures",
        r"test_(one_broken|gpu_tests)",
    ),
    "benchmarks/test_roofline.py": (
        r"test_the_loops_run",
        r"test_a_table\w+\[None",
        r"test_a_table",
    ),
    "docs/test_chat_md.py": (r"test_it_passes",),
    "benchmarks/test_peers.py": (r"test_(a_stopped_comparison|a_server_and_its_children|children_that_outlive)",),
    "conformance/test_pytest_plugin.py": (
        r"test_(workers_send|assertions_of)",
        r"test_verdicts\[",
        r"test_a_class_that_cannot",
        r"test_a_pytest_without",
    ),
    "tools/lab/test_lab.py": (
        r"test_cache_aware_policies_beat_fcfs_on_hit_rate\[\d-dfs",
        r"test_(the_same_run|pictures_without|everybody\w+\[chat)",
        r"test_(drafts_are_accepted|everybody_is_served\w+\[|cache_aware_policies)",
        r"test_(no_torch|equal_first|adaptive)",
    ),
    "tools/bench/test_serve.py": (
        r"test_(a_capacity_is_found|a_server_that_does_not_answer)",
        r"test_(an_open_loop|all_at_once|one_that_is_too_slow|no_rate_is_kept)",
        r"TestFindRate",
        r"TestFaults",
    ),
    "tools/lab/test_tiers.py": (
        r"test_a_host_pool_brings\w+\[write_(back|through_selective)",
        r"test_(a_host_pool|hits_by\w+\[[3-9])",
        r"test_the_command",
    ),
    "tools/train_draft/test_run.py": (ALL,),
    "tools/chat/test_command.py": (r"test_ctrl_c_",),
    "tools/batch/test_command.py": (r"test_stopped_and_resumed",),
    # ---- suites: each runs for every provider of a plugin, and some tests take a second each time -------------------
    "conformance/test_builtins.py": (
        # The same routes with a model that takes media, whose bodies have fields of their own.
        r"Test_api_(anthropic|native|ollama)_\w+_with_media::test_(?!wrong_types|models_with|spelled)",
        r"Test_api_openai_openai::test_odd_values\w+\[(long text|deeper|deep objects|many)",
        # The same tests meet KV over TCP.
        r"Test_transfer_inproc_inproc::",
        r"Test_api_openai_openai_with_media::",
        # Each page size meets the machine in two classes, each policy of eviction meets it once.
        r"Test_cache_(block_block|hiradix_hiradix)::test_any_sequence_of_calls_agrees_with_a_dict\[",
        r"Test_cache_radix_radix::test_any_sequence_of_calls_agrees_with_a_dict\[(1|16)\]",
        r"Test_cache_radix_radix_\w+::",
        # The machine of the plugin's own tests does more.
        r"Test_cache_hiradix_hiradix_\w+::",
        r"Test_logits_basic_(min_new_tokens|logit_bias)::test_(?!follows|it_)",
        r"Test_logits_custom_(dry_in_a_short_range|bad_words|allowed_token_ids)::",
        r"Test_logits_\w+::test_(a_row_depends|drafts_count)",
        r"Test_parsers_reasoning_(deepseek_r1|qwen3|hunyuan|granite)::",
        # The other classes read text with the same shared readers; make test-full cuts these texts, too.
        r"Test_parsers_tools_(mistral\w*|deepseek_v3_of_v31|pythonic|llama3_json|hermes)::test_how_the_text_is_cut",
        r"Test_parsers_tools_(deepseek_v3|glm_of_47|minimax_m2|deepseek_v32|kimi_k2|granite|hunyuan|olmo3)::",
        r"Test_parsers_tools_(harmony|glm)::test_(how_the|imports|every_|a_named|forced_|nothing_is_lost|text_|without)",
        r"Test_parsers_tools_(mistral\w*|deepseek_v3_of_v31|pythonic|llama3_json)::test_imports",
        r"Test_parsers_tools_\w+::test_the_work_is_in",
        # Variants of a policy share most of its code; what is theirs alone is looked at by make test-full.
        r"Test_policy_basic_(random|lof|srtf|priority_without_\w+)::",
        r"Test_policy_basic_(fcfs|priority)::test_(order_is|victims_are|the_cost)",
        r"Test_policy_cache_aware_lpm_without\w+::test_(order_is_a_perm|victims_are_a_perm|arguments_stay|the_cost_grows)",
        r"Test_policy_cache_aware_dfs_weight::",
        r"Test_spec_ngram_ngram_\w+::",
        r"Test_transfer_inproc_inproc::test_(a_lost|many|large|\w*read_before\w+\[small)",
        r"Test_transfer_tcp_tcp::test_(\w*read_before\w+\[large|a_peer_that_goes|after_its_end\w+\[(?!384-0.0\]))",
    ),
    "conformance/test_builtins_that_compute.py": (
        # Qwen3-VL's mixture of experts stays.
        r"Test_model_dense_dense::\w+\[(qwen2_vl|qwen2_5_vl|qwen3_moe|mixtral|mistral|qwen3_vl)[-\]]",
        r"Test_model_transformers_transformers::\w+\[(qwen3_moe|mixtral|mistral|qwen2)[-\]]",
        r"Test_model_transformers_transformers::\w+\[(olmo|gpt|phi|stablelm|starcoder|cohere|glm)",
        r"Test_runner_layered_layered_on_windows::",
        r"Test_sampler_torch_torch::\w+over_a_large_vocabulary\[(top_p, a wide|all four|top_k 1500|min_p|temp)",
        r"Test_sampler_torch_torch::test_rounding\w+\[top_k",
    ),
    # A class that is not registered; the registered one is in test_builtins.py.
    "plugins/cache_radix/test_conformance.py": (ALL,),
    # The fields are the same on both sides.
    "plugins/disagg/test_conformance.py": (
        r"TestPrefill::test_nonsense",
        r"test_nonsense_in_a_field",
    ),
    "plugins/spec_eagle/test_heads.py": (
        r"test_whatever_happens\[tight\]",
        r"test_every_head\[(?!.*(eagle3|one))",
        r"test_whatever_happens\[(?!tight_16)",
        r"test_whatever_happens",
    ),
    # "No epoch" and others stay; these take a second and more.
    "plugins/cache_hiradix/test_machine_mutants.py": (ALL,),
    "plugins/cpu_native/test_conformance.py": (
        r"Test(Qwen2|Qwen3|Mistral)::",
        r"Test(SmallHeads|OneThread)::",
    ),
    # The best instruction set of the machine is compiled by `make setup`; each of the others takes a compiler 15 s.
    "plugins/cpu_native/test_accuracy.py": (
        r"test_every_instruction_set",
        r"test_error_is_that_of_bf16\[mistral",
        r"test_error_is_that_of_bf16\[(?!qwen3)",
    ),
    # Qwen3-VL and its mixture of experts stay: between them they have all that the others have, but for their order of
    # axes, with which the layered runner is tested.
    "plugins/model_dense/test_demo.py": (r"test_logits_equal",),
    "plugins/model_dense/test_towers.py": (r"test_without_media\[\w+-(True-(new|old)|False)",),
    "plugins/parsers_tools/test_models.py": (r"test_an_answer_that_ends_anywhere",),
    # llguidance meets every format; xgrammar, which takes longer to compile, meets one of JSON and one of tags.
    "plugins/parsers_tools/test_formats.py": (
        r"TestGrammars::test_(every_shape|references|a_backend)\w+\[xgrammar-(?!HermesParser|XmlParser)",
        r"\[xgrammar",
    ),
    "plugins/policy_cache_aware/test_policies.py": (r"test_a_deep_chain",),
    "plugins/api_openai/test_media.py": (r"test_pictures_do_not_outlive\w+\[/v1/resp",),
    "plugins/test_media_fuzz.py": (
        r"test_contents\[(messages|responses)",
        r"test_contents",
    ),
    "plugins/mm_qwen_vl/test_videos.py": (r"test_500\w+\[qwen2",),
    # The MoE's tower is that of Qwen3-VL, and Qwen2-VL's has no part that is not in another.
    "plugins/mm_qwen_vl/test_encoder_conformance.py": (r"Test(Qwen2VL|Qwen3VLMoe)::",),
    "plugins/mm_qwen_vl/test_encoder.py": (
        r"test_(many_sizes|every_weight|memory|other_towers\[(?!levels|blocks-of-n))",
    ),
    # Every shape of batch stays with one size; the interpreter of Triton needs a second for each.
    "plugins/attn_triton/test_compile.py": (r"test_compiles",),
    "plugins/attn_triton/test_supports.py": (r"test_interpreter_turned_on",),
    "plugins/api_native/test_profiling.py": (r"test_traces_and_json_logs",),
    # One of each kind stays: the interpreter takes its time, and all draws are compared with those of another sampler.
    "plugins/sampler_triton/test_conformance.py": (
        r"over_a_large_vocabulary|rounding_of_the_logits|not_depend_on_the_batch|test_uniform|test_ties_at_a_cut\[3000",
        r"test_(distribution|forbidden\w+|last_resorts\w+|one_finite\w+|huge\w+)\[(?!.*all four\]|top_p 0.6\])",
        r"test_(steps_of|neighbouring|only_diff|filters_that)|no_token\[[03]",
    ),
    "plugins/sampler_triton/test_mutants.py": (ALL,),
    "plugins/metrics_prometheus/test_served.py": (ALL,),
    "plugins/attn_triton/test_conformance.py": (
        r"test_(windows|layers)_of_a_batch\[cpu-decode\]",
        r"test_windows_of_a_batch\[cpu-ragged\]",
        r"test_kv_groups\[cpu-decode\]",
        r"test_grouped_heads\[cpu-(9-3|4-4)\]",
        r"test_reads_only_own_slots\[cpu-(\w+-16|decode-1)\]",
        r"test_page_sizes\[cpu-\w+-16\]",
        r"test_window\[cpu-(2|7|16)\]",
        r"test_neighbours_do_not_matter\[cpu-decode\]",
        r"test_any_batch",
        r"test_eight_bit\[cpu-(decode-e5m2|ragged-e4m3)\]",
        r"test_each_layer_has_its_scales\[cpu-ragged\]",
        r"test_nan_stays_nan\[cpu-(decode-e5m2|ragged-e4m3)\]",
        r"test_common_prefix(_or_not|_over_layers|\[cpu-(1-1|64-320))",
        r"test_fixed_(sizes|between_others)",
        r"test_(fixed_\w+|any_trees|long|trees_over_layers|head_dims\[cpu-(?!64)|trees\[(?!cpu-0))",
        r"test_(kv_groups|layers_of|common_prefix|trees_\w+|long_window|window\[|logit_cap\[|reads_only|scale\[)",
        r"test_grouped_heads\[cpu-(?!6-2)",
        r"test_every_number\[cpu-e4m3",
        r"test_window_cap",
        r"test_(leaves_its_inputs|windows_count\w+\[cpu-3|neighbours|sinks|large_scores|strided|each_layer)",
    ),
    # ---- what shows that suites catch mistakes, and further settings ------------------------------------------------
    **dict.fromkeys((f"mutants/{path.name}" for path in sorted((HERE / "mutants").glob("test_*.py"))), (ALL,)),
    "benchmarks/test_accuracy.py": (r"test_tiny_models",),
    "benchmarks/test_overlap.py": (r"test_the_overlap_loop",),
    "conformance/test_unusual_providers.py": (r"test_a_union_of_grammars",),
    "plugins/operator_controls/test_controls.py": (
        r"test_the_collector_leaves",
        r"test_requests_go_on\w+\[[2468]",
    ),
    "plugins/speculation/test_device.py": (r"test_states_and_entries\w+\[(?!0)",),
    "plugins/speculation/test_machine.py": (r"test_any_order",),
    "core/pipeline/test_company.py": (
        r"test_all_at_once\[(?!\d\b|1\d\b)",
        r"test_all_at_once\[(?![0-5]\b)",
    ),
    "plugins/media/test_media_machine.py": (ALL,),
    "faults/test_adapter_churn.py": (ALL,),
    "plugins/adapters/test_slots.py": (r"test_nobody_waits_for_ever\[(?!0)",),
    "core/pipeline/test_packing.py": (
        r"test_one_with_bad_extras\w+\[(a long array|the model raises-(decodes in|draft)|.*-normal\])",
    ),
    "core/pipeline/test_scheduler.py": (r"test_storm",),
    "plugins/stop_expressions/test_regex_matcher.py": (r"test_ends_where_re_says",),
    "plugins/http_guard/test_protocol.py": (r"test_(slow_answers|a_body_that_nobody|the_next_request)",),
    "plugins/media/test_client_media.py": (r"TestEnds",),
    "toolkit/system/test_stop_signals.py": (r"test_(a_log_that|a_program_goes|they_are_heard)",),
    "plugins/kv_handoff/test_staging_mutants.py": (ALL,),
    # Each format has its suite in `make test`, and two go through a whole engine.
    "plugins/quantization/test_libraries.py": (r"test_gpt_oss",),
    "plugins/quantization/test_refused.py": (
        r"test_(codes_|a_scale_(that|of)|inputs|a_column|a_matrix|groups|other_formats|config_check)",
    ),
    "plugins/quantization/test_served.py": (
        r"test_logits_are\w+\[(?!fp8 blocks\])",
        r"test_(answers_are|a_config_in|a_part_that|experts_are|over_http|through_transformers|native_runner)",
    ),
    "drills/test_gate.py": (r"test_nonsense",),
    "e2e/test_graph_matrix.py": (r"test_few",),
    "e2e/test_server.py": (r"test_(leavers|api_process_stays)",),
    "e2e/test_speculation_judging.py": (r"test_lower_thresholds",),
    "e2e/test_speculation_matrix.py": (r"test_some_settings\[(?!0|fcfs-normal)",),
    "e2e/test_tiers_matrix.py": (
        r"test_some_settings\[write_back",
        r"test_two_ranks",
        r"test_some_settings",
    ),
    "faults/test_grammar_bounds.py": (
        r"test_(outputs_are_the_same\w+\[(?!0)|surprises|one_that_sits_out)",
        r"test_another_owner",
    ),
    "faults/test_tiers.py": (r"test_(damaged_and|redis_that)",),
    "plugins/attn_flashinfer/test_conformance.py": (r"TestFlashInfer::",),
    "plugins/attn_flashinfer/test_mutants.py": (ALL,),
    "plugins/attn_triton/test_far.py": (r"test_where_it_lies\[(?!0)",),
    "plugins/attn_triton/test_served.py": (r"test_a_prefix_is_told",),
    "plugins/attn_triton/test_tiles.py": (
        r"test_more_requests",
        r"test_lists_are",
    ),
    "plugins/disagg/test_machine.py": (r"test_(long_walks|whatever_happens\[(?!0))",),
    "plugins/disagg/test_network.py": (
        r"test_an_idle_connection",
        r"test_(a_peer_that|a_server_that)",
    ),
    "plugins/disagg/test_share_reads.py": (r"test_what_other_ranks\w+\[.*\b[2-9]\b",),
    "plugins/sampler_triton/test_sampler.py": (r"test_(of_equal_logits|neither_tiles)",),
    "plugins/spec_eagle/test_conformance.py": (
        r"TestEagleChains::",
        r"test_(other_rows|nothing_is_learnt|work_on)",
    ),
    "plugins/storage_files/test_conformance.py": (
        r"test_(a_crash_amid|calls_may_meet)",
        r"test_many_keys",
    ),
    "plugins/storage_files/test_interleavings.py": (
        r"test_at_once\[(?!set and delete|two clear)",
        r"test_at_once\[two clear",
    ),
    "plugins/storage_mooncake/test_conformance.py": (r"TestOverAFake::",),
    # The suite meets files in make test.
    "plugins/storage_redis/test_conformance.py": (ALL,),
    "plugins/transfer_mooncake/test_conformance.py": (r"TestOverAFake::",),
    "plugins/transfer_nixl/test_conformance.py": (r"TestOverAFake::",),
    "tools/bench/test_local.py": (ALL,),
    "tools/plugins/test_new.py": (ALL,),
    "toolkit/test_device_audit.py": (r"test_one_copy\w+\[normal",),
    "core/pipeline/test_loads.py": (r"test_any_traffic\w+\[(?![0-3]\b)",),
    "core/pipeline/test_memory.py": (r"test_runs_and_short\w+\[(?![01]\b)",),
    "plugins/attn_triton/test_launches.py": (
        r"test_neighbours\w+\[0",
        r"test_neighbours",
    ),
    "plugins/grammar_llguidance/test_backend.py": (r"test_fill_and_accept_agree",),
    "plugins/mm_qwen_vl/test_bad_files.py": (r"test_every_bad_file",),
    "plugins/transfer_tcp/test_tcp.py": (
        r"test_a_hello_has",
        r"test_silent_strangers",
    ),
    "e2e/test_disagg_matrix.py": (r"test_(what_decode_has|hidden_states|a_speculator|a_request_that)",),
    "e2e/test_kv_dtype.py": (r"test_(files_of_one|keys_without|prefill_and)",),
    "e2e/test_tiers_restart.py": (
        r"test_models_share",
        r"test_salts_share",
    ),
    "core/server/test_supervisor.py": (r"test_silence_counts",),
    "plugins/http_guard/test_connections.py": (r"test_answers_that_(are_read|nobody\w+\[6)",),
    "fakes/test_speculators.py": (r"TestTrees::",),
    "drills/test_drafts.py": (
        r"TestTrees::",
        r"TestChains::",
    ),
    "examples/test_shapes.py": (r"test_few_pictures",),
    "faults/test_routes_and_keys.py": (r"test_26789_a_key\w+\[server\d*[13579]-",),
    "plugins/api_native/test_administration.py": (r"test_freeze_gc",),
    "plugins/cpu_native/test_contention.py": (r"test_answers",),
    "plugins/cpu_native/test_fused_sampling.py": (r"test_the_same_answers",),
    # The suite of both backends; the one that is the default runs it in make test.
    "plugins/grammar_xgrammar/test_backend.py": (
        r"test_(fill_and|a_refused|json_schema|rollback|matchers_|filling|whoever|a_row_is|its_size)",
    ),
    "plugins/mm_qwen_vl/test_processor_conformance.py": (r"TestQwen25::",),
    "plugins/model_dense/test_kernels.py": (
        r"\[qwen3-False",
        r"test_as_in_torch_over",
        r"test_as_in_torch",
    ),
    # The suite of the contract has each family in make test.
    "plugins/model_transformers/test_served.py": (ALL,),
    "plugins/parsers_tools/test_calls_or_format.py": (r"(Pythonic|Llama|Mistral|DeepSeek)Parser",),
    "plugins/storage_redis/test_redis.py": (r"test_a_server_that_is_silent",),
    "plugins/test_body_fields.py": (
        r"False-",
        r"responses",
    ),
    "core/pipeline/test_sources.py": (
        r"test_broken_sources",
        r"test_a_lost_step\w+\[(?!mixed-overlap|split-normal)",
    ),
    # Both sources of the plugin meet both loops in make test, and every moment of an end in make test-full.
    "plugins/prefill_in_parts/test_conformance.py": (
        r"test_(nothing_is_held|steps_that_fail)\w*\[(?!1-1-overlap|2-7-normal|2-2-normal|1-5-overlap)",
    ),
    "toolkit/http/test_keys.py": (r"test_the_environment_takes\w+\[(?!a#b|true)",),
    "tools/lab/test_media.py": (ALL,),
    "benchmarks/test_attacks.py": (r"grammar_slow",),
    "plugins/model_sources/test_gguf.py": (r"test_concurrent_starters",),
    "e2e/test_encoded_media.py": (r"\[qwen3_vl",),
    "conformance/test_fakes.py": (r"TestEmptyCache::",),
    "plugins/memory_host/test_conformance.py": (r"TestQueued\w+::",),
}

SOAK: dict[str, tuple[str, ...]] = {
    # Each policy of eviction meets the machine with one size of pages in make test-full.
    "conformance/test_builtins.py": (
        r"Test_cache_(radix_radix|hiradix_hiradix)_\w+::test_any_sequence_of_calls_agrees_with_a_dict\[(?!16\])",
    ),
    "benchmarks/test_accuracy.py": (r"test_the_demo_model",),
    "benchmarks/test_multimodal.py": (r"test_all_of_it_runs",),
    "benchmarks/test_speculation.py": (r"test_a_head_is_measured",),
    # The largest; the same suites meet the examples of the docs in make test-full.
    "tools/plugins/test_new.py": (
        r"test_a_new_package_conforms\[(sampler|attention|kv_storage|prefix_cache|schedule_policy|logits_p|token_a|kv_pool)",
        r"test_a_new_package_conforms\[(speculator|api|tool|reasoning|pooler|model_source)",
    ),
    "plugins/speculation/test_machine.py": (r"test_any_order\[(?!0)",),
    "plugins/speculation/test_verify.py": (r"test_an_end_within\w+\[(?!1-(stop-tree|length-chain))",),
    "e2e/test_abort_storm.py": (r"test_storm\[(?!overlap-radix-1)",),
    # Few prompts with one cache in make test and one checkpoint per family; the interpreter of Triton runs one family.
    "e2e/test_correctness.py": (
        r"test_(all_prompts|short_answers_to_all)",
        r"test_forced_logits_of_all_prompts",
        r"test_demo_with_interpreted_triton",
        r"test_tiny_with_interpreted_triton\[(llama|qwen2|mistral)\]",
        r"test_tiny_with_interpreted_triton\[qwen3",
    ),
    # Each backend answers to some schemas in make test-full.
    "e2e/test_grammars.py": (r"test_(two_hundred|a_hundred)",),
    "e2e/test_memory.py": (r"test_flat_over", r"test_demo_model_stays"),
    "e2e/test_multimodal.py": (
        r"test_the_same_in_every_setting\[triple",
        r"test_the_native_runner\w+\[normal",
    ),
    # Pairs of settings meet in make test-full.
    "e2e/test_scheduling_matrix.py": (r"test_every_triple",),
    "e2e/test_soak.py": (r"^(?!.*test_some_hundred_simulated)",),
    "e2e/test_third_party.py": (r"test_all_conform",),
    "e2e/test_tiers_matrix.py": (r"test_every_triple",),
    # A server answers to as many in make test-full.
    "examples/test_shapes.py": (r"test_(three_hundred|other_pictures)",),
    "examples/test_shapes_served.py": (r"test_three_hundred",),
    "faults/test_disagg_attacks.py": (r"test_a_thousand_connections\[data",),
    "faults/test_disagg_faults.py": (r"test_some_cells",),
    "faults/test_media_faults.py": (r"test_memory_is_flat",),
    "faults/test_products.py": (
        r"test_every_pair_of_fields\w+\[(generate|completions|embeddings|responses|encode)",
        r"test_pairs_of_fields\w+\[generate",
    ),
    "plugins/attn_triton/test_compile.py": (r"test_compiles\[128 bf16\]",),
    "plugins/attn_triton/test_conformance.py": (
        r"test_any_larger_(batch|trees)",
        r"TestSplitTriton::test_(fixed_matrix\[cpu-(1-|64)|fixed_(layers|between)|matrix\[.*-1\]|common_prefix_matrix\[.*16)",
        r"TestTriton::test_fixed_matrix\[cpu-1-",
        r"TestSplitTriton::test_(any_batch|common_prefix_or)",
        r"TestTriton::test_matrix\[.*-1\]",
        r"TestSplitTriton::test_fixed_(extends_matrix\[(?!cpu-torch.float32-\(9)|matrix|extends_between)",
        r"TestTriton::test_fixed_extends_matrix\[(?!cpu-torch.float16-.*-1\])",
        r"TestSplitTriton::test_(grouped_heads\[cpu-(?!6-2)|reads_only|window\[|head_dims\[cpu-(?!64))",
    ),
    # As a GPU session rehearses it; its parts are tested one by one.
    "benchmarks/test_gpu.py": (r"test_all_of_it_runs",),
    "core/pipeline/test_company.py": (r"test_some_seeds\[(?!100)",),
    "core/pipeline/test_gaps.py": (r"in_company\[computes_the_newest",),
    "core/pipeline/test_sources.py": (r"test_each_of_many\w+\[(?!100)",),
    "plugins/cache_hiradix/test_machine.py": (r"test_twenty_thousand\[(?!tight slru|storages, tight)",),
    "plugins/cpu_native/test_sampling.py": (
        r"test_every_token_of_a_large\w+\[.*-1",
        r"large_vocabulary\w+\[\w+-49163",
    ),
    "plugins/disagg/test_machine.py": (r"test_longer_walks",),
    # What the interpreted kernels compute is in the others; the layered runner has all of these tests in make test.
    "plugins/model_dense/test_kernels.py": (
        r"InKernels::test_(taps_change|states_(of|under|stay)|deep_states|an_overlay|operations|keeps|order|decodes)",
        r"InKernels::test_(mixed|ragged|token_by|in_chunks|sharded)",
    ),
    "plugins/sampler_triton/test_conformance.py": (
        r"test_a_draw_does_not_depend_on_the_batch",
        r"test_(distribution_over_a_large|rounding)\w+\[(?!all four)",
    ),
    "plugins/storage_files/test_interleavings.py": (
        r"test_at_once\[(two clear more|three delete|the first two write beside)",
    ),
    "tools/lab/test_lab.py": (
        r"test_nobody_waits_longer\w+\[[12]",
        r"test_cache_aware_policies\w+\[[1-9]",
    ),
    "tools/train_draft/test_run.py": (
        r"test_signals\[9",
        r"test_signals",
    ),
    "core/server/test_serve.py": (r"test_a_server_that_gives_up",),
    "e2e/test_speculation_grammars.py": (r"two_hundred",),
    "e2e/test_speculation_matrix.py": (
        r"triple_of_settings\[chain-.*(roomy|overlap)|triple_of_settings\[tree-.*page_16-roomy",
        r"triple_of_settings\[\w+-[\d.]+-(lof|random)-normal-chunk_(off|256)",
        r"triple_of_settings\[\w+-[\d.]+-priority-normal-chunk_256",
    ),
    "faults/test_seeds_in_any_batch.py": (r"test_few_seeded",),
    # core/server/test_serve.py has the same around a scheduler without a model.
    "faults/test_served_faults.py": (r"test_drains\[Ctrl", r"test_(more_than_may_wait|clients_that_neither)"),
    "faults/test_grammar_faults.py": (r"test_many_grammars\w+\[xgrammar",),
    # Each tower with today's names, and one with those of hubs.
    "plugins/mm_qwen_vl/test_encoder.py": (
        r"test_memory_grows",
        r"test_many_sizes\w+\[(qwen\w+-old|(qwen2_vl|qwen3_vl|qwen3_vl_moe)-hub)",
    ),
    "plugins/model_sources/test_gguf_full.py": (r"test_weights_are_equal",),
    "plugins/spec_eagle/test_heads.py": (r"test_in_kernels",),
    "e2e/test_served_native.py": (r"test_(a_turn_is|sessions_outlive|a_pause)\w+\[normal",),
    "e2e/test_schemathesis.py": (r"test_a_whole_server",),
}


def is_left_out(path: Path, markers: str) -> bool:
    """Tell whether the marker expression `markers` leaves out the whole file at `path`: by `FULL`, or by the file's own
    pytestmark. So nothing is imported of which nothing would run.
    """
    if not path.is_relative_to(HERE) or path.suffix != ".py":
        return False
    out = set(re.findall(r"\bnot (\w+)", markers))
    if "full" in out and ALL in FULL.get(path.relative_to(HERE).as_posix(), ()):
        return True
    found = WHOLE_FILE.search(path.read_text(encoding="utf-8")) if out else None
    return found is not None and not out.isdisjoint(re.findall(r"\bpytest\.mark\.(\w+)", found[0]))


def mark(items: list[pytest.Item]) -> None:
    """Give each test the markers of its tier."""
    for marker, table in ((pytest.mark.full, FULL), (pytest.mark.soak, SOAK)):
        patterns = {HERE / name: re.compile("|".join(some)) for name, some in table.items()}
        for item in items:
            pattern = patterns.get(item.path)
            if pattern is not None and pattern.search(item.nodeid):
                item.add_marker(marker)
