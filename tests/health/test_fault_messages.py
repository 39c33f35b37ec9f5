"""What the log says of a fault that repeats, and of one that does not."""

import math

import pytest

from moba_train.health import reaction
from moba_train.health.reaction import RankEvidence, reproducible_fault, too_many_transient, transient_fault

FIRST = {"loss": math.nan, "grad_norm": math.nan}
SECOND = {"loss": 2.5, "grad_norm": 0.75}


def rank(number: int, host: str, loss: float = 1.0, not_finite: tuple[str, ...] = ()) -> RankEvidence:
    return RankEvidence(number, host, loss, [*not_finite], 20)


def test_ranks_are_named_with_their_hosts() -> None:
    evidence = [rank(0, "a", math.inf), rank(1, "a", math.nan, ("norm",)), rank(2, "b", not_finite=("norm",))]
    fault = transient_fault(FIRST, SECOND, [*evidence, rank(3, "b", math.nan)])
    assert fault.message.startswith("transient: loss nan, gradient norm nan, but loss 2.5, gradient norm 0.75 when")
    assert "The loss was not finite on ranks 0, 1 on a and rank 3 on b; ranks of one cp or tp group" in fault.message
    assert (fault.ranks, fault.hosts) == ([0, 1, 3], ["a", "b"])


def test_a_gradient_that_is_wrong_alone_names_parameters() -> None:
    evidence = [rank(0, "a"), rank(1, "b", not_finite=("blocks.3.norm", "norm"))]
    fault = transient_fault(FIRST, SECOND, evidence)
    assert "gradients were not finite on rank 1 on b, on rank 1 those of 2 of 20 parameters" in fault.message
    assert fault.message.endswith("the first of them blocks.3.norm")
    assert (fault.ranks, fault.hosts) == ([1], ["b"])


def test_of_several_ranks_the_one_with_most_wrong_gradients_is_described() -> None:
    evidence = [rank(0, "a", not_finite=("norm",)), rank(1, "b", not_finite=("output", "norm")), rank(2, "b")]
    fault = transient_fault(FIRST, SECOND, evidence)
    assert "on rank 0 on a and rank 1 on b, on rank 1 those of 2 of 20 parameters" in fault.message


def test_one_rank_alone_with_a_wrong_loss_harmed_no_other() -> None:
    fault = transient_fault(FIRST, SECOND, [rank(0, "a"), rank(1, "b", math.nan)])
    assert fault.message.endswith("The loss was not finite on rank 1 on b")


def test_a_sum_that_is_wrong_alone_blames_no_rank() -> None:
    fault = transient_fault(FIRST, SECOND, [rank(0, "a"), rank(1, "b")])
    assert fault.message.endswith("so the fault is in the communication of their sums")
    assert (fault.ranks, fault.hosts) == ([], [])


def test_transient_faults_count_for_a_thousand_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = [(1, ["a"]), (900, ["a"]), (1500, [])]
    many = [(step, ["a"]) for step in range(1, 21)]
    assert (too_many_transient(many, 20) or "").partition("3 are allowed: ")[2].startswith("step 13 (a), step 14 (a)")
    assert too_many_transient(faults, 1500) is None
    monkeypatch.setattr(reaction, "MOST_TRANSIENT", 1)
    assert [too_many_transient(faults[:2], step) is None for step in (1000, 1001)] == [False, True]
    text = too_many_transient(faults, 1500)
    assert text is not None, "that of step 1 is long ago"
    assert "2 transient faults in 1000 steps, 1 are allowed: step 900 (a), step 1500 (no rank to name)" in text


def entry(*losses: float | None) -> dict[str, object]:
    """A rank's entry in a dump: document parts with these losses, alternating between two micro-batches."""
    parts = [{"source": "c", "document": i, "start": 0, "stop": 9, "loss": loss} for i, loss in enumerate(losses)]
    return {"micro_batches": [parts[::2], parts[1::2]]}


def test_documents_that_are_not_finite_on_any_rank_are_named() -> None:
    message, named = reproducible_fault([entry(1.0, None, math.inf), entry(1.0, math.nan, None)])
    assert named == ["c document 2 tokens 0:9", "c document 1 tokens 0:9"]
    assert "2 of the batch's 3 document parts" in message


def test_a_batch_without_a_suspect_is_listed_up_to_a_limit() -> None:
    message, named = reproducible_fault([entry(*[1.0] * 30)])
    assert "The forward pass is finite for all 30" in message
    assert message.endswith("c document 4 tokens 0:9 and 27 more")
    assert len(named) == 8
    message, _ = reproducible_fault([entry(*[math.nan] * 30)])
    assert "suspect the weights before the data" in message
