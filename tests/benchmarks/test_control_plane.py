"""The control plane of hundreds of ranks, simulated: messages are linear in the ranks. Whatever rank dies in whatever
phase, or whatever node is cut off, all others end in time with an error that names it."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.control_plane import NODE, TIMEOUT_S, DiedError, Simulation, life, measure
from moba_train.checkpoint import index, load
from moba_train.errors import CommunicationError, LaunchError
from moba_train.parallel.failures import GRACE_S

SIZE = 16


def run(folder: Path, **faults: Any) -> Simulation:
    simulation = Simulation(SIZE, **faults)
    simulation.run(life(folder / "run"))
    assert simulation.hangs == []
    return simulation


@cache
def phases(rank: int, folder: Path) -> dict[str, int]:
    """Number of the rank's first call in each phase of an undisturbed run."""
    simulation = run(folder)
    assert not any(simulation.ended.values())
    return simulation.first_calls[rank]


def assert_linear(few: int, many: int) -> None:
    """The messages of all ranks grow with their number, those of a rank other than 0 with its logarithm."""
    small = {row["phase"]: row for row in measure(few)}
    for row in measure(many):
        of_few = small[row["phase"]]
        assert row["messages"] <= 1.5 * of_few["messages"] * many / few, row
        assert row["most_of_others"] <= of_few["most_of_others"] * (many.bit_length() / few.bit_length()) * 2, row
        assert row["seconds"] <= max(2.0, of_few["seconds"] * many / few), row


def test_messages_are_linear_in_the_number_of_ranks() -> None:
    assert_linear(8, 256)


def test_a_slow_store_delays_a_start_and_fails_nothing(tmp_path: Path) -> None:
    simulation = run(tmp_path, request_s=0.01)
    assert not any(simulation.ended.values())


def test_one_rank_reads_the_index_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(SIZE)
    readers: list[int] = []

    def read_index(*arguments: Any) -> Any:
        readers.append(simulation.current)
        return index.read_index(*arguments)

    monkeypatch.setattr(load, "read_index", read_index)
    simulation.run(life(tmp_path / "run"))
    assert not any(simulation.ended.values())
    assert readers == [0]


def ends(simulation: Simulation) -> dict[int, BaseException]:
    """Error of each rank, which came in time."""
    assert max(simulation.now) < 2 * TIMEOUT_S + 2 * GRACE_S
    return {rank: error for rank, error in simulation.ended.items() if error is not None}


def said(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


@pytest.mark.parametrize("dead", [0, 5, SIZE - 1])
@pytest.mark.parametrize("phase", ["join", "start", "first save", "step", "heartbeat", "save", "load"])
def test_a_rank_that_dies_in_any_phase_ends_all_others_with_an_error_that_names_it(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, dead: int, phase: str
) -> None:
    call = phases(dead, tmp_path_factory.getbasetemp() / "undisturbed")[phase]
    errors = ends(run(tmp_path, dies=(dead, call)))
    assert errors.keys() == {*range(SIZE)}
    assert isinstance(errors.pop(dead), DiedError)
    assert all(isinstance(error, LaunchError | CommunicationError) for error in errors.values())
    texts = [said(error) for error in errors.values()]
    if phase == "join":
        assert any(f"rank {dead} of {SIZE} did not start" in text for text in texts) == (dead != 0)
        assert sum("rank 0 did not find all ranks" in text for text in texts) == SIZE - 1 - (dead != 0)
    else:
        assert all("no answer from rank" in text for text in texts)
        assert sum(f"no answer from rank {dead}:" in text for text in texts) >= SIZE - 2


def test_a_node_that_is_cut_off_is_named(tmp_path: Path) -> None:
    lost = range(NODE, 2 * NODE)
    errors = ends(run(tmp_path, lost=lost))
    assert errors.keys() == {*range(SIZE)}
    for rank, error in errors.items():
        text = "the other ranks' reports cannot be read" if rank in lost else "no answer from ranks 8-15:"
        assert text in said(error)
