# serve_load.sh DIRECTORY NAME [arguments of pegboard serve]: one server, closed loops of 1, 8, 64 and 256 streams, a line each.
#
# Environment: ISL, OSL (1024, 128), STREAMS ("1 8 64 256"), PORT, LIMIT (seconds a load may take). All files go into $OUT/serve.tgz. The
# server is ended by its process id.
directory=$1 name=$2
shift 2
port=${PORT:-31000} files=/tmp/serve
mkdir -p $files
begin=$(date +%s.%N)
python3 -m pegboard serve --set model.path="$directory" --set server.port="$port" --set model.served_name="$name" "$@" \
  > "$files/$name.log" 2>&1 &
server=$!
load() { # load FILE arguments
  local file=$1
  shift
  timeout "${LIMIT:-90}" python3 -m pegboard bench serve --url "http://127.0.0.1:$port" "$@" > "$files/$file.txt" 2>&1
}
if ! LIMIT=150 load "$name.first" --wait 150 --num-prompts 1 --input-len 8 --output-len 4 --concurrency 1; then
  tail -20 "$files/$name.log"
  kill $server
  exit 1
fi
python3 -c "import time; print(f'$name: first answer after {time.time() - $begin:.1f} s')"
grep -E 'KV gets|graphs:|ready after' "$files/$name.log" | cut -c1-200
seed=0
for streams in ${STREAMS:-1 8 64 256}; do
  seed=$((seed + 1)) # no load finds prompts of an earlier one in the prefix cache
  count=$((streams == 1 ? 4 : streams * 2))
  load "$name.$streams" --seed $seed --concurrency "$streams" --num-prompts $count --input-len "${ISL:-1024}" --output-len "${OSL:-128}" \
    --json "$files/$name.$streams.json" || echo "$name: $streams streams failed, or took more than ${LIMIT:-90} s"
  python3 benchmarks/gpu/load_row.py "$files/$name.$streams.json" "$name" "$streams"
done
kill $server
wait $server 2> /dev/null
[ -z "${OUT:-}" ] || tar czf "$OUT/serve.tgz" -C /tmp serve
