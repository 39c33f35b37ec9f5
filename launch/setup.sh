# Sourced by the other launchers: sets $PYTHON, an interpreter with moba_train and its dependencies.
#
#   MOBA_PYTHON=/path/to/python   use this interpreter and install nothing (for a prepared image or cluster module)
#   MOBA_VENV=/path/to/venv       where the virtual environment lives; default .venv in the repository, which must be
#                                 writable to be installed
#
# With FOR=run, set by the launcher that sources this file, packages for development and tests are not installed.
set -euo pipefail
CALLED_FROM=$PWD
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
source launch/usage.sh

is_new_enough() {  # PYTHON
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

is_installed() {  # in the virtual environment, with the versions wanted
    [ -x "$PYTHON" ] || return 1  # the environment, or the Python that it was made with, is gone
    installed=$(cat "$stamp" 2>/dev/null || true)
    [ "$installed" = "$wanted dev" ] || [ "$installed" = "$wanted ${FOR:-dev}" ]
}

install() {
    base=
    for candidate in python3 python3.13 python3.12 python3.11; do
        if is_new_enough "$candidate"; then
            base=$candidate
            break
        fi
    done
    [ -n "$base" ] || refuse "no Python 3.11 or newer on the PATH (MOBA_PYTHON names one elsewhere)"
    clear=() system=() constraints=() extras=()
    # An environment whose Python is gone: venv does not replace its links, unless it may clear the folder.
    [ -x "$PYTHON" ] || [ ! -e "$VENV/pyvenv.cfg" ] || clear=(--clear)
    extras=(wandb report)
    [ "${FOR:-dev}" = run ] || extras=(dev)
    if "$base" -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
        system=(--system-site-packages)  # the image's own CUDA build of torch
    elif ! nvidia-smi >/dev/null 2>&1; then
        constraints=(-c launch/constraints.txt)
        [ "${FOR:-dev}" = run ] || extras+=(interpreter)
    fi
    echo "installing into $VENV (once; a few minutes)"
    wished=$(IFS=,; echo "[${extras[*]}]")
    "$base" -m venv ${clear[@]+"${clear[@]}"} ${system[@]+"${system[@]}"} "$VENV" ||
        refuse "$VENV: no virtual environment can be made there; MOBA_VENV names another place"
    "$PYTHON" -m pip install --quiet ${constraints[@]+"${constraints[@]}"} --editable ".$wished" ||
        refuse "$VENV: pip has failed, see above; without a network, MOBA_PYTHON names a Python that has the packages"
    echo "$wanted ${FOR:-dev}" >"$stamp"
}

if [ -n "${MOBA_PYTHON:-}" ]; then
    PYTHON=$MOBA_PYTHON
    [[ $PYTHON != */* || $PYTHON == /* ]] || PYTHON=$CALLED_FROM/$PYTHON  # no folder: looked for on the PATH
    is_new_enough "$PYTHON" || refuse "MOBA_PYTHON: given '$MOBA_PYTHON'; allowed: a Python of 3.11 or newer"
    missing=$("$PYTHON" -c 'from importlib.util import find_spec as find
print(*(name for name in ("torch", "numpy", "pydantic", "yaml", "typer") if find(name) is None))')
    [ -z "$missing" ] || refuse "MOBA_PYTHON: given '$MOBA_PYTHON', which lacks $missing; allowed: a Python with \
the packages of pyproject.toml"
    export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
else
    VENV=${MOBA_VENV:-$ROOT/.venv}
    [[ $VENV == /* ]] || VENV=$CALLED_FROM/$VENV
    VENV=${VENV%/}  # the lock is beside it, not inside
    PYTHON=$VENV/bin/python
    stamp=$VENV/.moba_train_installed
    wanted=$(cat pyproject.toml launch/constraints.txt launch/setup.sh | cksum)
    if ! is_installed; then
        mkdir -p "$(dirname "$VENV")" && : >>"$VENV.lock" ||
            refuse "$VENV: cannot be written to; MOBA_VENV names another place, MOBA_PYTHON a Python that has all"
        (  # nodes that share the folder start at the same time
            if command -v flock >/dev/null; then flock 9; fi
            is_installed || install
        ) 9>>"$VENV.lock"
    fi
fi
# Several ranks share one machine; without this limit, each would start a thread on every core.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
