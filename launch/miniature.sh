#!/usr/bin/env bash
# Runs a recipe of configs/recipes/mini from scratch: long-range text, tokenizer, corpus, training, evaluation.
# sft-1m also needs the model of continue-1m, which is trained first, and conversations about such text, and sft-agents
# that of short-then-long. Takes minutes on one GPU. After an interruption, the same command continues where it stopped. docs/reference/recipes.md explains each step.
#
#   bash launch/miniature.sh NAME [--corpus FILE_OR_FOLDER] [KEY.PATH=VALUE]...      default: Python's standard library
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
name=${1:-}
[ "$name" != --help ] || { usage; exit; }
recipes=$(dirname "${BASH_SOURCE[0]}")/../configs/recipes/mini
[[ -n $name && $name != */* && -f $recipes/$name.yaml ]] ||
    refuse "no miniature '$name'; allowed: $(cd "$recipes" && ls | sed 's/[.]yaml$//' | xargs)"
shift
corpus=
if [ "${1:-}" = --corpus ]; then
    [ -n "${2:-}" ] || refuse "--corpus needs a file or folder"
    [ -e "$2" ] || refuse "--corpus: $2 does not exist"
    corpus=$(realpath "$2")
    shift 2
fi
FOR=run source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source launch/corpus.sh

recipe=configs/recipes/mini/$name.yaml
resolved=$("$PYTHON" -m moba_train.tools.cli config "$recipe" "$@")  # wrong keys are refused before data is prepared
run=$("$PYTHON" -c 'import sys, yaml; print(yaml.safe_load(sys.stdin)["run_dir"])' <<<"$resolved")

data=runs/mini/data
ranks=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() or 1)')
moba_data=("$PYTHON" -m data_tools)
moba_train=("$PYTHON" -m moba_train.tools.cli)
choose_corpus "$data"
[ -e "$data/text.jsonl" ] ||
    "${moba_data[@]}" long-range --input "$corpus" ${select[@]+"${select[@]}"} --output "$data/text.jsonl" \
        --documents 1500 --characters 150000
[ -e "$data/tokenizer.model" ] ||
    "${moba_data[@]}" train-tokenizer --input "$corpus" ${select[@]+"${select[@]}"} --vocab-size 4096 \
        --output "$data/tokenizer.model"
[ -e "$data/corpus-valid.idx" ] ||
    "${moba_data[@]}" tokenize --input "$data/text.jsonl" --tokenizer "$data/tokenizer.model" \
        --output "$data/corpus" --holdout 0.03
[ -e "$data/short.idx" ] ||
    "${moba_data[@]}" tokenize --input "$corpus" ${select[@]+"${select[@]}"} --tokenizer "$data/tokenizer.model" \
        --output "$data/short"

conversations() {  # NAME DOCUMENTS CHARACTERS QUESTIONS [READS]
    [ -e "$data/sft-$1-train.idx" ] && return
    "${moba_data[@]}" long-range --input "$corpus" ${select[@]+"${select[@]}"} --output "$data/sft-$1.jsonl" \
        --documents "$2" --characters "$3" --questions "$4" --reads "${5:-0}"
    "${moba_data[@]}" sft --input "$data/sft-$1.jsonl" --tokenizer "$data/tokenizer.model" --output "$data/sft-$1" \
        --holdout 0.05 ${5:+--max-tokens 32768}
}
if [ "$name" = sft-agents ]; then
    [ -e runs/mini/short-then-long/evaluation ] || bash launch/miniature.sh short-then-long
    conversations agents 300 50000 3 8
fi
if [ "$name" = sft-1m ]; then
    [ -e runs/mini/continue-1m/evaluation ] || bash launch/miniature.sh continue-1m
    conversations short 8000 1500 1
    conversations medium 1000 20000 5
    conversations long 300 80000 20
fi

"${moba_train[@]}" plan "$recipe" "$@" --gpus "$ranks"
"${moba_train[@]}" train "$recipe" "$@" --gpus "$ranks"
"${moba_train[@]}" eval "$run" --output "$run/evaluation"
echo "logs $run/metrics.jsonl, charts $run/report.html and $run/evaluation/evaluation.html"
