"""`moba-train launch`: the lines and manifests for torchrun, Slurm and Kubernetes, by the published schemas."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

import moba_train.attention.registry  # noqa: F401
from moba_train.config.load import load_config, parse_config
from moba_train.tools.cli import app
from moba_train.tools.launch import kubernetes, ray_nodes
from tests.commands import run_app

ROOT = Path(__file__).parents[3]
RECIPE = "configs/recipes/short-then-long.yaml"
PODS = ["--image", "registry.example/moba_train:1", "--claim", "training:/data", "run_dir=/data/runs/a"]

ANY_NUMBER = [f"stages.{stage}.parallel.cp=1" for stage in (1, 2, 3)]
"""Overrides with which the recipe's layout suits any number of GPUs."""


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def launch(*arguments: str) -> str:
    return run_app(app, "launch", RECIPE, *arguments).stdout


def refused(*arguments: str) -> str:
    result = run_app(app, "launch", RECIPE, *arguments, code=2)
    return " ".join(result.output.split())


def test_torchrun_gets_a_line_for_each_node() -> None:
    one = launch("--nodes", "1", "--gpus-per-node", "8", "telemetry.wandb.project=two words")
    assert shlex.split(one) == ["moba-train", "train", RECIPE, "telemetry.wandb.project=two words", "--gpus", "8"]
    lines = launch("--nodes", "2", "--master", "alpha").splitlines()
    assert lines == [
        f"NODES=2 NODE_RANK={node} MASTER=alpha GPUS=8 bash launch/multinode.sh {RECIPE}" for node in (0, 1)
    ]


