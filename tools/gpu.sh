#!/usr/bin/env bash
# The GPU arms of tox.ini on a machine as it is: nothing is installed, kpool comes from this checkout.
#
#   tools/gpu.sh                      every numeric test on one GPU, the kernels compiled for it
#   tools/gpu.sh nccl                 the conformance scenarios on real NCCL ranks, two GPUs or more
#   tools/gpu.sh --collect-only -q    further words go to pytest
#
# Needs Python 3.11 or later (PYTHON names another than python3), torch 2.11 or later with CUDA, triton, and the packages
# it names if they are missing, none of which brings another torch. Left out: comparisons with one version of
# transformers (`hf`), the tests of the toolkit and of the packaging, which ask for an installed kpool and for no GPU,
# and those of the command line where a package of the extra `cli` or `plot` is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TRITON_INTERPRET=0

lacks() { # the packages of $@ that cannot be imported
    "$python" -c "
import importlib.util, sys
print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name.replace('-', '_')) is None))" "$@"
}

missing=$(lacks torch triton numpy pytest pytest-timeout hypothesis cloudpickle safetensors)
if [ -n "$missing" ]; then
    printf 'tools/gpu.sh: %s lacks %s\n' "$python" "$missing" >&2
    exit 2
fi

run=("$python" -m pytest)
if ! "$python" -c "import importlib.metadata as m, sys; sys.exit(not m.entry_points(group='pytest11', name='kpool_testing'))"; then
    run+=(-p kpool_testing.plugin) # pytest finds it by itself where kpool is installed
fi

if [ "${1:-}" = nccl ]; then
    shift
    exec "${run[@]}" --require-gpus 2 --ranks-backend=nccl --ranks-timeout 120 --timeout 600 -m nccl \
        tests/conformance "$@"
fi

run+=(--require-gpus 1 --timeout 900 --ignore=tests/testing --ignore=tests/test_packaging.py)
missing=$(lacks rich psutil matplotlib)
if [ -n "$missing" ]; then
    printf 'tools/gpu.sh: without the tests of the command line, for lack of %s\n' "$missing" >&2
    for file in bench captures cli plot report; do
        run+=("--ignore=tests/test_$file.py")
    done
fi
[ -n "$(lacks xdist)" ] || run+=(-n 4 --dist worksteal)
exec "${run[@]}" -m "not gloo and not nccl and not megatron and not aot and not slow and not soak and not hf" "$@"
