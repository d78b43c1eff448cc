#!/usr/bin/env bash
# Everything that needs a GPU, in one go: kernel tests, GPU tests, generate(), memory. Logs and results land in $OUT.
#
#   benchmarks/gpu_all.sh                        # all four, each under its own time limit
#   benchmarks/gpu_all.sh gpu generate           # some of: tests kernels gpu generate memory moe continuous profile
#   SHARDS=12 benchmarks/gpu_all.sh tests        # all GPU tests, in so many processes
#   GENERATE="--parts static graphs --batch 32" benchmarks/gpu_all.sh generate
#   CONTINUOUS="--parts soak" benchmarks/gpu_all.sh continuous
#
# A step that fails or runs out of time does not stop the next one. The exit status is the number of failed steps.
set -u -o pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-benchmarks/results}
PYTHON=${PYTHON:-python3}
GENERATE=${GENERATE:-}
CONTINUOUS=${CONTINUOUS:-}
mkdir -p "$OUT"
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TRANSFORMERS_VERBOSITY=error TOKENIZERS_PARALLELISM=false
failed=0
digest=$OUT/digest.txt
: >"$digest"

step() { # name, limit in seconds, lines for the digest, command
  local name=$1 limit=$2 lines=$3 start=$SECONDS status
  shift 3
  echo "== $name: $*"
  timeout --kill-after=10 "$limit" "$@" >"$OUT/$name.log" 2>&1
  status=$?
  [ "$status" -eq 0 ] || failed=$((failed + 1))
  {
    echo "== $name: exit $status after $((SECONDS - start)) s$([ "$status" -eq 124 ] && echo ' (time limit)')"
    tail -n "$lines" "$OUT/$name.log" | cut -c1-200
  } | tee -a "$digest"
}

wanted=${*:-kernels gpu generate memory}
nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.draw --format=csv,noheader | tee -a "$digest"
for name in $wanted; do
  case $name in
    tests)
      shards=${SHARDS:-8}
      # Others may need packages that a machine with a GPU does not have.
      mapfile -t files < <(grep -rlE 'mark\.gpu|MARKS' tests --include='test_*.py')
      for ((i = 0; i < shards; i++)); do
        step "tests-$i" 280 3 "$PYTHON" -m pytest -o addopts= -q -m gpu --shard "$i/$shards" --no-header -p no:cacheprovider --tb=long "${files[@]}" &
      done
      wait # what they counted as failed is theirs
      failed=$((failed + $(grep -c '^== tests-.*: exit [1-9]' "$digest")))
      grep -h '^FAILED' "$OUT"/tests-*.log | tee -a "$digest"
      ;;
    kernels) step kernels 150 14 "$PYTHON" -m pytest -q -x --no-header -p no:cacheprovider --durations=3 tests/kernels ;;
    gpu) step gpu 150 40 "$PYTHON" -m pytest -q -m gpu --no-header -p no:cacheprovider --tb=short --durations=5 tests/gpu ;;
    # shellcheck disable=SC2086
    generate) step generate 240 36 "$PYTHON" benchmarks/bench_generate.py --out "$OUT" --budget-s 200 $GENERATE ;;
    memory) step memory 120 26 "$PYTHON" benchmarks/bench_memory.py --out "$OUT" --budget-s 90 ;;
    moe) step moe 150 30 "$PYTHON" benchmarks/bench_moe.py --out "$OUT" --budget-s 60 --reps 5 --new-tokens 13 ;;
    # shellcheck disable=SC2086
    continuous) step continuous 590 30 "$PYTHON" benchmarks/bench_continuous.py --out "$OUT" --budget-s 480 $CONTINUOUS ;;
    profile) step profile 120 90 "$PYTHON" benchmarks/profile_step.py --out "$OUT" --budget-s 60 ;;
    *) echo "unknown step: $name"; exit 2 ;;
  esac
done
echo "== $failed step(s) failed; logs in $OUT"
exit "$failed"
