"""What `deploy/` says, as far as it can be checked without the systems it is for."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer.main
import yaml

from millstream.cli.main import app
from millstream.config import Settings, environment_name, load_settings, setting_fields
from millstream.server.exposure import check_exposure
from millstream.testing.broker import BrokerForTests
from millstream.version import VERSION

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = re.sub(r"\\\n\s*", "", (DEPLOY / "docker" / "Dockerfile").read_text())
UNIT = (DEPLOY / "systemd" / "millstream.service").read_text()
MANIFESTS: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "millstream.yaml").read_text()))
VARIABLES = {environment_name(name) for name, _ in setting_fields()}


def instructions(name: str) -> list[str]:
    return re.findall(rf"^{name} (.*)$", DOCKERFILE, re.M)


def manifest(kind: str) -> dict[str, Any]:
    (found,) = [it for it in MANIFESTS if it["kind"] == kind]
    return found


def check_command(words: list[str]) -> None:
    """A command line names commands and options that exist."""
    command: Any = typer.main.get_command(app)
    assert words[0].endswith("millstream")
    options: dict[str, Any] = {}
    for word in words[1:]:
        if word in getattr(command, "commands", {}):
            command = command.commands[word]
            options = {name: it for it in command.params for name in it.opts}
        elif word.startswith("-"):
            assert word in options, f"{' '.join(words)}: there is no {word}"
    assert not getattr(command, "commands", None), f"{' '.join(words)} is not a whole command"


def ports() -> set[int]:
    return {Settings().server.port, Settings().http.port, Settings().mqtt.port}


def test_all_names_of_variables_are_settings() -> None:
    told = {"MILLSTREAM_KEY", "MILLSTREAM_BROKER", "MILLSTREAM_CONFIG", "MILLSTREAM_CA", "MILLSTREAM_NAMESPACE"}
    for path in DEPLOY.rglob("*"):
        if path.is_file():
            found = set(re.findall(r"\bMILLSTREAM_[A-Z_]+", path.read_text()))
            assert found <= VARIABLES | told, path


def test_the_image_is_built_from_files_that_exist() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    for line in instructions("COPY"):
        if "--from" not in line:
            for source in line.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert source not in ignored
    assert set(map(int, instructions("EXPOSE")[0].split())) == ports()
    check_command(json.loads(instructions("CMD")[0]))


def test_the_image_asks_for_a_decision_before_it_serves_everybody() -> None:
    (environment,) = instructions("ENV")
    variables = dict(pair.split("=", 1) for pair in shlex.split(environment) if pair.startswith("MILLSTREAM"))
    settings, _ = load_settings(None, variables, {})
    assert settings.is_public
    with pytest.raises(Exception, match="no TLS"):
        check_exposure(settings)
    check_exposure(load_settings(None, {**variables, "MILLSTREAM_ACCESS__INSECURE": "true"}, {})[0])


def test_the_health_check_of_the_image_finds_a_broker_that_lives(tmp_path: Path) -> None:
    check = json.loads(instructions("HEALTHCHECK")[0].partition("CMD ")[2])
    with BrokerForTests(tmp_path, http=True) as broker:
        program = check[2].replace(":8080", f":{broker.url.rpartition(':')[2]}")
        subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
        for path in ("/health/live", "/health/ready"):
            assert httpx.get(broker.url + path).status_code == 200
    assert subprocess.run([sys.executable, "-c", program], timeout=30, capture_output=True, check=False).returncode


def test_the_manifests_fit_together() -> None:
    pod = manifest("StatefulSet")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert {port["containerPort"] for port in container["ports"]} == ports()
    assert {port["port"] for port in manifest("Service")["spec"]["ports"]} == ports()
    mounted = {mount["name"] for it in (container, *pod["initContainers"]) for mount in it["volumeMounts"]}
    claimed = {claim["metadata"]["name"] for claim in manifest("StatefulSet")["spec"]["volumeClaimTemplates"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]} | claimed
    assert {it["image"] for it in (container, *pod["initContainers"])} == {f"millstream:{VERSION}"}
    labels = manifest("StatefulSet")["spec"]["template"]["metadata"]["labels"]
    for kind in ("Service", "StatefulSet", "PodDisruptionBudget"):
        selector = manifest(kind)["spec"]["selector"]
        assert selector.get("matchLabels", selector) == labels
    check_command(container["args"])
    (configuration,) = manifest("ConfigMap")["data"].items()
    assert container["args"][-1].endswith(configuration[0])
    settings, _ = load_settings(configuration[1], {}, {})
    check_exposure(settings)
    assert settings.needs_keys
    assert container["resources"]["limits"]["memory"] == "1Gi"
    assert 0 < settings.server.memory_bytes_warning < settings.server.memory_bytes_critical < 2**30
    drain_s = settings.server.drain_ms / 1000
    assert pod["terminationGracePeriodSeconds"] > drain_s
    assert int(re.search(r"^TimeoutStopSec=(\d+)$", UNIT, re.M)[1]) > drain_s  # type: ignore[index]
    for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
        assert container[probe]["httpGet"]["path"] in ("/health/live", "/health/ready")


def test_the_first_start_makes_a_key_once_and_keeps_it_to_itself(tmp_path: Path) -> None:
    (first,) = manifest("StatefulSet")["spec"]["template"]["spec"]["initContainers"]
    script = first["command"][2].replace("/data", str(tmp_path))
    script = script.replace("millstream key", f"{sys.executable} -m millstream key")
    for _ in range(2):
        subprocess.run(["sh", "-c", script], check=True, timeout=60)
        key = (tmp_path / "first-key").read_text()
        assert re.fullmatch(r"ms_\w+\n", key)
    assert (tmp_path / "first-key").stat().st_mode & 0o077 == 0
    settings = Settings.model_validate({"access": {"mode": "keys"}})
    with BrokerForTests(tmp_path, settings=settings) as broker, broker.connect(key=key.strip()) as client:
        assert [it.name for it in client.keys.list()] == ["first"]


def test_kubectl_reads_the_manifests() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    command = ["kubectl", "apply", "--dry-run=client", "--validate=false", "-o", "name", "-f"]
    command.append(str(DEPLOY / "kubernetes" / "millstream.yaml"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode and re.search(r"connection refused|no configuration|server|dial", done.stderr):
        pytest.skip("kubectl needs a cluster for this")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == len(MANIFESTS)


def test_the_unit_starts_what_exists() -> None:
    (start,) = re.findall(r"^ExecStart=(.*)$", UNIT, re.M)
    check_command(shlex.split(start))


def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    # It looks whether the program exists, which is not in /opt here.
    unit = tmp_path / "millstream.service"
    unit.write_text(UNIT.replace("/opt/millstream/bin/millstream", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    problems = [line for line in done.stderr.splitlines() if "millstream.service" in line]
    assert not problems, problems
