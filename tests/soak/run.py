"""One soak: a broker, its traffic and its faults, for as long as it is asked to; then everything comes to rest."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import millstream
from millstream.errors import MillstreamError
from tests.queue_kills import TOPIC as JOBS
from tests.soak.audit import SetClock
from tests.soak.faults import ENDS_BROKER, Fault, Happened, Plan
from tests.soak.ledger import read_ledger
from tests.soak.processes import ROOT, SoakBroker, WorkerSlot, processor_s, resident_mb
from tests.soak.proxy import Proxy
from tests.soak.rest import left_in_queues, what_is_left
from tests.soak.sparks import SparkCopy
from tests.soak.tally import Tally
from tests.soak.traffic import mqtt, queues, streams, web
from tests.soak.traffic.world import World

__all__ = ["Sample", "Soak"]

SLOTS: Final = (
    *("orders-0", "orders-1", "readers-0", "readers-1", "jobs-0", "later-0", "sync-0", "sync-1", "keyed-0", "keyed-1"),
    *("web-0", "pages-0", "sensors-0", "screens-0"),
)
BRIEF_SLOTS: Final = tuple(slot for slot in SLOTS if slot not in ("orders-1", "sync-1", "keyed-1"))
PRODUCERS: Final = ("orders", "jobs", "later", "web", "sensors")
#: Of a cycle of rough and steady times.
ROUGH: Final = 0.4
CYCLE_S: Final = (240.0, 720.0)
#: How long everything may take to come to rest; of a brief run, the second.
PATIENCE_S: Final = (180.0, 60.0)
#: What is said of a fault that found nobody.
WITHOUT_EFFECT: Final = ("nothing was synced there", "there was none")
#: Bytes; small, so that logs roll.
SEGMENT_BYTES: Final = 1024 * 1024


@dataclass(frozen=True)
class Sample:
    """The broker at one moment."""

    at_s: float
    life: int
    age_s: float
    resident_mb: float
    processor_s: float
    load: float
    confirmed: int
    received: int


@dataclass
class Soak:
    """See the module."""

    folder: Path
    seed: int
    seconds: float
    spark: bool = False
    brief: bool = False
    faults: list[Happened] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    clocks: list[SetClock] = field(default_factory=list)
    #: What must not happen, seen while it ran.
    findings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        (self.folder / "ledgers").mkdir()
        slots = BRIEF_SLOTS if self.brief else SLOTS
        self.plan = Plan(self.seed, slots, pause_s=0.5 if self.brief else 2.5, spark=self.spark)
        self.broker = SoakBroker(self.folder, _free_ports("native", "http", "mqtt"))
        self.proxy = Proxy("native", "http", "mqtt")
        self.workers = {slot: WorkerSlot(slot, self.folder) for slot in slots}
        self.tally = Tally(self.folder / "ledgers")
        self.copy: SparkCopy | None = None
        self.phase = "setting up"
        self.begin_s = self.end_s = time.monotonic()
        self._rng = random.Random(f"{self.seed} operator")
        self._started_s = 0.0
        self._sampling = threading.Event()
        self._sampler = threading.Thread(target=self._sample, name="samples", daemon=True)

    # --- life ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self._begin()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is left behind, however it went."""
        self._sampling.set()
        for worker in self.workers.values():
            if worker.is_alive():
                worker.kill()
        if self.copy is not None:
            self.copy.kill()
        if self.broker.is_alive():
            self.broker.end(signal.SIGKILL)
        self.proxy.stop()

    def _begin(self) -> None:
        self.proxy.start()
        for name, port in self.broker.ports.items():
            self.proxy.lead_to(name, port)
        self._start_broker()
        addresses = {name: self.proxy.address(name) for name in self.broker.ports}
        pace, session_ms = (4.0, 3000) if self.brief else (5.0, 8000)
        World(str(self.folder), self.seed, **addresses, pace=pace, session_ms=session_ms).save()
        self._make_topics()
        # Whoever begins at the end must be there before the first message.
        for kind in ("screens", ""):
            for worker in self.workers.values():
                if worker.process is None and worker.kind.startswith(kind):
                    worker.start()
            until(self._has_readers, "subscribers of MQTT")
        if self.spark:
            self.copy = SparkCopy(self.folder, addresses["native"])
            self.copy.start()
        until(self._is_busy, "the first message of each kind")
        self._sampler.start()

    def _make_topics(self) -> None:
        config = {"segment_bytes": SEGMENT_BYTES}
        with self.connect() as client:
            client.create_topic(streams.TOPIC, partitions=streams.PARTITIONS, config=config)
            client.create_topic(streams.COPIES, partitions=3, config=config)
            client.create_topic(JOBS, partitions=queues.PARTITIONS, config=config)
            client.create_topic(
                web.TOPIC, partitions=web.PARTITIONS, config={**config, "dedup_window_ms": web.DEDUP_MS}
            )
            for group, policy in queues.GROUPS.items():
                client.queue(JOBS, group=group, policy=policy).close()
            client.queue(web.TOPIC, group=web.GROUP, policy={"max_deliveries": 0, "ack_durability": "sync"}).close()

    def _has_readers(self) -> bool:
        return all(self._has_begun(name) for name, *_ in mqtt.READERS)

    def _has_begun(self, name: str) -> bool:
        return any(note.what == "begun" for note in read_ledger(self.folder / "ledgers" / f"mqtt-{name}.tsv"))

    def _is_busy(self) -> bool:
        self.tally.look()
        kinds = {kind for kind, _ in self.tally.counts}
        return kinds >= {worker.kind for worker in self.workers.values()} - {"sensors", "screens"} | {"mqtt"}

    def connect(self) -> millstream.Client:
        """Not through the network that fails."""
        return millstream.connect(f"127.0.0.1:{self.broker.ports['native']}", timeout_s=60)

    def _start_broker(self) -> None:
        self._started_s = time.monotonic()
        self.broker.start()

    # --- the time of faults --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Faults, one after the other, until the time is over."""
        self.begin_s = time.monotonic()
        self.end_s = self.begin_s + self.seconds
        while time.monotonic() < self.end_s:
            for fault in self.plan.deal(brief=self.brief):
                steady = self._is_steady()
                self.phase = "steady" if steady else "rough"
                if steady and fault.kind in ENDS_BROKER:
                    continue
                time.sleep(max(0.0, min(fault.pause_s, self.end_s - time.monotonic())))
                if time.monotonic() >= self.end_s and not self.brief:
                    return
                self._let_happen(fault)
            if self.brief:
                time.sleep(max(0.0, self.end_s - time.monotonic()))

    def _is_steady(self) -> bool:
        cycle_s = min(max(self.seconds / 5, CYCLE_S[0]), CYCLE_S[1])
        if self.seconds < cycle_s:
            return False
        return (time.monotonic() - self.begin_s) % cycle_s > ROUGH * cycle_s

    def _let_happen(self, fault: Fault) -> None:
        begin_s = time.monotonic()
        said = self._act(fault)
        text = f"{fault}{f': {said}' if said else ''}"
        kind = f"{fault.kind}, without effect" if said in WITHOUT_EFFECT else fault.kind
        self.faults.append(Happened(kind, fault.victim, text, begin_s, time.monotonic()))
        self._look_after()

    def _act(self, fault: Fault) -> str:
        """Do it, and what an operator does about it; returns what there is to say."""
        match fault.kind:
            case "kill broker":
                self.broker.end(signal.SIGKILL)
                self._start_broker()
            case "kill consumer" | "kill producer":
                worker = self.workers[fault.victim]
                worker.kill()
                worker.start()
            case "stop broker":
                self.broker.send(signal.SIGSTOP)
                time.sleep(fault.seconds)
                self.broker.send(signal.SIGCONT)
            case "stop consumer":
                self.workers[fault.victim].send(signal.SIGSTOP)
                time.sleep(fault.seconds)
                self.workers[fault.victim].send(signal.SIGCONT)
            case "full disk":
                self.broker.fill_disk()
                time.sleep(fault.seconds)
                self.broker.empty_disk()
                time.sleep(0.2)
                return self._restart_if_needed()
            case "failed sync":
                return self._fail_sync(fault.victim)
            case "clock":
                self._set_clock(fault.seconds)
            case "cut connections":
                self.proxy.cut(fault.victim, self._rng)
            case "silent network":
                self.proxy.hush()
                time.sleep(fault.seconds)
                self.proxy.speak()
            case "kill Spark worker":
                assert self.copy is not None
                return self.copy.kill_worker(self._rng)
            case "kill Spark driver":
                assert self.copy is not None
                self.copy.restart()
        return ""

    def _set_clock(self, ahead_s: float) -> None:
        before_ms = self.clocks[-1].after_ms if self.clocks else 0
        self.broker.set_clock(ahead_s)
        self.clocks.append(SetClock(time.time_ns() // 1_000_000, before_ms, round(ahead_s * 1000)))

    def _fail_sync(self, path: str) -> str:
        self.broker.fail_sync(path)
        deadline_s = time.monotonic() + 3
        while not self.broker.sync_failed() and time.monotonic() < deadline_s:
            time.sleep(0.02)
        self.broker.heal_sync()
        if not self.broker.sync_failed():
            return WITHOUT_EFFECT[0]
        time.sleep(self._rng.uniform(0.1, 1.0))
        return self._restart_if_needed() or "the broker goes on"

    def _restart_if_needed(self) -> str:
        if not self.broker.needs_restart():
            return ""
        unwell = {name: status for name, status in self.broker.health().items() if status != "healthy"}
        number = self._rng.choice((signal.SIGTERM, signal.SIGKILL))
        self.broker.end(number)
        self._start_broker()
        return f"{', '.join(unwell) or 'no answer'}: restarted ({number.name})"

    def _look_after(self) -> None:
        """Nobody ends by himself."""
        if not self.broker.is_alive():
            code = self.broker.process.returncode if self.broker.process is not None else None
            self.findings.append(f"the broker ended by itself, with {code}")
            self._start_broker()
        for worker in self.workers.values():
            if not worker.is_alive():
                self.findings.append(
                    f"{worker.slot}.{worker.lives} ended by itself, with {worker.code}: see workers.log"
                )
                worker.start()
        if self.copy is not None and self.copy.ended:
            self.findings.append(f"the Spark pipeline ended by itself: {self.copy.last_words}")
            self.copy.restart()

    # --- the end -------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """No more faults: what was sent arrives, everybody leaves, and the broker is killed a last time."""
        self.phase = "coming to rest"
        self.broker.empty_disk()
        self.broker.heal_sync()
        self._set_clock(0)
        self.proxy.speak()
        time.sleep(0.2)
        self._restart_if_needed()
        self._end([worker for worker in self.workers.values() if worker.kind in PRODUCERS])
        self._drain()
        self._sampling.set()
        self._end([worker for worker in self.workers.values() if worker.kind not in PRODUCERS])
        if self.copy is not None:
            self.copy.end()
        time.sleep(0.5)  # what was answered is on disk by now, also where answers do not wait for it
        self.broker.end(signal.SIGKILL)
        self._start_broker()
        with self.connect() as client:
            if left := left_in_queues(client):
                self.findings.append(f"what was settled before the last kill came back: {left}")

    def verify_files(self) -> None:
        """Of a broker that has ended: every batch is whole, and every index fits."""
        command = [sys.executable, "-m", "millstream", "log", "verify", str(self.broker.data)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            self.findings.append(f"millstream log verify: {(done.stdout + done.stderr).strip()[-500:]}")

    def _end(self, workers: list[WorkerSlot]) -> None:
        for worker in workers:
            worker.send(signal.SIGTERM)
        deadline_s = time.monotonic() + PATIENCE_S[self.brief]
        for worker in workers:
            if not worker.wait(max(1.0, deadline_s - time.monotonic())):
                self.findings.append(f"{worker.slot} does not come to an end: what it waits for is not confirmed")
                worker.kill()

    def _drain(self) -> None:
        deadline_s = time.monotonic() + PATIENCE_S[self.brief]
        while left := self._left():
            if time.monotonic() > deadline_s:
                self.findings.append(f"it does not come to rest: {left}")
                return
            time.sleep(0.5)

    def _left(self) -> dict[str, object]:
        try:
            with self.connect() as client:
                return what_is_left(client, self.folder / "ledgers", spark=self.copy is not None)
        except MillstreamError as problem:
            return {"broker": str(problem)}

    # --- samples -------------------------------------------------------------------------------------------------

    def _sample(self) -> None:
        while not self._sampling.wait(0.25 if self.brief else 1.0):
            self.tally.look()
            pid, now_s = self.broker.pid, time.monotonic()
            if (mb := resident_mb(pid)) > 0:
                self.samples.append(
                    Sample(
                        round(now_s, 3),
                        self.broker.starts,
                        round(now_s - self._started_s, 3),
                        round(mb, 2),
                        processor_s(pid),
                        os.getloadavg()[0],
                        self.tally.total("confirmed"),
                        self.tally.total("received"),
                    )
                )


def until(condition: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{what}: waited in vain")
        time.sleep(0.05)


def _free_ports(*names: str) -> dict[str, int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in names]
    ports = {name: each.getsockname()[1] for name, each in zip(names, sockets, strict=True)}
    for each in sockets:
        each.close()
    return ports
