#!/usr/bin/env bash
# Makes the pictures and figures of docs/policy-lab.md and docs/tiers.md. About two minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
PEGBOARD=${PEGBOARD:-.venv/bin/pegboard}

echo "## shared prefixes"
$PEGBOARD simulate shared-prefix:groups=64,system=2048,question=128,output=256 \
  --requests 2000 --rate 60 --cost h200-8b --set memory.max_total_tokens=80000 \
  --run "fcfs: scheduler.policy.use=fcfs" \
  --run "lpm: scheduler.policy.use=lpm scheduler.policy.fallback_above=0" \
  --run "lpm, fall-back at 128: scheduler.policy.use=lpm" \
  --run "dfs-weight: scheduler.policy.use=dfs-weight scheduler.policy.fallback_above=0" \
  --png docs/images/lab-shared-prefix.png

echo "## priorities"
$PEGBOARD simulate random:input=1024,output=256,spread=0.5,urgent=0.85 \
  --requests 3000 --rate 30 --cost h200-8b --set memory.max_total_tokens=60000 --no-optimal \
  --run "fcfs: scheduler.policy.use=fcfs" \
  --run "priority, no aging: scheduler.policy.use=priority scheduler.policy.aging=null" \
  --run "priority, aging 3 s: scheduler.policy.use=priority scheduler.policy.aging=3" \
  --png docs/images/lab-priority.png

echo "## tiers: the host's size, on a GPU"
$PEGBOARD simulate chat:turns=6,think=60 --requests 1500 --rate 12 --cost h200-8b \
  --set memory.max_total_tokens=60000 --set memory.page_size=16 --set prefix_cache.use=hiradix \
  --run "host 30k: memory.host.max_total_tokens=30000" \
  --run "60k: memory.host.max_total_tokens=60000" \
  --run "120k: memory.host.max_total_tokens=120000" \
  --run "240k: memory.host.max_total_tokens=240000" \
  --run "300k: memory.host.max_total_tokens=300000" \
  --run "60k + write_back: memory.host.max_total_tokens=60000 prefix_cache.write_policy=write_back" \
  --run "120k + write_back: memory.host.max_total_tokens=120000 prefix_cache.write_policy=write_back" \
  --png docs/images/lab-tiers.png

echo "## tiers: the same memory in other ways, on a CPU"
$PEGBOARD simulate chat:turns=6,think=60,systems=8,question=128,output=48 --requests 600 --rate 0.8 \
  --set memory.page_size=16 \
  --run "device 12k: memory.max_total_tokens=12000 prefix_cache.use=radix" \
  --run "12k + host 24k: memory.max_total_tokens=12000 prefix_cache.use=hiradix memory.host.max_total_tokens=24000" \
  --run "device 36k: memory.max_total_tokens=36000 prefix_cache.use=radix" \
  --run "12k + host 24k + files: memory.max_total_tokens=12000 prefix_cache.use=hiradix memory.host.max_total_tokens=24000 memory.storage=[files] gates=[prefetch]" \
  --run "30k + host 6k + files: memory.max_total_tokens=30000 prefix_cache.use=hiradix memory.host.max_total_tokens=6000 memory.storage=[files] gates=[prefetch]" \
  --png docs/images/lab-tiers-cpu.png
