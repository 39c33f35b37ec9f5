"""The disturbances of the chaos suite: kills, stalls, a full disk, damaged or moved files, non-finite numbers."""

import os
import resource
import shutil
import signal
from contextlib import suppress
from pathlib import Path

from benchmarks.chaos_disturbances import Action, Disturbance
from benchmarks.chaos_rank import NAN, POISON, READ_ERROR
from benchmarks.trainer_run import ranks_of
from moba_train.checkpoint.manifest import MANIFEST, META
from moba_train.checkpoint.publish import published


def stall(it: Disturbance) -> None:
    """SIGSTOP one rank: the other gives up after `parallel.timeout`, and torchrun restarts both."""
    with suppress(ProcessLookupError):
        os.kill(it.one_rank(), signal.SIGSTOP)


def send(it: Disturbance, what: signal.Signals, agent: bool) -> None:
    """Send a signal to a rank, as schedulers do, or to torchrun, which passes it on: the run saves and ends."""
    with suppress(ProcessLookupError):
        os.kill(it.run.launcher.pid if agent else it.one_rank(), what)


def fill_disk(it: Disturbance) -> None:
    """Limit all files to 1,000 bytes for a while: the system refuses the writes of saves and of metrics."""
    first = len(it.run.lines)
    ranks = ranks_of(it.run.launcher.pid)
    limits = [resource.prlimit(process, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY)) for process in ranks]
    try:
        _expect_failed_save(it, first)
    finally:
        for process, limit in zip(ranks, limits, strict=True):
            with suppress(ProcessLookupError):
                resource.prlimit(process, resource.RLIMIT_FSIZE, limit)


def forbid_writing(it: Disturbance) -> None:
    """Make the checkpoint folder read-only for a while."""
    first = len(it.run.lines)
    it.run.checkpoints.chmod(0o500)
    try:
        _expect_failed_save(it, first)
    finally:
        it.run.checkpoints.chmod(0o700)


def _expect_failed_save(it: Disturbance, first: int) -> None:
    it.run.wait(lambda: it.run.says("was not saved", first), 60, "the report of a failed save")


