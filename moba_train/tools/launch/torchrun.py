"""torchrun, with an orderly end at SIGTERM, SIGHUP and Ctrl-C, and with the exit code of the ranks.

python -m moba_train.tools.launch.torchrun --nproc-per-node 8 -m moba_train.train RECIPE.yaml key.path=value ...

torchrun's own code is 1 whatever its ranks end with, and its report follows every error; here the report is left out
where a rank has said what is wrong. torchrun passes a signal on to its ranks, waits 30 s, kills those that are left,
and then raises an exception however they have ended. Here their exit codes are read, and two files that the first rank
of each node leaves: one says that the run was stopped as asked and is not complete, the other how long a stop may take,
because a step of a million tokens alone takes minutes (run/stop.py).
"""

import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

from moba_train.errors import (
    LAUNCHER_FOLDER,
    OWN_CODES,
    BrokenNodeError,
    LaunchError,
    ReproducibleFaultError,
    named_ranks,
    print_error,
)
from moba_train.output_files import write_atomically
from moba_train.run.stop import (
    BEFORE_TRAINING,
    LEFT_BEHIND,
    STOP_LIMIT,
    STOPPED,
    STOPPED_CODE,
    listen,
    signals_to_handle,
)
from moba_train.terminal import outlast_output
from moba_train.tools.launch.meeting_point import check_meeting_point

FAULTS = (BrokenNodeError.exit_code, ReproducibleFaultError.exit_code)
"""Exit codes that say why a run ended, whichever rank was the first to leave."""

_TORCHRUN_LOGGER = "torch.distributed.elastic.multiprocessing.api"

DEFAULT_PORT = 29500
"""torchrun's port for several nodes."""

LAST_CODE = 255
"""The highest exit code that a process can end with."""

SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""torchrun's environment variable: seconds that ranks may take to stop. Where it is set, it wins over what they ask
for."""

LONGEST_STOP_S = 604_800
"""The most seconds, a week, that it may ask for."""

TOGETHER_S = 30.0
"""Seconds that the launcher of a node that is stopped alone waits for the others', whose ranks end by the same step."""

CPU_RANKS = 8
"""Ranks that may share a CPU of fewer cores, to rehearse a node; each takes seconds of a core to start."""

_KILLED = (
    "was killed by SIGKILL, as Linux and schedulers do when host memory has run out (dmesg or the job's log say so); "
    "on a CPU and with activation_offload a smaller stages[i].micro_batch_size needs less"
)
"""Text behind the name of a rank that SIGKILL has ended: it could not say why itself."""


def torchrun_command(ranks: int) -> list[str]:
    """Beginning of a command that runs a program in this number of ranks on this machine; `-m MODULE` follows."""
    return [sys.executable, "-m", "moba_train.tools.launch.torchrun", "--standalone", "--nproc-per-node", str(ranks)]


def main(arguments: Sequence[str]) -> int:
    """Run torchrun with these arguments; without `--nproc-per-node`, with a rank for each GPU of this machine.

    Returns 0 when training is complete, `STOPPED_CODE` when it stopped as asked, 130 when a second Ctrl-C ended it at
    once, else the exit code of the ranks on this node that failed, also after a signal, and 128 + the signal where they
    have none because they did not stop in time. A `STOPPED_CODE` or `SHUTDOWN_TIMEOUT` that is none is refused.
    """
    outlast_output()
    try:
        stopped_code = _whole_number(STOPPED_CODE, 0, LAST_CODE, "an exit code")
        _whole_number(SHUTDOWN_TIMEOUT, 0, LONGEST_STOP_S, "seconds")
    except LaunchError as error:
        print_error(error)
        return error.exit_code
    listen(stopped_code)  # until torchrun handles signals itself, there is nothing to save
    import torch
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import main as torchrun

    given = any(argument.startswith(("--nproc-per-node", "--nproc_per_node")) for argument in arguments)
    ranks = [] if given else ["--nproc-per-node", str(torch.cuda.device_count() or 1)]
    signals = ["--signals-to-handle", ",".join(each.name for each in signals_to_handle())]
    arguments = [*ranks, *signals, *arguments]
    try:
        _check(arguments)
    except LaunchError as error:
        print_error(error)
        return error.exit_code
    with tempfile.TemporaryDirectory() as folder:
        os.environ[LAUNCHER_FOLDER] = folder
        _quiet_torchrun()
        with _orderly_end(Path(folder)) as codes:
            try:
                torchrun(arguments)
            except ChildFailedError as error:
                failures = sorted(error.failures.items(), key=lambda failure: failure[1].timestamp)
                return _report_failure([(rank, failure.exitcode) for rank, failure in failures], str(error))
            except (DistError, RendezvousError) as error:
                lost = LaunchError(f"--master-addr, --master-port: the nodes' launchers did not meet there: {error}")
                print_error(lost)
                return lost.exit_code
            except SignalException as error:
                if not codes:
                    print(BEFORE_TRAINING, flush=True)
                    return stopped_code
                late = [rank for rank, code in codes.items() if code is None]
                if late:
                    name = error.sigval.name
                    print(f"error: not stopped in time after {name}, and killed: {named_ranks(late)}", file=sys.stderr)
                # Signals (negative) and bugs (1) first: ranks that end with 2 may only have lost those.
                if failed := sorted([(rank, code) for rank, code in codes.items() if code], key=itemgetter(1)):
                    return _report_failure(failed)
                if late:
                    return 128 + error.sigval
        return stopped_code if _file(STOPPED).exists() else 0


