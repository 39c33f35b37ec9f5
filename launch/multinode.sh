#!/usr/bin/env bash
# Trains on several nodes: run the same line on each of them (or let Slurm do it, see slurm.sbatch).
#
#   NODES=4 NODE_RANK=0..3 MASTER=node0 bash launch/multinode.sh RECIPE.yaml [key.path=value ...] [--from-scratch]
#
# NODES        number of nodes                              default 1
# NODE_RANK    this node's number, 0 on MASTER              default 0
# MASTER       host name of node 0                          default localhost; required with several nodes
# PORT         a free port on MASTER                        default 29500
# GPUS         ranks on this node                           default: all its GPUs
# RESTARTS     restarts before giving up; each resumes from the newest checkpoint   default 3
#
# Relative paths in recipes and overrides, such as run_dir, begin in the repository's folder.
# `python -m moba_train.train --help` lists the other arguments, such as --stop-at-step.
#
# SIGTERM and Ctrl-C on one node stop all of them in order, with a checkpoint: docs/how-to/resume.md, "How a run is stopped".
# Exits with 0, or with the code of this node's ranks, which docs/reference/exit-codes.md lists.
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
[ "${1:-}" != --help ] || { usage; exit; }
[ $# -ge 1 ] || refuse "no recipe; usage: NODES=N NODE_RANK=I MASTER=HOST bash launch/multinode.sh RECIPE.yaml [key.path=value ...]"
for name in NODES NODE_RANK PORT GPUS RESTARTS; do
    [[ ${!name:-0} =~ ^[0-9]{1,6}$ ]] || refuse "$name: given '${!name}'; allowed: a whole number up to 999999"
    [ -z "${!name:-}" ] || declare "$name=$((10#${!name}))"  # not octal
done
[ "${NODES:-1}" -ge 1 ] || refuse "NODES: given $NODES; allowed: 1 or more"
[ "${NODE_RANK:-0}" -lt "${NODES:-1}" ] ||
    refuse "NODE_RANK: given $NODE_RANK; allowed: 0 to NODES - 1, which is $((${NODES:-1} - 1))"
[ "${NODES:-1}" = 1 ] || [ -n "${MASTER:-}" ] || refuse "MASTER: not given; allowed: the host name of node 0"
[[ ${MASTER:-localhost} =~ ^[A-Za-z0-9:][A-Za-z0-9._:%-]*$ ]] ||
    refuse "MASTER: given '$MASTER'; allowed: a host name or an IP address"
[ "${PORT:-1}" -ge 1 ] && [ "${PORT:-1}" -le 65535 ] || refuse "PORT: given $PORT; allowed: 1 to 65535"
[ "${GPUS:-1}" -ge 1 ] || refuse "GPUS: given $GPUS; allowed: 1 or more"
recipe=$1
if [ -e "$recipe" ]; then  # relative to the caller's folder; all other paths are relative to the repository's
    [[ $recipe == /* ]] || recipe=$PWD/$recipe
elif [[ $recipe != -* ]]; then
    repository=$(dirname "${BASH_SOURCE[0]}")/..
    [ -e "$repository/$recipe" ] || [ -e "$repository/configs/recipes/$recipe.yaml" ] ||
        refuse "RECIPE: $recipe is neither in $PWD nor in the repository's folder, nor the name of a packaged recipe"
fi
shift
FOR=run source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$PYTHON" -m moba_train.tools.launch.torchrun \
    --nnodes "${NODES:-1}" --node-rank "${NODE_RANK:-0}" ${GPUS:+--nproc-per-node "$GPUS"} \
    --master-addr "${MASTER:-localhost}" --master-port "${PORT:-29500}" --max-restarts "${RESTARTS:-3}" \
    -m moba_train.train "$recipe" "$@"
