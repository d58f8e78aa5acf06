"""Somebody who types what a page says, at a real broker in a directory of the test."""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

import millstream
from millstream.cli.main import main
from millstream.client import Client
from millstream.client.address import Target
from millstream.config import LogSettings, Settings
from millstream.errors import MillstreamError
from millstream.server import lifecycle
from millstream.server.logs import set_up_logs
from millstream.testing.broker import BrokerForTests
from tests.e2e.docs.pages import Step, resembles

__all__ = ["Impatient", "Reader"]

#: What curl says when it was told to stop waiting: streams and long polls have no end of their own.
_OUT_OF_TIME = 28
_OPERATORS = {"|", ">", "<", "&", "&&", "||", ";"}


class Impatient(Client):
    """A client whose loops end when nothing more comes; those of the pages go on for ever."""

    patience_s = 1.0
    once_subscribed: Callable[[], object] = staticmethod(lambda: None)

    def queue(self, topic: str, **options: Any) -> Any:
        return super().queue(topic, **self._impatient(options))

    def stream(self, topics: Any, **options: Any) -> Any:
        return super().stream(topics, **self._impatient(options))

    def subscribe(self, *patterns: str, **options: Any) -> Any:
        subscription = super().subscribe(*patterns, **self._impatient(options))
        self.once_subscribed()
        return subscription

    def _impatient(self, options: dict[str, Any]) -> dict[str, Any]:
        return {**options, "timeout_s": options.get("timeout_s") or self.patience_s}


class _Terminal(io.StringIO):
    """Where somebody sits who agrees to everything."""

    def isatty(self) -> bool:
        return True


