#!/bin/sh
# The GPU check: the timed loop against a profiler and a plain loop, then real cells of four models, in at most 8
# minutes on one CUDA GPU. CA-SGD has a check of its own (casgd_check.sh).
#
#   sh tests/gpu/check.sh [OUT]
#
# Needs a Python with torch (for CUDA), pyarrow and pytest, as tests/gpu/test_check.py shows; PYTHON names another one
# than python3. Results go to OUT (default: tests/gpu/results): timings.parquet and results.md, written anew after each
# cell.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
out=${1:-"$root/tests/gpu/results"}
python=${PYTHON:-python3}
link=$(mktemp -d)
trap 'rm -rf "$link"' EXIT
ln -s "$root" "$link/precision_time"
export PYTHONPATH="$link${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
cd "$root"
status=0
timeout 90 "$python" -m pytest -q -s -p no:cacheprovider --override-ini addopts=--import-mode=importlib \
    tests/gpu/test_loop_on_gpu.py tests/gpu/test_trace.py || status=$?
timeout 390 "$python" tests/gpu/measure_cells.py "$out" 380 || status=$?
exit $status
