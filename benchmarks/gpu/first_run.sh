# The first run on a GPU machine without an index, in about 3 minutes (171 s on an H100): does it run, is it right, where does the time go.
#
#   make gpu-wheels, then there, in the repository's root: bash benchmarks/gpu/first_run.sh
#
# Each part has its own limit, and none depends on another. Everything is kept in $OUT, by default /tmp/out.
export OUT=${OUT:-/tmp/out} OMP_NUM_THREADS=1
mkdir -p "$OUT"
. benchmarks/gpu/site.sh || exit 1
clock() { echo "--- $(date +%T) $*"; }
nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.max.sm --format=csv,noheader
python3 -c 'import numpy, torch, transformers, triton; print(torch.__version__, triton.__version__, transformers.__version__, numpy.__version__)'
clock 'smoke and pytest, beside each other'
timeout 150 python3 -m benchmarks.gpu.smoke --only '^(?!.*trial)' > "$OUT/smoke.txt" 2>&1 &
smoke=$!
timeout 170 make gpu-test GPU_PYTHON=python3 PYTEST_ARGS="-q -n 12 --timeout 90 --maxfail 60 -k 'not any_'" > "$OUT/pytest.txt" 2>&1 &
tests=$!
wait $smoke
grep -E '^(ok|FAIL)|Error' "$OUT/smoke.txt" | cut -c1-400
wait $tests
tail -30 "$OUT/pytest.txt" | cut -c1-200
clock 'smoke: memory by trial'
timeout 60 python3 -m benchmarks.gpu.smoke --only trial > "$OUT/trial.txt" 2>&1
grep -E '^(ok|FAIL)|KV gets|graphs:' "$OUT/trial.txt" | cut -c1-300
clock 'a decode step, by kernel'
timeout 80 python3 -m benchmarks.gpu.profile_step 2>&1 | tee "$OUT/profile.txt" | cut -c1-130
clock 'attention'
timeout 70 python3 -m benchmarks.gpu.tune_attn mixed prefill 2>&1 | tee "$OUT/tune.txt" | cut -c1-150
clock 'sections'
timeout 90 python3 -m benchmarks.gpu --json "$OUT/bench.json" --only environment correctness waiting sampling 2>&1 | tee "$OUT/bench.txt"
clock 'done'
