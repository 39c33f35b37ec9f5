"""What a checkpoint says about a run's progress is taken as it was saved, or refused in words."""

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moba_train.checkpoint.manifest import JSON_BYTES
from moba_train.config.health import SpikeConfig
from moba_train.config.schema import RunConfig
from moba_train.errors import CheckpointError
from moba_train.health.spike import SpikeDetector
from moba_train.resolve.run import ResolvedRun, resolve_unchecked
from moba_train.run.progress import Progress, check_resumable, check_tokenizer, data_plan
from moba_train.strict_json import to_json

values = st.recursive(
    st.none() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


@given(meta=values | st.dictionaries(st.sampled_from([*Progress().to_meta(), "unknown"]), values, max_size=4))
def test_any_record_is_progress_or_refused(meta: object) -> None:
    try:
        progress = Progress.from_meta(meta, stages=2)
    except CheckpointError:
        return
    assert 0 <= progress.stage < 2
    assert progress.step >= 0
    assert Progress.from_meta(progress.to_meta(), stages=2) == progress


def test_the_longest_window_of_the_spike_detector_fits_into_a_checkpoint() -> None:
    (longest,) = (bound.le for bound in SpikeConfig.model_fields["window"].metadata if hasattr(bound, "le"))
    detector = SpikeDetector(longest, warn_sigma=6.0)
    detector.load_state_dict(detector.state_dict() | dict.fromkeys(("loss", "grad_norm"), [1 / 3] * longest))
    assert len(to_json(Progress(spike_detector=detector.state_dict()).to_meta())) < JSON_BYTES / 2


def test_the_key_at_fault_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"starts\.corpus: Input should be a valid integer"):
        Progress.from_meta(Progress(starts={"corpus": "far"}).to_meta(), stages=1)  # type: ignore[dict-item]
    fewer = r"stages: given 2, but the checkpoint is of step 9 in stages\[2\]; restore the stages that have begun"
    with pytest.raises(CheckpointError, match=fewer):
        Progress.from_meta(Progress(step=9, stage=2).to_meta(), stages=2)
    with pytest.raises(CheckpointError, match="names step -1 and stage 0"):
        Progress.from_meta(Progress(step=-1).to_meta(), stages=2)


RECIPE: dict[str, Any] = {
    "name": "test",
    "run_dir": "unused",
    "model": {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "layers": 2, "heads": 2, "kv_heads": 1},
    "data": {"train": [{"path": "a"}, {"path": "b"}], "validation": [{"path": "c"}]},
    "batch_tokens": 100,
    "stages": [{"name": f"s{i}", "seq_len": 50, "tokens": 1000} for i in range(3)],
}
"""Ten steps in each of three stages."""


def changed(path: str, value: Any) -> ResolvedRun:
    """The run of the recipe with another value at a path like `stages.0.tokens`."""
    recipe = deepcopy(RECIPE)
    *folders, last = [int(key) if key.isdecimal() else key for key in path.split(".")]
    place: Any = recipe
    for key in folders:
        place = place[key]
    place[last] = value
    return resolve_unchecked(RunConfig.model_validate(recipe))


def plan_of(run: ResolvedRun) -> dict[str, Any]:
    """The data plan in the second stage."""
    return data_plan(run.setup.shape, run.data, run.seed, run.stages[:2])


def in_second_stage(step: int = 15) -> Progress:
    """Progress of the unchanged recipe, saved in its second stage."""
    progress = Progress(step=step, stage=1)
    progress.data_plan = plan_of(resolve_unchecked(RunConfig.model_validate(RECIPE)))
    return progress


@pytest.mark.parametrize(
    ("path", "value", "key"),
    [
        ("seed", 7, "seed"),
        ("model.layers", 4, "model.layers"),
        ("batch_tokens", 200, "batch_tokens (or stages[0].batch_tokens)"),
        ("stages.0.batch_tokens", 200, "stages[0].batch_tokens"),
        (
            "stages.0.tokens",
            500,
            "the number of steps before stages[1] (tokens and batch_tokens of stages[0])",
        ),
        ("stages.1.seq_len", 100, "stages[1].seq_len"),
        ("data.train.1.weight", 3, "data.train[1].weight (or stages[0].train[1].weight)"),
        ("data.train", [{"path": "a"}], "data.train[1] (or stages[0].train[1])"),
        ("data.validation", [{"path": "c"}, {"path": "d"}], "data.validation[1]"),
    ],
)
def test_a_recipe_that_would_give_other_batches_is_refused_by_its_key(path: str, value: Any, key: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_resumable(changed(path, value), in_second_stage(), "step 15")
    assert str(caught.value).startswith(f"cannot resume from step 15: {key} was ")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("name", "other"),
        ("stages.1.tokens", 2000),
        ("stages.1.tokens", 500),
        ("stages.2.seq_len", 100),
        ("model.rope", {"theta": 5e5}),
        ("data.train.0.path", "elsewhere"),
        ("data.validation", []),
    ],
)
def test_a_run_goes_on_where_its_batches_stay_the_same(path: str, value: Any) -> None:
    """Corpora may have moved, the current stage may end at another step, and later ones may change."""
    check_resumable(changed(path, value), in_second_stage(), "step 15")


def test_evaluation_may_be_switched_on() -> None:
    progress = in_second_stage()
    progress.data_plan = plan_of(changed("data.validation", []))
    check_resumable(changed("name", "test"), progress, "step 15")


def test_a_stage_cannot_end_before_the_checkpoint() -> None:
    with pytest.raises(CheckpointError, match=r"^stages\[1\]\.tokens: stage s1 now ends at step 15, before the check"):
        check_resumable(changed("stages.1.tokens", 500), in_second_stage(16), "step 16")


def test_only_another_tokenizer_is_refused() -> None:
    for now, before in (("abc", "abc"), ("", "abc"), ("abc", "")):
        check_tokenizer(now, None, Progress(tokenizer=before), "step 15")
    with pytest.raises(CheckpointError, match=r"data\.tokenizer \(None\) is another one"):
        check_tokenizer("abc", None, Progress(tokenizer="abd"), "step 15")
