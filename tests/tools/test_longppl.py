"""LongPPL: key tokens and losses are those of a plain computation; several models may have the key tokens of one."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moba_train.attention.layout import packed_layout
from moba_train.config.schema import RunConfig
from moba_train.data.long_documents import LongDocumentSamples
from moba_train.errors import ConfigError, DataError
from moba_train.evals.evaluation import EvaluationResult
from moba_train.model.build import initialize_weights
from moba_train.model.transformer import Transformer
from moba_train.parallel.world import World
from moba_train.tools.longppl import LongPPL, mean_over_documents
from tests.evals.setting import built, stage_setting
from tests.resolved import check
from tests.tools.questions import context, recipe

SEQ_LEN = 96
SECTION = {"window": 16, "step": 5, "alpha": 0.2, "beta": -7.0, "sequences": 5}


def section(texts: Path, seq_len: int = SEQ_LEN, **keys: Any) -> RunConfig:
    return recipe(texts, seq_len, {"longppl": SECTION | keys})


def random_model(config: RunConfig, seed: int = 0) -> Transformer:
    model = Transformer(config.model)
    initialize_weights(model, seed)
    return model.double()


def evaluated(config: RunConfig, model: Transformer) -> EvaluationResult:
    return built(LongPPL, config).run(context(config, model))


def log_probabilities(model: Transformer, tokens: Tensor) -> Tensor:
    """[T, V] by the model's present attention."""
    return model(tokens, torch.arange(len(tokens)), packed_layout([len(tokens)])).log_softmax(-1)


@torch.no_grad()
def test_key_tokens_and_their_losses_are_those_of_one_forward_pass_a_token(texts: Path, alone: World) -> None:
    config = section(texts)
    model = random_model(config)
    found = evaluated(config, model)
    setting = stage_setting(config)
    samples = LongDocumentSamples(setting.validation, SEQ_LEN, 5, setting.seed, config.model.vocab_size)
    window, step = 16, 5
    keys = np.zeros((5, SEQ_LEN), dtype=bool)
    losses = {name: np.zeros((5, SEQ_LEN)) for name in ("moba", "full")}
    tried = context(config, model)
    for name in tried.each_attention():
        for index in range(5):
            sample = samples.sample(index)
            tokens = torch.from_numpy(sample.tokens)
            whole = log_probabilities(model, tokens)
            for place, label in enumerate(sample.labels):
                long = float(whole[place, label])
                losses[name][index, place] = -long
                if name == "full" and place + 1 >= window:
                    # The paper's program: the first tokens of a step have `window` tokens before them, later ones more.
                    before = window + (place + 1 - window) % step
                    short = float(log_probabilities(model, tokens[place + 1 - before : place + 1])[-1, label])
                    keys[index, place] = long - short > 0.2 and long > -7.0
    assert 10 < keys.sum() < keys.size / 2
    assert found.data["key_tokens"] == keys.sum(1).tolist()
    for name, values in losses.items():
        assert found.data["attentions"][name]["key_loss"] == pytest.approx(values[keys].mean(), rel=1e-12)
        assert found.data["attentions"][name]["loss"] == pytest.approx(values.mean(), rel=1e-12)
    gap = losses["moba"][keys].mean() - losses["full"][keys].mean()
    assert found.numbers["key_gap"] == pytest.approx(gap, rel=1e-9)
    assert found.numbers["longppl"] == pytest.approx(math.exp(losses["moba"][keys].mean()), rel=1e-12)
    assert found.numbers["longppl_full"] == pytest.approx(math.exp(losses["full"][keys].mean()), rel=1e-12)
    assert found.numbers["key_share"] == keys.mean()
    by_document = mean_over_documents(losses["moba"], keys, samples.documents)
    assert found.numbers["key_loss_error"] == pytest.approx(by_document.error, rel=1e-9)


