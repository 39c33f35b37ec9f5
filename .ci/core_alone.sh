#!/usr/bin/env bash
# The core alone: a copy of the tree without mechanisms, tools and what is built on them trains the quick start's recipe
# with torchrun, resumes it, and passes the tests that need nothing else.
source "$(dirname "${BASH_SOURCE[0]}")/../launch/setup.sh"
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git ls-files -z --cached --others --exclude-standard |
    grep -zvE '^(moba_train/(mechanisms|tools)|data_tools|experiments|tests/(mechanisms|tools|data_tools|benchmarks|experiments))/|^benchmarks/[^/]*$' |
    xargs -0 cp --parents --no-dereference -t "$copy"
cp --parents data_tools/__init__.py data_tools/corpus_writer.py "$copy"  # the tests make their corpora with it

data=$copy/runs/quickstart/data
mkdir -p "$data"
"$PYTHON" -m data_tools train-tokenizer --input moba_train --output "$data/tokenizer.model" --vocab-size 2048
"$PYTHON" -m data_tools tokenize --input moba_train --tokenizer "$data/tokenizer.model" --output "$data/corpus" --holdout 0.05

cd "$copy"
# An environment of its own, which has the packages of the other one but not its editable installation of the tree.
"$PYTHON" -m venv --without-pip .venv
alone=$copy/.venv/bin/python
"$PYTHON" -c 'import site; print(*site.getsitepackages(), sep="\n")' \
    >"$("$alone" -c 'import site; print(site.getsitepackages()[0])')/packages.pth"
export PYTHONPATH=$copy
train=("$alone" -m torch.distributed.run --standalone --nproc-per-node 2 -m moba_train.train configs/recipes/quickstart.yaml
    stages.0.tokens=80K stages.1.tokens=80K)
"${train[@]}" --stop-at-step 25
"${train[@]}" | tee resumed
grep -q "resumed from the checkpoint of step 25" resumed
"$alone" - <<'PYTHON'
import sys
import moba_train.train
from moba_train.attention.moba import moba_kind, moba_local  # as a recipe names them
ours = [name for name in sys.modules if name.startswith("moba_train")]
others = [name for name in ours if name.startswith(("moba_train.mechanisms", "moba_train.tools"))]
print(f"train.py and MoBA load {len(ours)} modules")
assert len(ours) <= 200 and not others, others
assert "torch._dynamo" not in sys.modules, "0.6 s of the start-up of commands that compile nothing"
PYTHON
"$alone" -m pytest -q -n 3 --dist loadfile -m "not slow" tests "$@" | tee tested
passed=$(sed -nE 's|(.* )?([0-9]+) passed.*|\2|p' tested)
[ "${passed:-0}" -ge 2850 ] || { echo "only ${passed:-0} tests of the core passed; allowed: 2850 and more" >&2; exit 1; }
