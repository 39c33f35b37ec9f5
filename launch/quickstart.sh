#!/usr/bin/env bash
# The main job in miniature, on real text, on CPU or GPU: tokenizer, corpus, two training stages (short with full
# attention, then longer with MoBA, each sequence on two ranks), a stop and a resume half-way, evaluation, a sample and a report.
#
#   bash launch/quickstart.sh [--corpus FILE_OR_FOLDER]      default: the sources of Python's standard library
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
corpus=
while [ $# -gt 0 ]; do
    case $1 in
        --help) usage; exit ;;
        --corpus)
            [ -n "${2:-}" ] || refuse "--corpus needs a file or folder"
            [ -e "$2" ] || refuse "--corpus: $2 does not exist"
            corpus=$(realpath "$2")
            shift 2
            ;;
        *) refuse "unknown argument $1; allowed: --corpus FILE_OR_FOLDER" ;;
    esac
done
FOR=run source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source launch/corpus.sh

run=runs/quickstart
recipe=configs/recipes/quickstart.yaml
ranks=$("$PYTHON" -c 'import torch; print(min(2, torch.cuda.device_count()) or 2)')
moba_train=("$PYTHON" -m moba_train.tools.cli)
moba_data=("$PYTHON" -m data_tools)
overrides=()
[ "$ranks" -ge 2 ] || overrides=(stages.1.parallel.cp=1)  # one GPU: no second rank to share a sequence with
train=("${moba_train[@]}" train "$recipe" --gpus "$ranks"
    ${overrides[@]+"${overrides[@]}"})
step() { printf '\n== %s\n' "$*"; }
choose_corpus "$run/data"

step "1/7  tokenizer, from $corpus"
[ -e "$run/data/tokenizer.model" ] ||
    "${moba_data[@]}" train-tokenizer --input "$corpus" --output "$run/data/tokenizer.model" --vocab-size 2048 \
        ${select[@]+"${select[@]}"}

step "2/7  tokens, into $run/data"
[ -e "$run/data/corpus-valid.idx" ] ||
    "${moba_data[@]}" tokenize --input "$corpus" --tokenizer "$run/data/tokenizer.model" --output "$run/data/corpus" \
        ${select[@]+"${select[@]}"} --holdout 0.02

step "3/7  training on $ranks ranks, as far as the middle of the second stage"
"${moba_train[@]}" plan "$recipe" ${overrides[@]+"${overrides[@]}"} --gpus "$ranks"
"${train[@]}" --stop-at-step 118

step "4/7  the same command again: it resumes from the checkpoint"
"${train[@]}"

step "5/7  evaluation of the last checkpoint"
"${moba_train[@]}" verify "$run"
"${moba_train[@]}" eval "$run"

step "6/7  a sample"
"${moba_train[@]}" generate "$run" --prompt 'def ' --max-new-tokens 120 --temperature 0.7 --top-p 0.9

step "7/7  the report: one HTML file, with no need for a network"
"${moba_train[@]}" report "$run"

step "done"
cat <<EOF
report       $run/report.html
logs         $run/metrics.jsonl   (with telemetry.wandb.mode=offline or online also in wandb)
checkpoints  $run/checkpoints
recipe       $recipe, resolved: $run/config.yaml
EOF
