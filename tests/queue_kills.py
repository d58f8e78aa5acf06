"""Everything that queues do, at once, while the broker and its consumers are killed; and the audit afterwards.

Two groups read one topic: the acks of one are on disk before they are answered, those of the other soon after.  What
shall become of a message stands in the message, so that any consumer does the same with it, and the audit knows what
must have happened.  Consumers write down what they see and do, before and after they do it; a consumer that is killed
leaves its diary behind.

`python -m tests.queue_kills ADDRESS GROUP STYLE DIARY SEED` is one consumer as a process of its own.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import millstream
from millstream import Settled
from millstream.errors import MillstreamError
from millstream.testing.broker import BrokerProcess

TOPIC, LETTERS, PARTITIONS = "jobs", "jobs.dlq", 2
GROUPS = {"sync": "sync", "async": "async"}
STYLES = ("batches", "ahead")
#: Retries follow so soon that several happen between two kills.
RETRY = "standard,max_retries=3,initial=20ms,max=40ms"
FAILURES_TO_DEATH, FAILURES_OF_FLAKY = 4, 2
KINDS = ("ack",) * 12 + ("flaky",) * 3 + ("poison", "reject")
#: Makes the journals, which carry dead letters to their topic, grow and roll.
PADDING = "x" * 6000
#: An ack lives in memory for so long at most; the rest is for a broker that waits for a processor.
FLUSH_S, PATIENCE_S = 0.05, 1.0
#: How much later than the broker answers a consumer may write that down.
DIARY_S = 1.0


class Entry(NamedTuple):
    """A line of a diary: `got` a message, `try` something, or what came of that (`done`, `retried`, `dead`)."""

    at_s: float
    wall_ms: int
    group: str
    what: str
    place: tuple[int, int]
    failures: int
    value: str
    #: Which lease it came with.
    lease: str = ""


class Diary:
    """Written line by line, so that whatever kills the writer leaves whole lines."""

    def __init__(self, path: Path, group: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._group = group

    def note(self, what: str, messages: Iterable[Any]) -> None:
        now_s, wall_ms = time.monotonic(), time.time_ns() // 1_000_000
        lines = [
            f"{now_s}\t{wall_ms}\t{self._group}\t{what}\t{m.partition}\t{m.offset}\t{m.failures}\t{story(m.text)}\t"
            f"{lease_in(m.receipt)}\n"
            for m in messages
        ]
        os.write(self._file, "".join(lines).encode())


def read_diary(path: Path) -> list[Entry]:
    entries = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            at_s, wall_ms, group, what, partition, offset, failures, value, lease = line.rstrip("\n").split("\t")
            place = (int(partition), int(offset))
            entries.append(Entry(float(at_s), int(wall_ms), group, what, place, int(failures), value, lease))
    return entries


def lease_in(receipt: str) -> str:
    """What names the lease of a message."""
    return receipt.rpartition(":")[2]


def story(text: str) -> str:
    """The value without its padding: producer:number:kind:due."""
    return text.partition("|")[0]


def kind_of(value: str) -> str:
    return value.split(":")[2]


def due_ms_of(value: str) -> int:
    return int(value.split(":")[3])


# --- consumers -------------------------------------------------------------------------------------------------------


def choose(message: Any) -> str:
    """What every consumer does with this message."""
    if "millstream-replayed-from" in message.headers:
        return "ack"
    kind = kind_of(story(message.text))
    if kind == "flaky":
        return "nack" if message.failures < FAILURES_OF_FLAKY else "ack"
    return {"ack": "ack", "poison": "nack", "reject": "reject"}[kind]


def settle(queue: Any, messages: Sequence[Any], diary: Diary, rng: random.Random) -> None:
    """Settle many and wait for the answer."""
    chosen: defaultdict[str, list[Any]] = defaultdict(list)
    for message in messages:
        chosen["release" if rng.random() < 0.02 else choose(message)].append(message)
    for action, some in chosen.items():
        diary.note(f"try-{action}", some)
        results = getattr(queue, action)(some)
        for result in set(results):
            told = [message for message, each in zip(some, results, strict=True) if each == result]
            diary.note(f"{Settled(result).name.lower()}-{action}", told)


def consume(address: str, group: str, style: str, diary: Diary, seed: str, is_over: Callable[[], bool]) -> None:
    rng = random.Random(seed)
    while not is_over():
        try:
            with (
                millstream.connect(address, timeout_s=10) as client,
                client.queue(TOPIC, group=group, prefetch=rng.choice((5, 50)), timeout_s=0.3) as queue,
            ):
                while not is_over():
                    if style == "batches":
                        messages = queue.lease(max=rng.randint(1, 40), wait="300ms")
                        diary.note("got", messages)
                        settle(queue, messages, diary, rng)
                    for message in queue if style == "ahead" else ():
                        diary.note("got", [message])
                        action = choose(message)
                        diary.note(f"try-{action}", [message])
                        getattr(message, action)()
                        if is_over():
                            break
        except MillstreamError:
            time.sleep(0.02)


class ConsumerProcess:
    """A consumer that can be killed."""

    def __init__(self, address: str, group: str, style: str, diary: Path, seed: str) -> None:
        command = [sys.executable, "-m", "tests.queue_kills", address, group, style, str(diary), seed]
        self._process = subprocess.Popen(command, cwd=Path(__file__).parents[1], stdout=subprocess.DEVNULL)

    def end(self, number: signal.Signals) -> None:
        self._process.send_signal(number)  # does nothing when it has ended
        self._process.wait(60)


# --- producers and operators -----------------------------------------------------------------------------------------


class Work(threading.Thread):
    """Something that goes on until it is told to stop."""

    def __init__(self, work: Callable[[Work], None], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self.stopping = threading.Event()
        self.failure: BaseException | None = None
        self.sent: set[str] = set()
        self.confirmed: set[str] = set()

    def run(self) -> None:
        try:
            self._work(self)
        except BaseException as error:
            self.failure = error

    def wait_until_begun(self) -> None:
        deadline_s = time.monotonic() + 60
        while not self.confirmed and self.is_alive():
            assert time.monotonic() < deadline_s, f"{self.name} does nothing"
            time.sleep(0.005)

    def end(self) -> None:
        self.stopping.set()
        self.join(90)
        assert not self.is_alive(), f"{self.name} does not end"
        assert self.failure is None, f"{self.name}: {self.failure!r}"


def tell(name: str, number: int, rng: random.Random, due_ms: int = 0) -> tuple[str, str]:
    """A value, and what the audit knows it by."""
    kind = rng.choice(KINDS)
    value = f"{name}:{number}:{kind}:{due_ms}"
    return value, f"{value}|{PADDING}" if kind in ("poison", "reject") else value


def produce(address: str, seed: str, work: Work) -> None:
    """In batches, which are retried until they are stored."""
    rng, number = random.Random(seed), 0
    with millstream.connect(address) as client, client.producer(TOPIC, linger_ms=1, batch_bytes=4096) as producer:
        while not work.stopping.wait(0.05):
            told = []
            for _ in range(20):
                value, text = tell(work.name, number, rng)
                number += 1
                producer.send(text, key=str(rng.randrange(50)))
                told.append(value)
            work.sent.update(told)
            producer.flush()
            work.confirmed.update(told)


def schedule(address: str, seed: str, work: Work) -> None:
    """One at a time, for a little later."""
    rng, number = random.Random(seed), 0
    with millstream.connect(address, timeout_s=60) as client:
        while not work.stopping.wait(0.005):
            due_ms = time.time_ns() // 1_000_000 + rng.choice((10, 100, 400, 1000))
            value, text = tell(work.name, number, rng, due_ms)
            number += 1
            work.sent.add(value)
            try:
                client.publish(TOPIC, text, deliver_at=due_ms / 1000)
                work.confirmed.add(value)
            except MillstreamError:
                continue  # in doubt: it may or may not come, but not twice


def replay(address: str, work: Work) -> None:
    """Again and again, everything that was rejected; sometimes two replays at once."""
    while not work.stopping.wait(0.1):
        try:
            with millstream.connect(address, timeout_s=5) as client:
                client.dead_letters.replay(reason="REJECTED", rate=400).wait(5)
        except MillstreamError:
            continue


# --- the run ---------------------------------------------------------------------------------------------------------


class KillRun:
    """A broker under load that is killed again and again; `audit` says what was not as it should be."""

    def __init__(self, folder: Path, seed: int, *, brief: bool = False) -> None:
        """`brief`: fewer processes and shorter pauses, for a few rounds in little time."""
        self._pace = 0.2 if brief else 1.0
        #: One group has a consumer in a process of its own, or each has.
        self._exposed = list(GROUPS)[:1] if brief else list(GROUPS)
        self._rng = random.Random(seed)
        self._seed = seed
        self._diaries = folder / "diaries"
        self._diaries.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port: int = listening.getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        self.broker = BrokerProcess(folder / "data", port=port)
        self.kills: list[float] = []
        self._names = 0
        self._works: list[Work] = []
        self._processes: list[ConsumerProcess] = []
        self._consumers: list[Work] = []
        self._producers: list[Work] = []

    def __enter__(self) -> Self:
        self.broker.start()
        try:
            self._begin()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left behind, however it went."""
        for work in self._works:
            work.stopping.set()
        for process in self._processes:
            process.end(signal.SIGKILL)
        self.broker.__exit__(None, None, None)

    def _begin(self) -> None:
        with millstream.connect(self.address) as client:
            client.create_topic(TOPIC, partitions=PARTITIONS, config={"segment_bytes": 262_144})
            for group, durability in GROUPS.items():
                policy = {"retry": RETRY, "ack_durability": durability, "max_deliveries": 0}
                client.queue(TOPIC, group=group, policy=policy).close()
        for group in GROUPS:
            for style in STYLES:
                self._consumers.append(self._work(f"{group}-{style}", self._consumer(group, style)))
        self._processes += [self._new_process(group) for group in self._exposed]
        for number in range(2):
            self._producers.append(self._work(f"p{number}", self._sender(produce)))
        self._producers.append(self._work("s0", self._sender(schedule)))
        self._replays = self._work("replays", lambda work: replay(self.address, work))
        # A broker that is killed while they connect for the first time is not what this is about.
        for producer in self._producers:
            producer.wait_until_begun()

    def _work(self, name: str, work: Callable[[Work], None]) -> Work:
        begun = Work(work, name)
        self._works.append(begun)
        begun.start()
        return begun

    def _sender(self, send: Callable[[str, str, Work], None]) -> Callable[[Work], None]:
        return lambda work: send(self.address, f"{self._seed} {work.name}", work)

    def _consumer(self, group: str, style: str) -> Callable[[Work], None]:
        diary = Diary(self._new_diary(), group)
        return lambda work: consume(
            self.address, group, style, diary, f"{self._seed} {work.name}", work.stopping.is_set
        )

    def _new_diary(self) -> Path:
        self._names += 1
        return self._diaries / f"{self._names}"

    def _new_process(self, group: str) -> ConsumerProcess:
        style = self._rng.choice(STYLES)
        return ConsumerProcess(self.address, group, style, self._new_diary(), f"{self._seed} {self._names}")

    def round(self) -> None:
        time.sleep(self._pace * self._rng.choice((self._rng.uniform(0.02, 0.5), self._rng.uniform(0.5, 2.0))))
        if self._rng.random() < 0.5:
            at, group = self._rng.choice(list(enumerate(self._exposed)))
            self._processes[at].end(signal.SIGKILL)
            self._processes[at] = self._new_process(group)
        self._kill()

    def _kill(self) -> None:
        self.kills.append(time.monotonic())
        self.broker.kill()
        self.broker.start()

    def finish(self) -> None:
        """No more kills: let everything come to its end, then one last kill, after which nothing comes back."""
        for producer in self._producers:
            producer.end()
        with millstream.connect(self.address, timeout_s=60) as client:
            self._drain(client)
            self._replays.end()
            while any(replay.status == "running" for replay in client.dead_letters.replays()):
                time.sleep(0.05)
            done = client.dead_letters.replay(reason="REJECTED").wait(60)
            assert (done.status, done.failed) == ("completed", 0)
            self._drain(client)
        for consumer in self._consumers:
            consumer.end()
        for process in self._processes:
            process.end(signal.SIGTERM)
        time.sleep(FLUSH_S + PATIENCE_S)
        self._kill()

    def _drain(self, client: millstream.Client) -> None:
        deadline_s = time.monotonic() + 120
        while left := self._left(client):
            assert time.monotonic() < deadline_s, f"it does not come to an end: {left}"
            time.sleep(0.05)

    def _left(self, client: millstream.Client) -> dict[str, int]:
        left = {group: client.queues.describe(TOPIC, group).depth for group in GROUPS}
        left["schedules"] = sum(stats.pending for stats in client.schedules.stats(TOPIC))
        return {name: count for name, count in left.items() if count}

    # --- the audit ---------------------------------------------------------------------------------------------------

    def audit(self) -> dict[str, int]:
        """Look at everything; returns how much there was of what."""
        with millstream.connect(self.address) as client:
            assert not self._left(client), "what was settled before the last kill came back"
            messages = _read(client, TOPIC)
            letters = _read(client, LETTERS)
            listed = {letter.id for letter in client.dead_letters.iterate()}
        self._audit_published(messages)
        self._audit_replays(messages, letters, listed)
        entries = sorted(entry for diary in self._diaries.iterdir() for entry in read_diary(diary))
        self._audit_outcomes(messages, letters, entries)
        repeated = self._audit_promises(entries)
        return {
            "messages": len(messages),
            "letters": len(letters),
            "replayed": len(letters) - len(listed),
            "deliveries": sum(entry.what == "got" for entry in entries),
            "acks lost by a kill": repeated,
        }

    def _audit_published(self, messages: list[Any]) -> None:
        """What was confirmed is stored once, what was not at most once, and nothing before its time."""
        first_hand = [message for message in messages if "millstream-replayed-from" not in message.headers]
        stored = Counter(story(message.text) for message in first_hand)
        twice = [value for value, count in stored.items() if count > 1]
        assert not twice, f"stored more than once: {twice[:10]}"
        for producer in self._producers:
            assert producer.confirmed, f"{producer.name} did nothing"
            missing = producer.confirmed - stored.keys()
            assert not missing, f"confirmed and lost: {sorted(missing)[:10]}"
        assert stored.keys() <= set().union(*(producer.sent for producer in self._producers))
        for message in first_hand:
            due_ms = due_ms_of(story(message.text))
            assert message.append_time.timestamp() * 1000 >= due_ms, f"{story(message.text)} was delivered early"
            assert bool(due_ms) == ("millstream-scheduled-id" in message.headers)

    def _audit_replays(self, messages: list[Any], letters: list[Any], listed: set[str]) -> None:
        """A letter lies there or was sent once."""
        sent = Counter(
            origin for message in messages if (origin := message.headers.get("millstream-replayed-from")) is not None
        )
        ids = {letter.id: letter.headers["millstream-dead-reason"] for letter in letters}
        assert all(count == 1 for count in sent.values()), "a letter was replayed twice"
        assert sent.keys() | listed == ids.keys(), "a letter is neither there nor replayed"
        assert not sent.keys() & listed, "a letter was replayed and is still there"
        assert sent.keys() == {letter for letter, reason in ids.items() if reason == "REJECTED"}

    def _audit_outcomes(self, messages: list[Any], letters: list[Any], entries: list[Entry]) -> None:
        """Each message was settled by each group, and as it asked to be."""
        acked = {(entry.group, entry.place) for entry in entries if entry.what == "try-ack"}
        died: defaultdict[tuple[str, tuple[int, int]], list[Any]] = defaultdict(list)
        for letter in letters:
            headers = letter.headers
            place = (int(headers["millstream-dead-partition"]), int(headers["millstream-dead-offset"]))
            died[headers["millstream-dead-group"], place].append(letter)
        for message in messages:
            value, place = story(message.text), (message.partition, message.offset)
            kind = "ack" if "millstream-replayed-from" in message.headers else kind_of(value)
            for group in GROUPS:
                found = died.pop((group, place), [])
                if kind in ("ack", "flaky"):
                    assert not found, f"{group}: {value} at {place} succeeds and died"
                    assert (group, place) in acked, f"{group}: {value} at {place} is settled, and nobody ever acked it"
                    continue
                assert len(found) == 1, f"{group}: {value} at {place} has {len(found)} dead letters"
                headers = found[0].headers
                reason = "REJECTED" if kind == "reject" else "MAX_RETRIES_EXCEEDED"
                assert headers["millstream-dead-reason"] == reason, f"{group}: {value} at {place}"
                assert story(found[0].text) == value
                if kind == "poison":
                    assert int(headers["millstream-dead-failures"]) == FAILURES_TO_DEATH, f"{group}: {value}"
        assert not died, "there are letters of messages that never were"

    def _audit_promises(self, entries: list[Entry]) -> int:
        """What a consumer was told must hold for every later delivery, unless a kill explains it."""
        ends: dict[tuple[str, tuple[int, int]], Entry] = {}
        failures: defaultdict[tuple[str, tuple[int, int]], list[Entry]] = defaultdict(list)
        repeated = 0
        for entry in entries:
            message = entry.group, entry.place
            if entry.what in ("done-ack", "dead-nack", "dead-reject"):
                ends[message] = entry
            elif entry.what == "retried-nack":
                failures[message].append(entry)
            elif entry.what == "got":
                assert entry.wall_ms >= due_ms_of(entry.value), f"{entry} came early"
                end = ends.pop(message, None)
                if end is not None:
                    repeated += 1
                    may_be = end.what == "done-ack" and entry.group != "sync" and self._explains(end, entry)
                    assert may_be, f"delivered again: {entry} after {end}, kills at {self._kills_near(end)}"
                for failed in failures[message]:
                    if entry.failures <= failed.failures:
                        may_be = entry.group != "sync" and self._explains(failed, entry)
                        assert may_be, f"failures forgot: {entry} after {failed}, kills at {self._kills_near(failed)}"
        return repeated

    def _explains(self, told: Entry, again: Entry) -> bool:
        """Whether there was a kill so soon after the broker's answer that this may be forgotten."""
        return any(
            told.at_s - DIARY_S <= kill_s <= told.at_s + FLUSH_S + PATIENCE_S and kill_s < again.at_s
            for kill_s in self.kills
        )

    def _kills_near(self, entry: Entry) -> list[float]:
        return sorted(self.kills, key=lambda kill_s: abs(kill_s - entry.at_s))[:2]


def _read(client: millstream.Client, topic: str) -> list[Any]:
    """Every message of a topic."""
    with client.stream(topic, start="earliest") as stream:
        found = [stream.next(timeout_s=10) for _ in range(sum(client.offsets(topic).values()))]
    assert None not in found, f"messages are missing from {topic}"
    return found


def main(address: str, group: str, style: str, diary: str, seed: str) -> None:
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    consume(address, group, style, Diary(Path(diary), group), seed, over.is_set)


if __name__ == "__main__":
    main(*sys.argv[1:])