class Reader:
    """Follows the steps of one page.  Programs share their names, as in one interactive session."""

    def __init__(
        self, directory: Path, capture: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, page: str
    ) -> None:
        self.directory = directory
        self._capture = capture
        self.patch = monkeypatch
        self.names: dict[str, Any] = {"millstream": millstream, "datetime": datetime, "timedelta": timedelta}
        self.names |= {"UTC": UTC, "__name__": page}
        #: What a page says as an example, and what it is here; found out when it is needed.
        self.instead: dict[str, Callable[[], str]] = {
            "/var/lib/millstream": lambda: str(directory / "data"),
            "localhost:8080": lambda: self.broker.url.partition("//")[2],
            "localhost:9092": lambda: self.broker.address,
            '"localhost", 1883': lambda: f'"127.0.0.1", {self.broker.mqtt_port}',
        }
        #: What is done just before a step, by a piece of its text.
        self.before: dict[str, Callable[[], object]] = {}
        #: Pieces of programs that go on while others run.
        self.beside: set[str] = set()
        self.failures: list[MillstreamError] = []
        #: What the last step printed, and each program.
        self.said = ""
        self.printed: list[str] = []
        self.broker: BrokerForTests
        self._brokers: list[BrokerForTests] = []
        #: Subscribers in terminals of their own, which wait for what later steps publish.
        self._listening: list[tuple[Step, subprocess.Popen[str]]] = []
        monkeypatch.chdir(directory)
        for name in ("MILLSTREAM_KEY", "MILLSTREAM_CA", "MILLSTREAM_NAMESPACE", "MILLSTREAM_CONFIG"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("MILLSTREAM_SERVER__PORT", "0")
        monkeypatch.setenv("MILLSTREAM_HTTP__PORT", "0")
        monkeypatch.setenv("MILLSTREAM_MQTT__PORT", "0")
        # `millstream serve` reads its options as ever, and then goes on beside us instead of in our place.
        monkeypatch.setattr(lifecycle, "serve", self._serve)

    # --- brokers ---------------------------------------------------------------------------------------------------

    def start(self, settings: Settings | None = None) -> None:
        """A broker, in place of the one before."""
        self.close()
        self.broker = BrokerForTests(self.directory / "data", settings=settings, http=True, mqtt=True).start()
        self._brokers.append(self.broker)
        set_up_logs(LogSettings(), io.StringIO())  # it shares this process and would log into the output
        self.patch.setenv("MILLSTREAM_BROKER", self.broker.address)

    def _serve(self, settings: Settings, *_: object) -> int:
        assert Path(settings.storage.data).resolve() == (self.directory / "data").resolve()
        self.start(settings)
        return 0

    def connect(self) -> Impatient:
        """The `client` of the page's programs."""
        client = Impatient(Target.of(self.broker.address, client_id="reader", key=None, timeout_s=30))
        self.broker._clients.append(client)
        self.names["client"] = client
        return client

    def close(self) -> None:
        while self._listening:
            self._listening.pop()[1].kill()
        while self._brokers:
            self._brokers.pop().stop()

    # --- steps -----------------------------------------------------------------------------------------------------

    def follow(self, step: Step) -> None:
        text = step.text
        for piece, prepare in self.before.items():
            if piece in text:
                prepare()
        for example, here in self.instead.items():
            if example in text:
                text = text.replace(example, here())
        self._capture.readouterr()
        if step.language == "python":
            self._run_program(text, step)
        else:
            words = shlex.split(text, comments=True)
            assert not _OPERATORS.intersection(words), f"{step.place}: only a shell can do that: {text}"
            name = Path(words[0]).name
            run = {
                "millstream": self._run_millstream,
                "curl": self._run_curl,
                "openssl": self._run_openssl,
                "export": self._export,
                "mosquitto_pub": self._run_mosquitto_pub,
                "mosquitto_sub": self._run_mosquitto_sub,
            }[name]
            run(words[1:], step)
        listens = any(waiting is step for waiting, _ in self._listening)
        if not listens and not step.text.startswith("millstream serve"):  # a process tells what that prints
            self._compare(step)

    def finish(self) -> None:
        """Look at what those have printed who were waiting for others."""
        while self._listening:
            step, process = self._listening.pop()
            self._end_of(step, process, timeout_s=10)
            self._compare(step)

    def _compare(self, step: Step) -> None:
        if step.shown.strip():
            assert resembles(self.said, step.shown), f"{step.place}: {step.text}\nprints\n{self.said}"

    def _run_program(self, text: str, step: Step) -> None:
        # As many empty lines before it that a traceback names lines of the page.
        program = compile("\n" * (step.line - 1) + text, step.page, "exec")
        if any(piece in text for piece in self.beside):
            names = {**self.names, "client": self.broker.connect()}
            threading.Thread(target=self._run_beside, args=(program, names), daemon=True).start()
        else:
            exec(program, self.names)
        self.said = self._output()[0]
        self.printed.append(self.said)

    def _run_beside(self, program: CodeType, names: dict[str, Any]) -> None:
        try:
            exec(program, names)
        except MillstreamError as error:
            if self._brokers:  # it was not cut off by us
                self.failures.append(error)

    def _run_millstream(self, words: list[str], step: Step) -> None:
        self.patch.setattr(sys, "stdin", _Terminal("y\n"))
        with pytest.raises(SystemExit) as ended:
            main(words)
        self.said, complaint = self._output()
        assert ended.value.code == 0, f"{step.place}: {step.text}\n{self.said}{complaint}"

    def _run_curl(self, words: list[str], step: Step) -> None:
        curl = shutil.which("curl")
        if curl is None:
            pytest.skip("there is no curl")
        waits = "-N" in words or any("wait_ms=" in word for word in words)
        command = [curl, "-sS", "--fail-with-body", "-m", "0.5" if waits else "10", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        self.said = done.stdout
        allowed = (0, _OUT_OF_TIME) if waits else (0,)
        assert done.returncode in allowed, f"{step.place}: {step.text}\n{done.stdout}{done.stderr}"

    def _run_openssl(self, words: list[str], step: Step) -> None:
        done = subprocess.run(["openssl", *words], cwd=self.directory, capture_output=True, text=True)
        assert done.returncode == 0, f"{step.place}: {done.stderr}"
        self.said = done.stdout

    def _run_mosquitto_pub(self, words: list[str], step: Step) -> None:
        self._end_of(step, self._mosquitto("mosquitto_pub", words), timeout_s=10)

    def _run_mosquitto_sub(self, words: list[str], step: Step) -> None:
        """Goes on beside us once it has subscribed, unless it has everything that it wants at once."""
        metrics = self.broker.broker.metrics
        before = metrics.mqtt_subscriptions
        process = self._mosquitto("mosquitto_sub", words)
        deadline_s = time.monotonic() + 10
        while process.poll() is None and metrics.mqtt_subscriptions <= before:
            assert time.monotonic() < deadline_s, f"{step.place}: {step.text}\ndoes not subscribe"
            time.sleep(0.01)
        try:
            self._end_of(step, process, timeout_s=0.5)
        except subprocess.TimeoutExpired:
            self._listening.append((step, process))

    def _mosquitto(self, name: str, words: list[str]) -> subprocess.Popen[str]:
        program = shutil.which(name)
        if program is None:
            pytest.skip(f"there is no {name}")
        command = [program, "-h", "127.0.0.1", "-p", str(self.broker.mqtt_port), *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def _end_of(self, step: Step, process: subprocess.Popen[str], timeout_s: float) -> None:
        self.said, complaint = process.communicate(timeout=timeout_s)
        assert process.returncode == 0, f"{step.place}: {step.text}\n{self.said}{complaint}"

    def _export(self, words: list[str], _step: Step) -> None:
        for word in words:
            name, _, value = word.partition("=")
            assert re.fullmatch(r"MILLSTREAM_[A-Z_]+", name)
            self.patch.setenv(name, value)

    def _output(self) -> tuple[str, str]:
        sys.stdout.flush()
        sys.stderr.flush()
        shown = self._capture.readouterr()
        return shown.out, shown.err

    # --- while a program runs ----------------------------------------------------------------------------------------

    def press_ctrl_c(self, when: Callable[[], object]) -> None:
        """As soon as the program that is about to run listens to it, and this is so."""
        usual = signal.getsignal(signal.SIGINT)

        def watch() -> None:
            while self._brokers:  # nobody else's program is to be stopped, whatever went wrong here
                if signal.getsignal(signal.SIGINT) is not usual and when():
                    os.kill(os.getpid(), signal.SIGINT)
                    return
                time.sleep(0.02)

        threading.Thread(target=watch, daemon=True).start()