def test_skypilot_gets_a_task_whose_nodes_know_their_places(tmp_path: Path) -> None:
    """The text of `run`, executed with SkyPilot's variables, calls the launcher as each node must."""
    text = launch("--sky", "H100", "--nodes", "2", "name=Long_Run", "telemetry.wandb.project=two words")
    assert "# All nodes must see the data and" in text
    assert "# Disks go with their machines: set checkpoint.upload" in text
    with_copies = launch("--sky", "H100", "checkpoint.upload=s3://bucket/run")
    assert "--secret AWS_ACCESS_KEY_ID" in with_copies
    assert "Disks go" not in with_copies
    setup = shlex.split(yaml.safe_load(with_copies)["setup"])[-1]
    assert setup == """source launch/setup.sh; "$PYTHON" -m pip install --quiet 's3fs>=2025.9'"""
    for key in ("checkpoint.resume_from", "init_from"):
        begun_elsewhere = launch("--sky", "H100", f"{key}=s3://bucket/run")
        assert "--secret AWS_ACCESS_KEY_ID" in begun_elsewhere
        assert "# Disks go with their machines" in begun_elsewhere
        assert "s3fs" in begun_elsewhere
    assert "--secret" not in launch("--sky", "H100", "checkpoint.upload=file:///nfs/run")
    task = yaml.safe_load(text)
    assert task["name"] == "long-run"
    assert task["num_nodes"] == 2
    assert task["resources"] == {"accelerators": {"H100": 8}}
    launcher = tmp_path / "launch" / "multinode.sh"
    launcher.parent.mkdir()
    launcher.write_text('echo "$NODES $NODE_RANK $MASTER $GPUS"; printf "%s\\n" "$@"')
    places = {"NUM_NODES": "2", "NODE_RANK": "1", "NODE_IPS": "10.0.0.4\n10.0.0.5", "NUM_GPUS_PER_NODE": "8"}
    environment = os.environ | {f"SKYPILOT_{name}": value for name, value in places.items()}
    done = subprocess.run(["bash", "-c", task["run"]], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["2 1 10.0.0.4 8", RECIPE, "name=Long_Run", "telemetry.wandb.project=two words"]
    assert "--sky: given 'H100:8'; allowed: SkyPilot's name of a GPU" in refused("--sky", "H100:8")
    assert "--slurm and --sky: given both" in refused("--sky", "H100", "--slurm")
    assert "--start: given with --sky" in refused("--sky", "H100", "--start")


def test_the_task_keeps_to_skypilots_schemas() -> None:
    schemas = pytest.importorskip("sky.utils.schemas")
    task = yaml.safe_load(launch("--sky", "H100", "--nodes", "2"))
    for value, schema in ((task, schemas.get_task_schema()), (task["resources"], schemas.get_resources_schema())):
        jsonschema.validate(value, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(value | {"nodes": 2}, schema)


def test_slurm_gets_one_line() -> None:
    line = shlex.split(launch("--slurm", "--nodes", "4", "--time", "24:00:00", "--stop-seconds", "900"))
    assert line[0] == "sbatch"
    assert line[-2:] == ["launch/slurm.sbatch", RECIPE]
    for option in ("--nodes 4", "--gpus-per-node 8", "--time 24:00:00", "--signal=B:USR1@900"):
        assert option in " ".join(line)


@pytest.mark.parametrize(
    ("arguments", "option", "way"),
    [
        (("--image", "moba:1"), "--image", "--k8s"),
        (("--slurm", "--claim", "a:/data"), "--claim", "--k8s"),
        (("--nodes", "2", "--restarts", "3"), "--restarts", "--k8s"),
        (("--master", "alpha"), "--master", "torchrun on several nodes"),
        (("--time", "1:00:00"), "--time", "--slurm"),
        (("--stop-seconds", "60"), "--stop-seconds", "--slurm or --k8s"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(arguments: tuple[str, ...], option: str, way: str) -> None:
    text = refused(*arguments)
    assert f"{option}: given for " in text
    assert f"allowed with {way}" in text


@pytest.mark.parametrize("limit", ["11", "10:01", "1:00:00", "1-0", "1-0:30", "1-0:0:30", "0", "unlimited"])
def test_slurm_gets_the_time_limit_as_sbatch_takes_it(limit: str) -> None:
    assert f" --time {limit} " in launch("--slurm", "--time", limit)


@pytest.mark.parametrize("host", ["node_0", "alpha.example", "10.0.0.1", "fe80::1%eth0", "::1"])
def test_host_names_and_addresses_reach_the_nodes_as_they_are(host: str) -> None:
    assert f"MASTER={host} " in launch("--nodes", "2", "--master", host)


@pytest.mark.parametrize(
    "image", ["moba_train", "localhost:5000/a/b__c:1.0", "ghcr.io/org/a-b.c", "[::1]:5/a@sha256:" + "0f" * 32]
)
def test_pods_run_the_image_as_it_is_given(image: str) -> None:
    arguments = ["--image", image, "--claim", "my.claim-1://data/a b", "run_dir=/data/a b/one"]
    _, job = yaml.safe_load_all(launch("--k8s", "trainjob", *arguments))
    assert job["spec"]["trainer"]["image"] == image
    (pod,) = [each["template"]["spec"]["template"]["spec"] for each in _replicated(job)]
    assert pod["containers"][0]["volumeMounts"][1]["mountPath"] == "/data/a b"


def test_pods_are_warned_of_files_that_are_not_on_the_volume() -> None:
    on_it = "data={tokenizer: /data/tokenizer.json, train: [{path: /data/web}], validation: [{path: /data/held-out}]}"
    stages = [f"stages.{stage}.train=[{{path: /data/books}}]" for stage in range(4)]
    result = CliRunner().invoke(app, ["launch", RECIPE, "--k8s", "jobset", *PODS, on_it, *stages])
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    beside = [on_it.replace("/data/web", "web"), *stages, "stages.1.train=[{path: web}, {path: ../books}]"]
    said = CliRunner().invoke(app, ["launch", RECIPE, "--k8s", "jobset", *PODS, *beside]).stderr
    first, second = said.splitlines()
    assert first.startswith("warning: data.train[0].path: 'web' is /opt/moba_train/web in the pods, which is not on")
    assert second.startswith("warning: stages[1].train[1].path: '../books' is /opt/books in the pods")


def _replicated(job: dict[str, Any]) -> list[dict[str, Any]]:
    return job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]


def manifests(kind: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(launch("--nodes", "8", "--k8s", kind, *PODS)))


def schema(name: str, module: str) -> Any:
    models = pytest.importorskip(f"kubeflow_trainer_api.models.{module}", reason="needs kubeflow-trainer-api")
    return getattr(models, name)


@pytest.mark.parametrize(
    ("kind", "name", "module"),
    [
        ("jobset", "JobsetV1alpha2JobSet", "jobset_v1alpha2_job_set"),
        ("trainjob", "TrainerV1alpha1TrainJob", "trainer_v1alpha1_train_job"),
    ],
)
def test_manifests_keep_to_the_published_schemas(kind: str, name: str, module: str) -> None:
    """The models are generated from the schemas; they drop keys that these do not have, so what comes back is equal
    only without such keys."""
    config_map, job = manifests(kind)
    assert schema(name, module).from_dict(job).to_dict() == job
    core = schema("IoK8sApiCoreV1ConfigMap", "io_k8s_api_core_v1_config_map")
    assert core.from_dict(config_map).to_dict() == config_map
    broken = yaml.safe_load(yaml.safe_dump(job))
    broken["spec"]["nodes"] = 8
    assert schema(name, module).from_dict(broken).to_dict() != broken


@pytest.mark.parametrize("kind", ["jobset", "trainjob", "rayjob"])
def test_pods_train_the_recipe_with_everything_it_extends(kind: str) -> None:
    config_map, _ = manifests(kind)
    text = config_map["data"][kubernetes.RECIPE_FILE]
    assert parse_config(text, "recipe.yaml") == load_config(Path(RECIPE), ["run_dir=/data/runs/a"])


def test_a_rayjob_has_all_nodes_as_pods_that_kubernetes_takes() -> None:
    _, job = manifests("rayjob")
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 7  # the head trains as well
    template = schema("IoK8sApiCoreV1PodTemplateSpec", "io_k8s_api_core_v1_pod_template_spec")
    for group in (cluster["headGroupSpec"], workers):
        assert template.from_dict(group["template"]).to_dict() == group["template"]
        (container,) = group["template"]["spec"]["containers"]
        given = {variable["name"]: variable["value"] for variable in container["env"]}
        assert given == {"RESTARTS": "0", "RAY_JOB_STOP_WAIT_TIME_S": "600", "MOBA_TRAIN_STOPPED_CODE": "143"}
    python, *arguments = shlex.split(job["spec"]["entrypoint"])
    assert python == "python3"
    assert arguments[:2] == ["-m", ray_nodes.__name__]
    assert arguments[2:] == ["--nodes", "8", "--gpus", "8", "/etc/moba_train/recipe.yaml"]
    (_, alone) = yaml.safe_load_all(launch("--k8s", "rayjob", *PODS))
    assert alone["spec"]["rayClusterSpec"]["workerGroupSpecs"] == []


@pytest.mark.skipif("MOBA_KUBERAY_CRD" not in os.environ, reason="MOBA_KUBERAY_CRD names KubeRay's ray.io_rayjobs.yaml")
def test_a_rayjob_keeps_to_kuberays_schema() -> None:
    definition = yaml.load(Path(os.environ["MOBA_KUBERAY_CRD"]).read_text(), yaml.CSafeLoader)
    (version,) = [each for each in definition["spec"]["versions"] if each["name"] == "v1"]
    expected = version["schema"]["openAPIV3Schema"]
    expected["properties"]["metadata"] = {"required": ["name"], "properties": {"name": {}}}
    _only_known_keys(expected)
    _, job = manifests("rayjob")
    jsonschema.validate(job, expected)
    job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["container"] = []
    with pytest.raises(jsonschema.ValidationError, match="'container' was unexpected"):
        jsonschema.validate(job, expected)


def _only_known_keys(schema: Any) -> None:
    """Kubernetes drops keys that a schema does not have; jsonschema would take them."""
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _only_known_keys(part)
    if isinstance(schema, dict) and isinstance(schema.get("properties"), dict):
        schema["additionalProperties"] = schema.get("x-kubernetes-preserve-unknown-fields", False)


def test_a_jobset_runs_multinode_on_each_node_and_starts_again_after_failures() -> None:
    _, job = manifests("jobset")
    (replicated,) = job["spec"]["replicatedJobs"]
    indexed = replicated["template"]["spec"]
    assert (replicated["replicas"], indexed["completions"], indexed["parallelism"]) == (1, 8, 8)
    pod = indexed["template"]["spec"]
    (container,) = pod["containers"]
    given = {variable["name"]: variable.get("value") for variable in container["env"]}
    script = (ROOT / "launch" / "multinode.sh").read_text()
    for name in ("NODES", "NODE_RANK", "MASTER", "PORT", "GPUS", "RESTARTS"):
        assert name in given
        assert f"${{{name}:-" in script
    # JobSet's names of pods: NAME-REPLICATED_JOB-JOB_INDEX-POD_INDEX.SUBDOMAIN
    assert given["MASTER"] == "short-then-long-node-0-0." + job["spec"]["network"]["subdomain"]
    assert given["MOBA_TRAIN_STOPPED_CODE"] == "143"
    assert pod["terminationGracePeriodSeconds"] == 600
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted["shared"] == "/data"
    assert container["command"][-1] == mounted["recipe"] + "/recipe.yaml"
    assert mounted.keys() == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slurm", "--k8s", "jobset"], "--slurm and --k8s: given both"),
        (["--k8s", "jobset"], "--k8s needs --image and --claim"),
        (["--k8s", "jobset", "--image", "x", "--claim", "training"], "--claim: given 'training'; allowed: NAME:PATH"),
        (["--k8s", "jobset", *PODS[:-1]], "run_dir: given 'runs/short-then-long', in the pods /opt/moba_train/runs/"),
        (["--k8s", "jobset", *PODS[:-1], "run_dir=/data/../runs/a"], "in the pods /runs/a, which is not on the volume"),
        (["--k8s", "jobset", "--image", "x", "--claim", "a:/opt"], "a volume there hides /opt/moba_train"),
        (["--k8s", "trainjob", "--image", "x", "--claim", "a:/data/../dev/shm"], "hides /dev/shm, which the pods need"),
        (["--nodes", "2", "--start"], "--start: given with --nodes 2 for torchrun"),
        (["--nodes", "3", "--gpus-per-node", "3"], "9"),
        (["--slurm", "name='12'"], "name: given '12'"),
        (["--nodes", "2", "--master", ""], "--master: given ''; allowed: a host name or an IP address"),
        (["--nodes", "2", "--master", "alpha GPUS=1"], "--master: given 'alpha GPUS=1'"),
        (["--nodes", "2", "--master", "--help"], "--master: given '--help'"),
        (["--nodes", "2", "--master", ":"], "--master: given ':'"),
        (["--nodes", "2", "--master", "::1%a b"], "--master: given '::1%a b'"),
        (["--nodes", "2", "--master", "alpha:29500"], "--master: given 'alpha:29500'"),
        (["--slurm", "--time", ""], "--time: given ''; allowed: MINUTES, "),
        (["--slurm", "--time", "1:00\n#SBATCH --exclusive"], "--time: given '1:00\\n#SBATCH --exclusive'"),
        (["--slurm", "--time", "1-2:3:4:5"], "--time: given '1-2:3:4:5'"),
        (["--slurm", "--time", "1h"], "--time: given '1h'"),
        (["--slurm", "--time", "10"], "--time: given 10, which is 600 s: the run is asked to stop 600 s before"),
        (["--slurm", "--time", "0-0:14:59", "--stop-seconds", "900"], "which is 899 s"),
        (["--slurm", "--stop-seconds", "70000"], "70000"),
        (["--k8s", "jobset", "--image", "", "--claim", "a:/data"], "--k8s needs --image"),
        (["--k8s", "jobset", "--image", "x\n", "--claim", "a:/data", "run_dir=/data/a"], "--image: given 'x\\n'"),
        (["--k8s", "jobset", "--image", "My/Image", "--claim", "a:/data", "run_dir=/data/a"], "--image: given 'My/Im"),
        (["--k8s", "jobset", "--image", "a:b c", "--claim", "a:/data", "run_dir=/data/a"], "--image: given 'a:b c'"),
        (["--k8s", "jobset", "--image", "x", "--claim", "A_b:/data"], "--claim: given 'A_b:/data'; allowed: NAME:PATH"),
        (["--k8s", "jobset", "--image", "x", "--claim", 'a"b:/data'], "--claim: given 'a\"b:/data'"),
        (["--k8s", "jobset", "--image", "x", "--claim", "a:/da:ta"], "an absolute path without a colon"),
        (["--k8s", "jobset", "--image", "x", "--claim", "a:/da\nta"], "--claim: given 'a:/da\\nta'"),
        (["--k8s", "jobset", *PODS, "--restarts", str(2**31)], "2147483648"),
    ],
)
def test_what_cannot_be_started_is_refused(arguments: list[str], message: str) -> None:
    assert message in refused(*arguments)


def test_a_machine_has_eight_gpus_by_default() -> None:
    assert "--gpus-per-node 8" in launch("--slurm", "--nodes", "2")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What `launch --start` turns this process into."""
    started: list[list[str]] = []
    monkeypatch.setattr("os.execvp", lambda program, command: started.append([program, *command]))
    return started


def test_start_trains_with_the_python_that_runs_the_command(started: list[list[str]]) -> None:
    """The environment that has it may not be on the PATH."""
    launch("--start", "--gpus-per-node", "8")
    train = [sys.executable, "-m", "moba_train.tools.cli", "train", RECIPE, "--gpus", "8"]
    assert started == [[sys.executable, *train]]


@pytest.mark.parametrize(("here", "ranks"), [(0, 1), (1, 1), (2, 2)])
def test_start_takes_the_gpus_of_this_machine(
    here: int, ranks: int, started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `train` does: a rank on the CPU where there is none."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: here)
    launch("--start", *ANY_NUMBER)
    launch("--start", "--gpus-per-node", str(ranks), *ANY_NUMBER)
    assert [command[-2:] for command in started] == [["--gpus", str(ranks)]] * 2


def test_start_refuses_more_gpus_than_this_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    message = refused("--start", "--gpus-per-node", "4")
    assert "--gpus-per-node: given 4; allowed: 1 to 2, the GPUs of this machine" in message
    assert launch("--gpus-per-node", "4", *ANY_NUMBER).endswith(" --gpus 4\n")


def test_start_hands_the_manifest_to_kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f"#!/bin/sh\necho $* > {tmp_path}/arguments; cat > {tmp_path}/manifest; exit 3\n")
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert CliRunner().invoke(app, ["launch", RECIPE, "--k8s", "jobset", *PODS, "--start"]).exit_code == 3
    assert (tmp_path / "arguments").read_text().split() == ["apply", "-f", "-"]
    assert (tmp_path / "manifest").read_text() == launch("--k8s", "jobset", *PODS)
