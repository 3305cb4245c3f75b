#!/bin/sh
# The GPU check of CA-SGD: tests of the mark gpu, then measurements of the back end, in at most 8 minutes on one GPU.
#
#   sh tests/gpu/casgd_check.sh [OUT]
#
# Needs a Python with cupy (14.2 or newer) and its CUDA libraries, ml_dtypes and pytest; PYTHON names another one than
# python3. CUDA's libraries may be pip's: pip install 'cupy-cuda13x[ctk]' ml_dtypes pytest. The part "nccl" needs
# nvidia-nccl-cu13 (or -cu12); "two_ranks" needs mpi4py and an MPI library with mpiexec beside that Python or in PATH:
# pip install mpi4py mpich. Without them these parts are named as not run, and the rest decides.
#
# Results go to OUT/casgd.json (default: tests/gpu/results), with what missed its limits under "failed". The exit status
# is 0 only if every test passed and no part missed a limit. One GPU cannot show the speed-up of a cluster: that needs
# two or more GPUs joined by NCCL.
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
# Without conftest.py, which may want more than is promised above.
timeout 130 "$python" -m pytest -q -s -p no:cacheprovider --override-ini addopts=--import-mode=importlib --noconftest \
    -m gpu tests/gpu/test_casgd_gpu.py || status=$?
timeout 345 "$python" tests/gpu/casgd_check.py "$out" --seconds 320 || status=$?
exit $status
