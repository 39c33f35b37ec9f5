"""A run that is refused before it trains ends at the first start, on all nodes, however many restarts are allowed."""

import shutil
from collections.abc import Callable

import pytest

from tests.forked_program import ForkedProgram
from tests.run.tiny_run import Run
from tests.run.trainer_ranks import free_port

OURS, PLAIN = "moba_train.tools.launch.torchrun", "torch.distributed.run"
RESTARTS = ["--max-restarts", "3", "--monitor-interval", "0.05"]


def lose_checkpoints(run: Run) -> str:
    (run.run_dir / "checkpoints").rename(run.folder / "elsewhere")
    return "--from-scratch"


def change_corpus(run: Run) -> str:
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{run.recipe['data']['train'][1]['path']}{suffix}", run.folder / f"own{suffix}")
    return "has changed"


@pytest.mark.parametrize(
    ("spoil", "launcher", "code"), [(lose_checkpoints, OURS, 2), (lose_checkpoints, PLAIN, 1), (change_corpus, OURS, 2)]
)
def test_what_ranks_find_together_is_said_once(run: Run, spoil: Callable[[Run], str], launcher: str, code: int) -> None:
    """Plain torchrun's report ends with the message, as after the first start."""
    own = run.folder / "own"
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{run.recipe['data']['train'][0]['path']}{suffix}", f"{own}{suffix}")
    run.recipe["data"]["train"][0]["path"] = str(own)
    assert run.train_here("--stop-at-step", "4") == 0
    named = spoil(run)
    ranks = ["--standalone", "--nproc-per-node", "2", *RESTARTS]
    command = ["-m", launcher, *ranks, "-m", "moba_train.train", str(run.write_recipe())]
    process = ForkedProgram(command, run.folder / "output")
    output, _ = process.communicate(timeout=90)
    assert process.returncode == code, output
    said, *in_report = [line.strip() for line in output.splitlines() if named in line]
    assert said.startswith("error: ")
    # Of one rank or of both: torchrun may end the second before it has written the reason.
    assert {*in_report} == (set() if launcher == OURS else {f"traceback : {said}"})


IMPATIENT = """
import errno, os, sys
from moba_train.checkpoint import files
from moba_train.errors import leave_if_refused
from moba_train.parallel import run_lock
from moba_train.train import main

leave_if_refused()

def refuse(*_, **__):
    raise OSError(errno.ESTALE, "Stale file handle")

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    {patch}
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("patch", "said"),
    [("files.open_foreign = refuse", "could not be read"), ("run_lock._acquired = refuse", "cannot be used")],
)
def test_what_may_pass_is_tried_again(run: Run, patch: str, said: str) -> None:
    """A file system that does not answer, or the lock of a node that was lost, which NFS gives back after 90 s."""
    assert run.train_here("--stop-at-step", "4") == 0
    (program := run.folder / "rank.py").write_text(IMPATIENT.replace("{patch}", patch))
    command = ["-m", OURS, "--standalone", "--nproc-per-node", "2", *RESTARTS, str(program), str(run.write_recipe())]
    process = ForkedProgram(command, run.folder / "output")
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 0, output
    assert output.count(said) == 1, output


def on_two_nodes(run: Run, *of_node_1: str) -> list[tuple[int | None, str]]:
    """Exit code and output of the launchers of two nodes with a rank each; the second has overrides of its own."""
    port = str(free_port())
    recipe = str(run.write_recipe())
    nodes = []
    for number, overrides in enumerate(([], of_node_1)):
        ranks = ["--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1", *RESTARTS]
        where = ["--master-addr", "localhost", "--master-port", port]
        command = ["-m", OURS, *ranks, *where, "-m", "moba_train.train", recipe, *overrides]
        nodes.append(ForkedProgram(command, run.folder / f"output{number}"))
    try:
        return [(node.communicate(timeout=90)[0], node.returncode)[::-1] for node in nodes]
    finally:
        for node in nodes:
            node.kill()


def test_a_node_without_the_corpus_ends_the_others_that_wait_for_it(run: Run) -> None:
    """Not after `parallel.timeout`, ten minutes."""
    (code, output), (other_code, other_output) = on_two_nodes(run, "data.train.0.path=nowhere")
    assert (code, other_code) == (2, 2)
    assert output == "error: rank 1 has ended the run with exit code 2; the output of its node says why\n"
    assert other_output.startswith("error: 1 problem in the configuration:\n")
    assert other_output.count("given 'nowhere'") == 1, other_output


def test_different_recipes_end_the_launchers_of_all_nodes(run: Run) -> None:
    (code, output), (other_code, other_output) = on_two_nodes(run, "optim.lr=0.02")
    assert (code, other_code) == (2, 2), output + other_output
    assert output.startswith("error: rank 1: given another recipe")
    assert output.count("\n") == 1, output
    assert other_output == ""
