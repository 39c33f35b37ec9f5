#!/usr/bin/env bash
# Measures and checks on four GPUs of this machine: training of the 8B model at 8K and 128K, its checkpoints, and context
# parallelism. All of this has run on H100 or H200. A part that fails or takes too long does not keep the others from
# running; its name is printed last.
#
#   bash benchmarks/four_gpus.sh OUTPUT [PART ...]
#
# OUTPUT     folder for result files and logs; not benchmarks/results, where files have the same names
# PART       default: all of them, in this order; minutes as measured
#   8k         8B at 8K: FSDP, MoBA, tensor, context and pipeline parallelism, FP8, torchtitan where it is
#              installed; recomputes what GPUs of 80 GiB cannot keep                                               15
#   128k       8B at 128K over four ranks: full attention, MoBA, FP8, torchtitan                                   10
#   profile    where the time of a step with tp 2 and cp 2 goes                                                     1
#   layouts    8B checkpoints saved in one layout and resumed in the next; one of them (90 GiB) must fit into
#              $TMPDIR; in memory                                                                                   9
#   context    transports of context parallelism at 64K, 256K and 1M; an attention sink; a timeline                10
#   tests      transports against one GPU over NCCL, and 200 steps of changing documents                            4
source "$(dirname "${BASH_SOURCE[0]}")/../launch/usage.sh"
[ "${1:-}" != --help ] || { usage; exit; }
[ $# -ge 1 ] || refuse "no OUTPUT; usage: bash benchmarks/four_gpus.sh OUTPUT [PART ...]"
parts=("${@:2}")
[ $# -gt 1 ] || parts=(8k 128k profile layouts context tests)
for part in "${parts[@]}"; do
    case $part in 8k | 128k | profile | layouts | context | tests) ;; *)
        refuse "PART: given '$part'; allowed: 8k, 128k, profile, layouts, context, tests" ;;
    esac
done
output=$(realpath -m "$1")
[ "$output" != "$(realpath "$(dirname "${BASH_SOURCE[0]}")")/results" ] ||
    refuse "OUTPUT: given $1, which has results of the same names; allowed: another folder"
source "$(dirname "${BASH_SOURCE[0]}")/../launch/setup.sh"
gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
[ "$gpus" -ge 4 ] || refuse "four GPUs needed; torch finds $gpus on this machine"
mkdir -p "$output" || refuse "OUTPUT: $1 is no folder and cannot be made"
# NVIDIA H100 80GB HBM3: h100
gpu=$("$PYTHON" -c 'import torch; print(torch.cuda.get_device_name().removeprefix("NVIDIA ").split()[0].lower())')
set +e
failed=()
# Compiled code stays from call to call.
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-${TMPDIR:-/tmp}/torchinductor_$(id -u)}
TMPDIR=$(mktemp -d) || exit 1  # a program that takes too long leaves its folders behind, with checkpoints
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT

run() {  # SECONDS NAME MODULE ARGUMENTS...: a program of one process
    timed "$1" "$2" "$PYTHON" -m "${@:3}"
}

ranks() {  # SECONDS NAME MODULE ARGUMENTS...: a program of four ranks
    timed "$1" "$2" "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 4 -m "${@:3}"
}

timed() {  # SECONDS NAME COMMAND...
    local began=$SECONDS
    # torchrun takes 30 s to end its ranks; without it they would stay on the GPUs
    timeout --kill-after 60 "$1" "${@:3}" >"$output/$2.log" 2>&1
    local status=$?
    echo "$2: status $status, $((SECONDS - began)) s"
    [ $status = 0 ] || { failed+=("$2"); rm -rf "$TMPDIR"/tmp*; }
}

training() {  # NAME ROW...: rows are given up one by one before all of them are
    run $((150 * ($# - 1) + 60)) "$1" benchmarks.training --model llama3-8b --gpus 4 --row-seconds 150 \
        --output "$output/$1.json" --rows "${@:2}"
    tail -n $(($# + 3)) "$output/$1.log"
}

context() {  # NAME ARGUMENTS...
    ranks 400 "$1" benchmarks.context_parallel --ranks-per-node 2 --output "$output/$1.json" "${@:2}"
}

for part in "${parts[@]}"; do
    case $part in
    8k)
        training training-8b-8k-$gpu-x4 8K:full:none 8K:torchtitan:none 8K:full:none:fp8 8K:torchtitan:none:fp8 \
            8K:moba-512-3-last3:none 8K:moba-512-3-last3:none:fp8 \
            8K:full:budget:tp4:batch4:micro4 8K:full:budget:tp4:batch4:micro4:parallel.tp_overlap=true \
            8K:full:none:tp2:cp2:batch4:micro2 \
            8K:full:budget:pp4:batch32:micro1:warm2:steps3 \
            8K:full:budget:pp2:batch16:micro1:warm2:steps3
        ;;
    128k)
        moba=128K:moba-512-8:budget:cp4:parallel.cp_transport=allgather
        training training-8b-128k-rows-$gpu-x4 128K:full:full:cp4:warm1:steps2 128K:full:full:cp4:fp8:warm1:steps2 \
            128K:torchtitan:full:cp4:warm1:steps2 128K:torchtitan:full:cp4:fp8:warm1:steps2 $moba $moba:fp8
        ;;
    profile)
        ranks 200 training-profile-8b-tp2-cp2-$gpu-x4 benchmarks.training_profile --model llama3-8b \
            --row 8K:full:none:tp2:cp2:batch4:micro2 --output "$output/training-profile-8b-tp2-cp2-$gpu-x4.json"
        ;;
    layouts)
        run 3000 checkpoint-layouts-8b-$gpu-x4 benchmarks.checkpoint_layouts --model llama3-8b --gpus 4 --sequences 16 \
            --row-seconds 480 --rows 8K:full:full:micro1 8K:full:full:tp4:micro4 8K:full:full:tp2:cp2:micro2 \
            8K:full:full:pp4:micro1 8K:full:full:pp2:micro1 --output "$output/checkpoint-layouts-8b-$gpu-x4.json"
        tail -n 12 "$output/checkpoint-layouts-8b-$gpu-x4.log"
        ;;
    context)
        sparse=(--attention 512/8 4096/12)
        context context-parallel-$gpu "${sparse[@]}" --tokens 64K 256K --repeats 3
        context context-parallel-dense-$gpu --attention dense --alone-up-to 64K --tokens 64K 256K --layouts zigzag \
            --repeats 3
        context context-parallel-1m-$gpu "${sparse[@]}" --alone-up-to 64K --tokens 1M --layouts contiguous --repeats 2 \
            --warm-ups 1
        context context-parallel-1m-dense-$gpu --attention dense --alone-up-to 64K --tokens 1M --layouts zigzag \
            --transports ulysses ring allgather --repeats 1 --warm-ups 1
        ranks 200 context-skew-$gpu benchmarks.context_skew --output "$output/context-skew-$gpu.json"
        ranks 200 context-timeline-$gpu benchmarks.context_timeline --attention dense 4096/12 512/8 \
            --output "$output/context-timeline-$gpu.json"
        ;;
    tests)
        export MOBA_SOAK=${MOBA_SOAK:-200}
        run 900 context-tests pytest -s -m gpu tests/parallel/context/test_context_gpu.py -k between_gpus
        run 900 context-soak pytest -s -m gpu tests/parallel/context/test_context_gpu.py -k soak
        tail -n 3 "$output/context-tests.log" "$output/context-soak.log"
        ;;
    esac
done
[ ${#failed[@]} = 0 ] || { echo "failed: ${failed[*]}; their logs are in $output"; exit 1; }
