# The fourth run on a GPU machine without an index, in about 8 minutes: products with quantised weights, 8-bit KV.
#
#   make gpu-wheels FLASHINFER=0.7.2.post1; then there, in the repository's root: bash benchmarks/gpu/fourth_run.sh
#
# Each part has its own limit, and none depends on another. Everything is kept in $OUT, by default /tmp/out.
export OUT=${OUT:-/tmp/out} OMP_NUM_THREADS=1
mkdir -p "$OUT"
. benchmarks/gpu/site.sh || exit 1
clock() { echo "--- $(date +%T) $*"; }
tests() { # tests NAME SECONDS FOLDER options
  local name=$1 limit=$2 folder=$3
  shift 3
  timeout "$limit" make gpu-test GPU_PYTHON=python3 GPU_TESTS="$folder" PYTEST_ARGS="-rf $*" > "$OUT/$name.txt" 2>&1
  grep -E '^FAILED|^ERROR|passed|failed' "$OUT/$name.txt" | tail -12 | cut -c1-300
}
nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.max.sm --format=csv,noheader
clock 'checkpoints, and beside it the suite of products'
for kind in int4 fp8; do python3 -m benchmarks.gpu.make_model llama-8b /dev/shm/$kind --quantized $kind; done > "$OUT/make.txt" 2>&1 &
making=$!
tests products 110 tests/plugins/linear_triton -q -n 6
wait $making
clock '8-bit KV'
timeout 40 python3 -m benchmarks.gpu --only eight_bit 2>&1 | tee "$OUT/eight_bit.txt"
timeout 40 python3 -m benchmarks.gpu.tune_attn eight_bit_defaults 2>&1 | tee "$OUT/tune_eight_bit.txt"
clock 'products'
timeout 80 python3 -m benchmarks.gpu.tune_linear --tokens 1 16 64 2>&1 | tee "$OUT/linear.txt" | cut -c1-130
timeout 70 python3 -m benchmarks.gpu.tune_linear 'int4 128' 'e4m3 128x128' 'e2m1 16' --tokens 1 64 --sweep > "$OUT/sweep.txt" 2>&1
tail -1 "$OUT/sweep.txt"
clock 'served'
for kind in int4 fp8; do LIMIT=40 STREAMS="1" bash benchmarks/gpu/serve_load.sh /dev/shm/$kind $kind; done
clock 'tests of 8-bit attention, then of FlashInfer'
tests eight_bit_tests 60 tests/plugins/attn_triton -q -n 10 -k eight_bit
tests flashinfer "${TESTS:-150}" tests/plugins/attn_flashinfer -v -n 5
clock 'done'
