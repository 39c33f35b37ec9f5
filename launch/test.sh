#!/usr/bin/env bash
# Sets up if needed and runs the tests; arguments go to pytest. GPU tests run if there is a GPU.
#
#   bash launch/test.sh -m "not slow"           without the slow ones: kills, stalls, tutorials
#   bash launch/test.sh -m gpu                  only those that need a GPU
#   bash launch/test.sh tests/run -x            one folder, up to the first failure
#   bash launch/test.sh -n 0                    in one process; without a GPU, four run files side by side by default
#   bash launch/test.sh -h                      pytest's own options
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
[ "${1:-}" != --help ] || { usage; exit; }
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
unset PYTHONDONTWRITEBYTECODE  # of hundreds of processes, each would compile the package again
side_by_side=()
if ! nvidia-smi >/dev/null 2>&1 && "$PYTHON" -c "import xdist" 2>/dev/null; then
    # Many tests wait for processes: on two cores four take 9 minutes. In the order of names, files with a
    # few long tests (the first hour, the wheel) come before those of tests/tools; by default they would come last.
    side_by_side=(-n 4 --dist loadfile --no-loadscope-reorder)
fi
exec "$PYTHON" -m pytest ${side_by_side[@]+"${side_by_side[@]}"} "$@"
