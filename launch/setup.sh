# Sourced by the other launchers: sets $PYTHON, an interpreter with moba_train and its dependencies.
#
#   MOBA_PYTHON=/path/to/python   use this interpreter and install nothing (for a prepared image or cluster module)
#   MOBA_VENV=/path/to/venv       where the virtual environment lives; default .venv in the repository
#
# With FOR=run, set by the launcher that sources this file, packages for development and tests are not installed.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"

if [ -n "${MOBA_PYTHON:-}" ]; then
    PYTHON=$MOBA_PYTHON
    export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
else
    VENV=${MOBA_VENV:-$ROOT/.venv}
    PYTHON=$VENV/bin/python
    stamp=$VENV/.moba_train_installed
    wanted=$(cat pyproject.toml launch/constraints.txt launch/setup.sh | cksum)
    installed=$(cat "$stamp" 2>/dev/null || true)
    if [ "$installed" != "$wanted dev" ] && [ "$installed" != "$wanted ${FOR:-dev}" ]; then
        base=
        for candidate in python3 python3.13 python3.12 python3.11; do
            if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
                base=$candidate
                break
            fi
        done
        if [ -z "$base" ]; then
            echo "error: no Python 3.11 or newer on the PATH (MOBA_PYTHON names one elsewhere)" >&2
            exit 2
        fi
        system=() constraints=() extras=()
        [ "${FOR:-dev}" = run ] || extras=(dev)
        if "$base" -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
            system=(--system-site-packages)  # the image's own CUDA build of torch
        elif ! nvidia-smi >/dev/null 2>&1; then
            constraints=(-c launch/constraints.txt)
            [ "${FOR:-dev}" = run ] || extras+=(interpreter)
        fi
        echo "installing into $VENV (once; a few minutes)"
        wished=$(IFS=,; echo "${extras[*]:+[${extras[*]}]}")
        "$base" -m venv ${system[@]+"${system[@]}"} "$VENV"
        "$PYTHON" -m pip install --quiet ${constraints[@]+"${constraints[@]}"} --editable ".$wished"
        echo "$wanted ${FOR:-dev}" >"$stamp"
    fi
fi
# Several ranks share one machine; without this limit, each would start a thread on every core.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
