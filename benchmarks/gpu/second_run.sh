# The second run on a GPU machine without an index, in about 8 minutes: FlashInfer beside ours, first tokens, chunk sizes.
#
#   make gpu-wheels, FlashInfer's wheels beside them; then there, in the repository's root: bash benchmarks/gpu/second_run.sh
#
# Each part has its own limit, and none depends on another. Everything is kept in $OUT, by default /tmp/out.
export OUT=${OUT:-/tmp/out} OMP_NUM_THREADS=1 MAX_JOBS=12
mkdir -p "$OUT"
. benchmarks/gpu/site.sh || exit 1
clock() { echo "--- $(date +%T) $*"; }
large=/dev/shm/large small=/dev/shm/small
nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.max.sm --format=csv,noheader
clock 'compiling, models, tests, beside each other'
timeout 200 python3 -m benchmarks.gpu --section attention > "$OUT/attention_cold.txt" 2>&1 &
compiling=$!
(python3 -m benchmarks.gpu.make_model llama-8b $large && python3 -m benchmarks.gpu.make_model qwen3-0.6b $small) > "$OUT/models.txt" 2>&1 &
models=$!
timeout 170 make gpu-test GPU_PYTHON=python3 PYTEST_ARGS="-q -n 10 --timeout 120 --maxfail 60 -k 'not any_'" > "$OUT/pytest.txt" 2>&1
tail -30 "$OUT/pytest.txt" | cut -c1-200
wait $models $compiling
cat "$OUT/models.txt"
clock 'attention'
timeout 100 python3 -m benchmarks.gpu --json "$OUT/attention.json" --only environment attention 2>&1 | tee "$OUT/attention.txt"
clock 'a decode step, by kernel'
timeout 80 python3 -m benchmarks.gpu.profile_step 1 8 64 256 2>&1 | tee "$OUT/step.txt" | grep -v USDT | cut -c1-110
timeout 60 python3 -m benchmarks.gpu.profile_step --context 4096 64 2>&1 | tee "$OUT/step_4k.txt" | grep -E 'wall|decode|reduce'
timeout 60 python3 -m benchmarks.gpu.profile_step --shape qwen3-0.6b 1 2>&1 | tee "$OUT/step_small.txt" | grep -v USDT | cut -c1-110
clock 'first tokens'
timeout 60 python3 -m benchmarks.gpu.profile_prefill $small > "$OUT/prefill_small.txt" 2>&1
grep wall "$OUT/prefill_small.txt"
timeout 60 python3 -m benchmarks.gpu.profile_prefill $large 1024 2048 8192 > "$OUT/prefill_large.txt" 2>&1
grep wall "$OUT/prefill_large.txt"
clock 'served, by chunk size'
STREAMS=1 ISL=8 bash benchmarks/gpu/serve_load.sh $small 0.6b-short
for chunk in 8192 4096 2048; do
  LIMIT=40 STREAMS=64 bash benchmarks/gpu/serve_load.sh $large "mixed-$chunk" --set scheduler.mixed_chunk=true --set scheduler.chunked_prefill_size=$chunk
done
clock 'done'
