"""`moba-train launch`: the start of a recipe on any number of nodes, by torchrun, Slurm, Kubernetes or SkyPilot."""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from moba_train.errors import LaunchError
from moba_train.tools.cli_options import Overrides, Recipe
from moba_train.tools.launch import job as jobs

GPUS_PER_NODE = 8
"""Default of `--gpus-per-node` for other machines than this one."""

MAX_RESTARTS = 2**31 - 1
"""The most restarts that a JobSet can hold."""

_SEVERAL = "torchrun on several nodes"
_USED_BY = {
    "master": (_SEVERAL,),
    "limit": ("--slurm",),
    "stop_s": ("--slurm", "--k8s"),
    "image": ("--k8s",),
    "claim": ("--k8s",),
    "restarts": ("--k8s",),
}
"""Options that are not used by every way to start, by the names of their parameters."""


def launch(
    context: typer.Context,
    recipe: Recipe,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(min=1, help="machines")] = 1,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"GPUs (ranks) of each machine; default: {GPUS_PER_NODE}, or those of this machine if --start "
            "starts on it",
        ),
    ] = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="submit launch/slurm.sbatch")] = False,
    k8s: Annotated[
        Literal["jobset", "trainjob", "rayjob"] | None,
        typer.Option(help="a manifest: JobSet, TrainJob of Kubeflow Trainer, or RayJob of KubeRay"),
    ] = None,
    sky: Annotated[
        str | None, typer.Option(metavar="GPU", help="the task of SkyPilot, on machines with this GPU, such as H100")
    ] = None,
    start: Annotated[
        bool, typer.Option("--start", help="start it instead of printing how: here, by sbatch or by kubectl apply")
    ] = False,
    master: Annotated[str, typer.Option(help="torchrun on several nodes: host name of the first")] = "NODE0",
    limit: Annotated[str | None, typer.Option("--time", metavar="LIMIT", help="Slurm: as sbatch takes it")] = None,
    stop_s: Annotated[
        int,
        typer.Option(
            "--stop-seconds", min=1, max=jobs.MAX_STOP_S, help="Slurm, Kubernetes: from the signal to the end"
        ),
    ] = jobs.STOP_S,
    image: Annotated[str | None, typer.Option(help="Kubernetes: the image of docker/Dockerfile")] = None,
    claim: Annotated[
        str | None,
        typer.Option(
            metavar="NAME:PATH", help="Kubernetes: the volume claim with data and runs, and where pods see it"
        ),
    ] = None,
    restarts: Annotated[int, typer.Option(min=0, max=MAX_RESTARTS, help="Kubernetes: starts after failures")] = 3,
) -> None:
    """Print what starts a recipe on several nodes, or start it: torchrun (the default), Slurm, Kubernetes or SkyPilot.

    The recipe is checked for that number of GPUs first; its files need not be here.
    """
    import moba_train.attention.registry  # noqa: F401  # the kinds' sections
    from moba_train.config.load import dump_config, load_config
    from moba_train.config.mesh import WorldSize
    from moba_train.resolve.recipe import resolve

    ways = [way for way, given in (("--slurm", slurm), ("--k8s", k8s), ("--sky", sky)) if given]
    if len(ways) > 1:
        raise LaunchError(f"{' and '.join(ways)}: given both; allowed: one of them, or none for torchrun")
    if sky and start:
        raise LaunchError("--start: given with --sky; allowed: `sky jobs launch FILE` with the printed file")
    _refuse_unused(context, ways[0] if ways else _SEVERAL if nodes > 1 else "torchrun")
    starts_here = start and not ways and nodes == 1
    per_node = _ranks_per_node(gpus_per_node, starts_here)
    config = load_config(recipe, overrides or ())
    run = resolve(config, WorldSize(nodes * per_node, per_node))
    job = jobs.Job(
        jobs.job_name(config.name),
        recipe,
        tuple(overrides or ()),
        dump_config(config),
        nodes,
        per_node,
        stop_s,
    )
    if k8s:
        from moba_train.tools.launch.kubernetes import MANIFESTS, as_yaml, make_pods

        manifests = MANIFESTS[k8s](job, make_pods(run, image, claim, restarts))
        _give(as_yaml(manifests), ["kubectl", "apply", "-f", "-"], start)
        return
    if sky:
        from moba_train.tools.launch.sky import task_yaml

        typer.echo(task_yaml(job, run, sky), nl=False)
        return
    if slurm:
        commands = [jobs.slurm_line(job, None if limit is None else jobs.time_limit(limit, job.stop_s))]
    else:
        commands = jobs.torchrun_lines(job, jobs.host_name(master))
    if start and len(commands) > 1:
        raise LaunchError(
            f"--start: given with --nodes {nodes} for torchrun, which starts on each node; allowed: --slurm, --k8s, or "
            "the printed lines, each on its node"
        )
    if start:
        _replace_process(commands[0])
    for command in commands:
        typer.echo(jobs.shell(command))


def _refuse_unused(context: typer.Context, way: str) -> None:
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        used_by = _USED_BY.get(str(parameter.name), (way,))
        if way not in used_by and source is not None and source.name == "COMMANDLINE":
            raise LaunchError(
                f"{parameter.opts[0]}: given for {way}, which has no use for it; allowed with {' or '.join(used_by)}"
            )


def _ranks_per_node(given: int | None, starts_here: bool) -> int:
    """Ranks of each machine. Raises LaunchError for more than this one has, where the start is here."""
    if not starts_here:
        return given or GPUS_PER_NODE
    import torch

    from moba_train.tools.launch.torchrun import check_ranks

    if given is not None:
        check_ranks(given, "--gpus-per-node")
    return given or torch.cuda.device_count() or 1


def _give(text: str, command: list[str], start: bool) -> None:
    """Print `text`, or hand it to the command."""
    import subprocess

    if not start:
        typer.echo(text, nl=False)
        return
    try:
        raise typer.Exit(subprocess.run(command, input=text, text=True, check=False).returncode)
    except OSError as error:
        raise LaunchError(f"--start: {command[0]} cannot be run: {error.strerror}") from None


def _replace_process(command: list[str]) -> None:
    if command[0] == "sbatch" and not Path("launch/slurm.sbatch").exists():
        raise LaunchError(f"--start: {Path.cwd()} has no launch/slurm.sbatch; allowed: the repository's folder")
    if command[0] == "moba-train":  # the PATH may have none, or that of another environment
        command = [sys.executable, "-m", "moba_train.tools.cli", *command[1:]]
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise LaunchError(f"--start: {command[0]} cannot be run: {error.strerror}") from None