def check_ranks(ranks: int, option: str = "--gpus (--nproc-per-node, GPUS)") -> None:
    """Raises LaunchError for no rank, and for more than this machine has GPUs or, without any, than cores and than
    `CPU_RANKS`."""
    import torch

    gpus = torch.cuda.device_count()
    most = gpus or max(os.cpu_count() or 1, CPU_RANKS)
    if not 1 <= ranks <= most:
        why = "the GPUs of this machine" if gpus else f"as no GPU is visible: {CPU_RANKS}, or one for each core"
        raise LaunchError(f"{option}: given {ranks}; allowed: 1 to {most}, {why}")


def _check(arguments: Sequence[str]) -> None:
    """Raises LaunchError for arguments that would show as a traceback of torchrun's, or once per rank."""
    import torch
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
    from torch.distributed.run import config_from_args, parse_args

    args = parse_args([*arguments])
    try:
        if args.nproc_per_node == "0":  # torchrun asserts
            check_ranks(0)
        config, _, _ = config_from_args(args)
        if config.max_nodes == 1 or not torch.cuda.device_count():
            check_ranks(config.nproc_per_node)  # else a rank refuses, which the launchers of the other nodes learn
        is_static = args.rdzv_backend == "static" and not args.rdzv_endpoint
        finds_port = is_static and args.master_port is None and config.max_nodes == 1
        if args.standalone or finds_port or args.rdzv_backend not in ("static", "c10d"):
            return
        endpoint = f"{args.master_addr}:{args.master_port or DEFAULT_PORT}" if is_static else args.rdzv_endpoint
        host, port = parse_rendezvous_endpoint(endpoint, DEFAULT_PORT)
    except ValueError as error:
        raise LaunchError(f"options of torchrun: {error}; --help lists them") from None
    check_meeting_point(host, port, is_first=args.rdzv_backend == "static" and args.node_rank == 0)


def _whole_number(variable: str, default: int, most: int, what: str) -> int:
    """The value of an environment variable. An empty one is taken out, because torchrun would fail on it.

    Raises LaunchError for any other text: it would show as a traceback, of a code only after the run has stopped.
    """
    text = os.environ.get(variable)
    if not text:
        os.environ.pop(variable, None)
        return default
    if not (text.isdecimal() and int(text) <= most):
        raise LaunchError(f"{variable}: given {text!r}; allowed: {what}, 0 to {most}")
    return int(text)


