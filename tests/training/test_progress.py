"""What a checkpoint says about a run's progress is taken as it was saved, or refused in words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moba_train.errors import CheckpointError
from moba_train.training.progress import Progress

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


def test_a_record_of_an_older_version_is_read_with_its_old_names() -> None:
    now = Progress(step=8, stage=1, exited_steps={"activate": 5}, trailing_loss=2.5, run_id="abc")
    old = now.to_meta()
    old["gated_steps"] = old.pop("exited_steps")
    assert Progress.from_meta(old, stages=2) == now


def test_the_key_at_fault_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"starts\.corpus: Input should be a valid integer"):
        Progress.from_meta(Progress(starts={"corpus": "far"}).to_meta(), stages=1)  # type: ignore[dict-item]
    fewer = r"stages: given 2, but the checkpoint is of step 9 in stages\[3\]; restore the stages that have begun"
    with pytest.raises(CheckpointError, match=fewer):
        Progress.from_meta(Progress(step=9, stage=3).to_meta(), stages=2)
    with pytest.raises(CheckpointError, match="names step -1 and stage 0"):
        Progress.from_meta(Progress(step=-1).to_meta(), stages=2)