def test_the_error_counts_documents_not_tokens(rng: np.random.Generator) -> None:
    """Against the spread of the mean over many drawn sets of documents; tokens of one document have one loss."""
    means, errors = [], []
    for _ in range(400):
        of_document = rng.normal(3, 1, size=(20, 1))
        values = np.repeat(of_document, 2, axis=0) + np.zeros((40, 30))
        keys = rng.random((40, 30)) < np.repeat(rng.uniform(0.1, 0.9, size=(20, 1)), 2, axis=0)
        found = mean_over_documents(values, keys, [index // 2 for index in range(40)])
        means.append(found.mean)
        errors.append(found.error)
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.15)
    assert math.isnan(mean_over_documents(values[:1], keys[:1], [0]).error)
    assert math.isnan(mean_over_documents(values, keys & False, [0] * 40).mean)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_models_are_compared_on_the_key_tokens_of_one_of_them(texts: Path, alone: World, tmp_path: Path) -> None:
    config = section(texts)
    chosen = evaluated(config, random_model(config))
    file = tmp_path / "evaluation.json"
    file.write_text(json.dumps({"longppl": chosen.data}))
    fewer = section(texts, keys=str(file), sequences=3)
    other = random_model(config, seed=1)
    found = evaluated(fewer, other)
    assert found.data["key_tokens"] == chosen.data["key_tokens"][:3]
    assert found.data["keys"] == dict([*chosen.data["keys"].items()][:3])
    assert found.data["chosen_by"] == str(file)
    assert evaluated(section(texts, sequences=3), other).data["keys"] != found.data["keys"]


def test_without_key_tokens_there_is_no_number(texts: Path, alone: World) -> None:
    config = section(texts, alpha=50.0)
    found = evaluated(config, random_model(config))
    assert found.numbers["key_share"] == 0
    assert math.isnan(found.numbers["longppl"])
    assert found.message.startswith("LongPPL unknown: no token gains")
    assert found.data["attentions"]["moba"]["key_loss"] is None


def test_key_tokens_of_other_samples_and_files_without_any_are_refused(
    texts: Path, alone: World, tmp_path: Path
) -> None:
    config = section(texts)
    data = evaluated(config, random_model(config)).data
    file = tmp_path / "evaluation.json"
    given = section(texts, keys=str(file))
    refused = f"evaluation.longppl.keys: given {file}, which"
    with pytest.raises(DataError, match=rf"{refused} holds no key tokens: .*No such file.*--tasks longppl"):
        built(LongPPL, given)
    for content, problem in [
        ("{}", "holds no key tokens: it has no 'longppl'"),
        ("[", "holds no key tokens: .*is not JSON"),
        (json.dumps({"longppl": data | {"keys": 3}}), "holds no key tokens: its seq_len or keys"),
        (json.dumps({"longppl": data | {"keys": dict.fromkeys(data["keys"], "eNo=")}}), "key tokens are damaged"),
        (json.dumps({"longppl": data | {"keys": {}}}), "lacks 5 of 5 samples; evaluate both models with the same"),
    ]:
        file.write_text(content)
        with pytest.raises(DataError, match=problem):
            LongPPL.check_samples(given.evaluation.options_of("longppl"), stage_setting(given))  # type: ignore[arg-type]
    file.write_text(json.dumps({"longppl": data | {"seq_len": 64}}))
    assert "has key tokens of 64 tokens, not of the stage's 96" in built(LongPPL, given).missing


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"window": 90, "step": 8}, r"longppl.window: given 90, with step 8; allowed: together at most .* 96"),
        ({"alpha": -1}, r"evaluation.longppl.alpha: given -1"),
        ({"beta": 1}, r"evaluation.longppl.beta: given 1"),
    ],
)
def test_recipes_that_cannot_work_are_refused_by_key(texts: Path, keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check(section(texts, **keys))


def test_key_tokens_must_be_given_where_full_attention_cannot_choose_them(texts: Path) -> None:
    given = section(texts).model_dump(mode="json") | {"attention": {"default": "nsa", "nsa": {"block_size": 32}}}
    problem = r"longppl\.keys: given none, but layers of nsa have no full attention on the same weights, which chooses"
    with pytest.raises(ConfigError, match=problem):
        check(RunConfig.model_validate(given))
