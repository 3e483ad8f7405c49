#!/usr/bin/env bash
# Makes the pictures and figures of docs/policy-lab.md. About a minute.
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
