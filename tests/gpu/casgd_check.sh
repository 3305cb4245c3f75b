#!/bin/sh
# The GPU check of CA-SGD: tests of the mark gpu, then measurements of the back end, in at most 8 minutes on one GPU.
#
#   sh tests/gpu/casgd_check.sh [OUT]
#
# Needs a Python with cupy (14.2 or newer), ml_dtypes, scipy, scikit-learn, pytest, and for the parts with NCCL and MPI
# nvidia-nccl, mpi4py and mpich; PYTHON names another one than python3. Results go to OUT/casgd.json (default:
# tests/gpu/results). One GPU cannot show the speed-up of a cluster: that needs two or more GPUs joined by NCCL.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
out=${1:-"$root/tests/gpu/results"}
python=${PYTHON:-python3}
link=$(mktemp -d)
trap 'rm -rf "$link"' EXIT
ln -s "$root" "$link/precision_time"
# TF32 would make the FP32 baseline less exact and faster than it says.
export PYTHONPATH="$link${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1 CUPY_TF32=0
cd "$root"
status=0
timeout 100 "$python" -m pytest -q -s -p no:cacheprovider --override-ini addopts=--import-mode=importlib -m gpu \
    tests/gpu/test_casgd_gpu.py || status=$?
timeout 375 "$python" tests/gpu/casgd_check.py "$out" --seconds 350 || status=$?
exit $status