@contextmanager
def _orderly_end(folder: Path) -> Iterator[dict[int, int | None]]:
    """Inside, torchrun's agent that gets a signal gives its ranks as long as they ask for.

    Yields the exit codes of this node's ranks, by rank, which are known once torchrun has ended them: negative where a
    signal has ended a rank, None where it did not stop in time. Each start of the ranks has its own folder in `folder`,
    so that nothing counts that an earlier one has left.

    torchrun's own `--shutdown-timeout` (torch 2.13) is read when nothing is measured yet. So the functions that
    start the ranks and wait for their end are replaced. The latter also waits for the ranks that a failed one leaves
    behind; that keeps its 30 s, because they wait for the failed one and save nothing.

    An agent whose ranks have ended waits 300 s for those of the other nodes, in a barrier that one with a signal does
    not enter. Here it does, so that no launcher waits for a node that was stopped alone.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.agent.server.api import WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing.api import PContext, SignalException, SubprocessContext

    codes: dict[int, int | None] = {}
    start = PContext.start
    close = PContext.close
    shutdown = LocalElasticAgent._shutdown

    def start_afresh(self: PContext) -> None:
        codes.clear()
        os.environ[LAUNCHER_FOLDER] = tempfile.mkdtemp(dir=folder)
        start(self)

    def close_in_order(self: SubprocessContext, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        processes = {int(self.envs[i]["RANK"]): handler.proc for i, handler in self.subprocess_handlers.items()}
        failed = any(process.poll() for process in processes.values())
        if failed:
            write_atomically(_file(LEFT_BEHIND), "")
        asked = isinstance(sys.exception(), SignalException)
        if asked:
            # Schedulers repeat SIGTERM, and torchrun kills its ranks at the third. Ctrl-C still ends at once.
            for number in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            if not failed:
                timeout = _stop_limit(timeout)
        deadline = time.monotonic() + timeout
        try:
            close(self, death_sig, timeout)
        finally:
            killed = asked and time.monotonic() >= deadline
            for rank, process in processes.items():
                code = process.poll()
                codes[rank] = None if killed and code == -signal.SIGKILL else code

    def shut_down_together(self: LocalElasticAgent, *how: Any, **more: Any) -> None:
        shutdown(self, *how, **more)
        group = self._worker_group
        ran = group.state == WorkerState.HEALTHY  # else it comes from the barrier
        if ran and isinstance(sys.exception(), SignalException) and all(code == 0 for code in codes.values()):
            group.state = WorkerState.STOPPED  # torchrun calls this again after a second signal
            # Like torchrun's `_exit_barrier`, which no signal interrupts, and which prints a traceback where the others
            # take longer, have failed or are gone.
            thread = threading.Thread(target=meet, args=(self._store, group.group_world_size), daemon=True)
            thread.start()
            thread.join()

    def meet(own: Any, size: int) -> None:
        from moba_train.torch_private import meet_agents

        with suppress(DistError):
            meet_agents(own, size, TOGETHER_S)

    PContext.start = start_afresh  # type: ignore[method-assign]  # torchrun calls these three by name
    PContext.close = close_in_order  # type: ignore[method-assign,assignment]  # all are of this class
    LocalElasticAgent._shutdown = shut_down_together  # type: ignore[method-assign]  # as above
    try:
        yield codes
    finally:
        PContext.start = start  # type: ignore[method-assign]  # as they were
        PContext.close = close  # type: ignore[method-assign]  # as they were
        LocalElasticAgent._shutdown = shutdown  # type: ignore[method-assign]  # as it was


def _file(name: str) -> Path:
    """A file of the newest start of the ranks."""
    return Path(os.environ[LAUNCHER_FOLDER], name)


def _stop_limit(default: int) -> int:
    """Seconds that the ranks may take to stop; `default` where they have not asked for any."""
    try:
        return int(float(os.environ.get(SHUTDOWN_TIMEOUT) or _file(STOP_LIMIT).read_text()))
    except (OSError, ValueError):
        return default


def _report_failure(failed: Sequence[tuple[int, int]], report: str = "") -> int:
    """Print torchrun's `report` unless a rank has said why it failed, and what SIGKILL means. `failed`: ranks and their
    codes. Returns the exit code: a fault that any rank has named, else the code of the first; 128 + the signal, as
    shells have it, where one ended that rank."""
    rank, code = next((one for one in failed if one[1] in FAULTS), failed[0])
    if report and code not in OWN_CODES:
        print(report, file=sys.stderr)
    if code == -signal.SIGKILL:
        print(f"error: rank {rank} {_KILLED}", file=sys.stderr)
    return code if code > 0 else 128 - code


def _quiet_torchrun() -> None:
    """Leave out torchrun's lines about ranks that it ends, and about a rank that has told what is wrong."""
    logging.getLogger(_TORCHRUN_LOGGER).addFilter(_says_more)


def _says_more(record: logging.LogRecord) -> bool:
    """True if the line of torchrun's log tells something that the ranks have not printed."""
    text = record.getMessage()
    told = any(text.startswith(f"failed (exitcode: {code})") for code in OWN_CODES)
    return not told and " closing signal " not in text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
