"""What README and the recipes say is true: every example runs."""

from pathlib import Path

import pytest
import torch
from guide import ROOT, blocks, local_links

from moba_train.config.load import load_config
from moba_train.config.validate import validate
from moba_train.planning.plan import make_plan

README = ROOT / "README.md"


def test_the_recipe_in_the_readme_is_valid_and_can_be_planned(tmp_path: Path) -> None:
    (recipe,) = blocks(README, "yaml")
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.replace("configs/models", str(ROOT / "configs" / "models")))
    config = load_config(path)
    validate(config, world_size=8)
    plan = make_plan(config, 8, 989.0, 0.4)
    assert len(plan.stages) == 2


def test_the_python_in_the_readme_runs() -> None:
    (code,) = blocks(README, "python")
    q, k, v = (torch.randn(600, heads, 16) for heads in (4, 2, 2))
    names = {"q": q, "k": k, "v": v, "cu": torch.tensor([0, 100, 600], dtype=torch.int32)}
    exec(code, names)
    assert names["out"].shape == q.shape


@pytest.mark.parametrize("path", local_links(README))
def test_links_lead_somewhere(path: str) -> None:
    assert (ROOT / path).exists()
