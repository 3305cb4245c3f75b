#!/bin/sh
# The GPU check: tests of the mark gpu, then real cells of four models, in at most 8 minutes on one CUDA GPU.
#
#   sh tests/gpu/check.sh [OUT]
#
# Needs a Python with torch (for CUDA), cupy, pandas, pyarrow and pytest; PYTHON names another one than python3. Results
# go to OUT (default: tests/gpu/results): timings.parquet and results.md.
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
timeout 150 "$python" -m pytest -q -s -p no:cacheprovider --override-ini addopts=--import-mode=importlib -m gpu tests/gpu || status=$?
timeout 330 "$python" tests/gpu/measure_cells.py "$out" 300 || status=$?
exit $status
