# The third run on a GPU machine without an index, in about 9 minutes: FlashInfer's kernels beside ours, loads, all tests.
#
#   make gpu-wheels FLASHINFER=0.7.2.post1; then there, in the repository's root: bash benchmarks/gpu/third_run.sh
#
# What needs no processors of the host runs while FlashInfer's kernels are compiled; what is timed over HTTP waits for
# that. Each part has its own limit, and none depends on another. Everything is kept in $OUT, by default /tmp/out.
export OUT=${OUT:-/tmp/out} OMP_NUM_THREADS=1 MAX_JOBS=12
mkdir -p "$OUT"
. benchmarks/gpu/site.sh || exit 1
clock() { echo "--- $(date +%T) $*"; }
large=/dev/shm/large small=/dev/shm/small
nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.max.sm --format=csv,noheader
clock 'compiling, beside it models, prefills, a device that fails'
timeout 300 python3 -m benchmarks.gpu --section attention > "$OUT/attention_cold.txt" 2>&1 &
compiling=$!
python3 -m benchmarks.gpu.make_model qwen3-0.6b $small
python3 -m benchmarks.gpu.make_model llama-8b $large
timeout 100 python3 -m pytest -p no:cacheprovider -o filterwarnings=default -q -m gpu --timeout 90 tests/e2e/test_gpu_engine.py -k anew > "$OUT/anew.txt" 2>&1
tail -15 "$OUT/anew.txt" | cut -c1-200
timeout 60 python3 -m benchmarks.gpu.profile_prefill $large 1024 2048 8192 > "$OUT/prefill_large.txt" 2>&1
grep wall "$OUT/prefill_large.txt"
timeout 60 python3 -m benchmarks.gpu --only eight_bit 2>&1 | tee "$OUT/eight_bit.txt"
clock 'compiled?'
wait $compiling
clock 'attention'
timeout 110 python3 -m benchmarks.gpu --json "$OUT/attention.json" --only environment attention 2>&1 | tee "$OUT/attention.txt"
clock 'served'
LIMIT=40 STREAMS="1 64 256" bash benchmarks/gpu/serve_load.sh $small 0.6b
LIMIT=40 STREAMS=64 bash benchmarks/gpu/serve_load.sh $large apart-8192 --set scheduler.mixed_chunk=false --set scheduler.chunked_prefill_size=8192
LIMIT=40 STREAMS=64 bash benchmarks/gpu/serve_load.sh $large mixed-2048 --set scheduler.mixed_chunk=true --set scheduler.chunked_prefill_size=2048
clock 'kernels by ncu'
ncu=$(command -v ncu || ls /usr/local/cuda*/bin/ncu 2> /dev/null | head -1)
[ -z "$ncu" ] || timeout 40 "$ncu" --clock-control none --set full -k 'regex:decode|prefill|attention' -c 2 python3 -m benchmarks.gpu.tune_attn decode > "$OUT/ncu.txt" 2>&1
[ ! -f "$OUT/ncu.txt" ] || grep -E 'Duration|Throughput|Occupancy|ERR' "$OUT/ncu.txt" | head -20
clock 'all tests'
timeout "${TESTS:-200}" make gpu-test GPU_PYTHON=python3 PYTEST_ARGS="-q -n 14 --timeout 120 --maxfail 60 --deselect tests/e2e/test_gpu_engine.py::test_a_device_that_fails_is_started_anew" > "$OUT/pytest.txt" 2>&1
tail -30 "$OUT/pytest.txt" | cut -c1-200
clock 'done'
