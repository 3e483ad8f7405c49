"""vLLM's engine with drafts or without, in its own environment and process, told what to do line by line.

    python in_vllm.py MODEL_DIRECTORY SPECULATIVE_CONFIG_AS_JSON_OR_NULL MAX_CONTEXT

Each line of standard input is a list of prompts (token ids) and a number of tokens; each line of standard output that
begins with `found ` has what came of it. It imports nothing of Pegboard.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def counters(engine: Any) -> dict[str, float]:
    """Return vLLM's counts of drafts."""
    names = {
        "vllm:spec_decode_num_drafts": "drafts",
        "vllm:spec_decode_num_draft_tokens": "drafted",
        "vllm:spec_decode_num_accepted_tokens": "accepted",
    }
    return {names[one.name]: one.value for one in engine.get_metrics() if one.name in names}


def main() -> None:
    import vllm

    speculation = json.loads(sys.argv[2])
    engine = vllm.LLM(
        model=sys.argv[1],
        dtype="bfloat16",
        max_model_len=int(sys.argv[3]),
        speculative_config=speculation,
        disable_log_stats=False,
        enable_prefix_caching=False,
    )
    print("ready", flush=True)
    for line in sys.stdin:
        prompts, tokens = json.loads(line)
        params = vllm.SamplingParams(temperature=0.0, max_tokens=tokens, detokenize=True)
        before, answers = counters(engine), []
        start = time.perf_counter()
        for prompt in prompts:
            (answer,) = engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            answers.append(list(answer.outputs[0].token_ids))
        seconds, after = time.perf_counter() - start, counters(engine)
        found = {"seconds": seconds, "answers": answers, **{key: after[key] - before.get(key, 0) for key in after}}
        print(f"found {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