def damage_newest(it: Disturbance, flip: bool) -> None:
    """Kill the run, then flip a bit of the newest checkpoint's largest shard, or cut its manifest in half."""
    it.kill("agent")
    (it.floor, _), (_, newest) = published(it.run.checkpoints)[-2:]
    file = max(newest.glob("*.safetensors"), key=lambda path: path.stat().st_size) if flip else newest / MANIFEST
    content = bytearray(file.read_bytes())
    content[it.dice.randrange(len(content))] ^= 1 << it.dice.randrange(8)
    file.write_bytes(content if flip else content[: len(content) // 2])


def damage_old_meta(it: Disturbance) -> None:
    """Flip a bit of an old checkpoint's meta while the run goes on: later saves are saved and reported as such."""
    run = it.run
    first = len(run.lines)
    step, old = published(run.checkpoints)[0]
    with suppress(FileNotFoundError):  # retention may remove the checkpoint now
        content = bytearray((old / META).read_bytes())
        content[it.dice.randrange(len(content))] ^= 1 << it.dice.randrange(8)
        (old / META).write_bytes(content)
    run.wait(lambda: run.saved_step > step + 16, 90, "later saves")
    it.expect(not run.says("was not saved", first), "a save is reported as failed")


def leave_stray_files(it: Disturbance) -> None:
    """Put files of a desktop and of NFS into the newest checkpoint, and kill the ranks."""
    step, newest = published(it.run.checkpoints)[-1]
    for name in (".DS_Store", ".nfs0000000000000001"):
        with suppress(FileNotFoundError):
            (newest / name).write_bytes(b"\0")
    it.floor = step
    it.kill("ranks")


def fail_to_read(it: Disturbance) -> None:
    """Kill the ranks; the first read of a checkpoint fails on one of them."""
    (it.run.faults / READ_ERROR).touch()
    it.kill("ranks")


def remove_checkpoints(it: Disturbance) -> None:
    """Move the folder of checkpoints away; once a save has made it anew, kill the ranks."""
    run = it.run
    away = run.folder / "away"
    run.checkpoints.rename(away)
    run.wait(lambda: run.saved_step > 0, 90, "a save into a new folder")
    it.floor = run.saved_step
    shutil.rmtree(away)
    it.kill("ranks")


def move_run_folder(it: Disturbance) -> None:
    """Move the run folder away and put an empty one in its place: the run stops, and writes nothing into the other."""
    run = it.run
    first = len(run.lines)
    folder = run.checkpoints.parent
    away = run.folder / "away"
    folder.rename(away)
    folder.mkdir()
    run.wait(lambda: run.says("error:", first), 90, "an end with a message")
    it.kill("agent")
    published_there = published(run.checkpoints)
    shutil.rmtree(folder)
    away.rename(folder)
    it.expect(not published_there, "a checkpoint was published in a folder that is not the run's")


def start_second_trainer(it: Disturbance) -> None:
    """Give the command a second time: the second trainer is refused, and the message names the first."""
    second = it.run.second()
    try:
        second.launch()
        refused = second.wait(lambda: second.says("trains in it"), 90, "the refusal of a second trainer")
        it.expect(it.run.ended or (refused and second.says("process ")), "no refusal that names the holder")
    finally:
        second.end()


def cut_corpus(it: Disturbance) -> None:
    """Cut the tokens of the corpus in half during training, and put them back once the run has ended with a message."""
    run = it.run
    first = len(run.lines)
    file = Path(f"{run.corpus}.bin")
    content = file.read_bytes()
    os.truncate(file, len(content) // 2)
    try:
        run.wait(lambda: run.says(f"{file} ", first), 90, "an end with a message")
        it.kill("agent")
    finally:
        file.write_bytes(content)


def poison_optimizer(it: Disturbance) -> None:
    """NaN in the optimizer's state: the run ends with an error and goes on from before, from the newest checkpoint but
    one if it had started from the newest."""
    (it.floor, _), _ = published(it.run.checkpoints)[-2:]
    it.arm(POISON)


def turn_back_clock(it: Disturbance) -> None:
    """Set the clock back by a day, change file times so that older checkpoints look newer, and kill the run."""
    it.run.folder.joinpath("clock").write_text("-86400")
    for age, (_, path) in enumerate(published(it.run.checkpoints)):
        for file in (path, *path.iterdir()):
            os.utime(file, (1e9 - 1e6 * age, 1e9 - 1e6 * age))
    it.kill("ranks")


_KILL_MOMENTS = (1, 4, 4)
_STOP_MOMENTS = (1, 2, 2)

ACTIONS: dict[str, Action] = {
    "kill_rank": Action(lambda it: it.kill("rank"), _KILL_MOMENTS, is_kill=True),
    "kill_all_ranks": Action(lambda it: it.kill("ranks"), _KILL_MOMENTS, is_kill=True),
    "kill_agent": Action(lambda it: it.kill("agent"), _KILL_MOMENTS, is_kill=True, needs_command=True),
    "stall_rank": Action(stall),
    "sigterm_rank": Action(lambda it: send(it, signal.SIGTERM, agent=False), _STOP_MOMENTS, needs_command=True),
    "sigterm_agent": Action(lambda it: send(it, signal.SIGTERM, agent=True), _STOP_MOMENTS, needs_command=True),
    "sigint_agent": Action(lambda it: send(it, signal.SIGINT, agent=True), _STOP_MOMENTS, needs_command=True),
    "disk_full": Action(fill_disk, goes_on=True),
    "read_only_folder": Action(forbid_writing, goes_on=True),
    "flipped_byte": Action(
        lambda it: damage_newest(it, flip=True), needs_command=True, says="Passing over a damaged checkpoint"
    ),
    "truncated_manifest": Action(
        lambda it: damage_newest(it, flip=False), needs_command=True, says="Passing over a damaged checkpoint"
    ),
    "damaged_old_meta": Action(damage_old_meta, goes_on=True),
    "stray_files": Action(leave_stray_files),
    "read_error": Action(fail_to_read),
    "checkpoints_removed": Action(remove_checkpoints),
    "run_folder_moved": Action(move_run_folder, needs_command=True),
    "second_trainer": Action(start_second_trainer, goes_on=True),
    "corpus_cut": Action(cut_corpus, needs_command=True),
    "transient_nan": Action(lambda it: it.arm(NAN), goes_on=True, says="transient"),
    "poisoned_optimizer": Action(poison_optimizer, says="reproducible"),
    "clock_back": Action(turn_back_clock),
}
KILLS = tuple(name for name, action in ACTIONS.items() if action.is_kill)
