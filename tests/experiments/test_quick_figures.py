"""The smallest forms of the figures really train and evaluate, grow call by call, and are drawn."""

import json
from pathlib import Path

import pytest

from experiments import corpus
from experiments.__main__ import main


@pytest.mark.usefixtures("in_this_process")
def test_figures_train_their_smallest_form_and_grow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(corpus, "QUICK_TOKENS", 1 << 16)
    quick = ["--quick", "--gpus", "0", "--seconds", "1e6"]
    assert main(["trailing", *quick, "--arms", "full-tiny"]) == 0
    assert main(["trained-with", *quick, "--arms", "*-tiny"]) == 0  # the same arms, in the same file
    assert "1 arms held, 1 to run" in capsys.readouterr().out
    assert main(["granularity", *quick, "--arms", "keys-*"]) == 0

    trailing = json.loads(Path("runs/experiments/trailing-quick.json").read_text())
    full, moba = trailing["results"]["arms"]
    assert (full["name"], moba["name"]) == ("full-tiny", "moba-tiny")
    assert full["losses"][-1][1] < full["losses"][0][1]
    assert full["documents"] == "documents of the corpora"
    assert full["compute"]["6ND"] == moba["compute"]["6ND"]
    assert moba["compute"]["real"] < full["compute"]["real"]
    for arm in (full, moba):  # trained with one, run with both
        curves = arm["evaluations"]["both"]["position_wise"]["curves"]
        assert len(curves["full"]["mean"]) == len(curves["moba"]["mean"]) == 8
        assert curves["full"] != curves["moba"]
        own = arm["name"].partition("-")[0]
        trained = arm["stages"]["train"]["position_wise"]["trailing_loss"]
        assert arm["evaluations"]["both"]["position_wise"]["curves"][own]["mean"][-1] == pytest.approx(
            trained, abs=1e-6
        )
    assert main(["granularity", "--plot", "--output", "runs/experiments/granularity-quick.json"]) == 0
    assert "<svg" in Path("runs/experiments/granularity-quick.svg").read_text()

    trailing["settings"]["corpus"]["train"] = "another corpus"
    Path("other.json").write_text(json.dumps(trailing))
    with pytest.raises(SystemExit):
        main(["trailing", *quick, "--output", "other.json"])
    assert "holds results of other settings" in capsys.readouterr().err
