"""A program that forks after it has connected: parent and child do not get in each other's way."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import millstream
from millstream.testing.broker import BrokerForTests

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")

#: In a process of its own: forking one with a broker and its threads would test something else.
_PUBLISHES = """
import os, sys, millstream
client = millstream.connect(sys.argv[1], timeout_s=10)
client.publish("t", b"before")
child = os.fork()
for number in range(100):
    client.publish("t", b"%s %d" % (b"parent" if child else b"child", number))
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

_WORKS = """
import os, sys, millstream
client = millstream.connect(sys.argv[1], timeout_s=10)
with client.queue("t") as queue, client.producer("t", linger_ms=200) as producer:
    message = queue.next(10)
    producer.send(b"from the producer")
    child = os.fork()
    if not child:
        try:
            producer.send(b"not mine")
        except millstream.errors.InvalidArgument:
            sys.exit(0)
        sys.exit(1)
    assert os.waitpid(child, 0)[1] == 0, "the child has failed"
    message.ack(wait=True)
    assert queue.stats.connections == 1, "the child has ended the parent's connection"
"""

_ASKS = """
import os, sys, millstream
client = millstream.connect(sys.argv[1], timeout_s=10)
assert client.request("echo", "before", timeout=10).text == "before"
child = os.fork()
me = "parent" if child else "child"
for number in range(50):
    assert client.request("echo", f"{me} {number}", timeout=5).text == f"{me} {number}"
if child:
    assert os.waitpid(child, 0)[1] == 0, "the child has failed"
    assert client.request("echo", "after", timeout=5).text == "after"
"""

_IDLES = """
import os, sys, threading, millstream
client = millstream.connect(sys.argv[1], timeout_s=10)
child = os.fork()
if not child:
    assert threading.active_count() == 1, "a thread for a client that nobody uses"
client.publish("t", b"x")
names = [thread.name for thread in threading.enumerate()]
assert names.count("millstream-keepalive") == 1, names
client.close()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture
def run(broker: BrokerForTests) -> Callable[[str], None]:
    def run_it(program: str) -> None:
        done = subprocess.run(
            [sys.executable, "-c", program, broker.address],
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
            env=os.environ | {"PYTHONPATH": str(Path(millstream.__file__).parents[1])},
        )
        assert done.returncode == 0, done.stderr

    return run_it


def values(broker: BrokerForTests) -> list[bytes | None]:
    with broker.connect().stream("t", timeout_s=0.5) as stream:
        return [message.value for message in stream]


def test_parent_and_child_publish_with_one_client(broker: BrokerForTests, run: Callable[[str], None]) -> None:
    """Neither takes the other's answers, and neither's messages are taken for repetitions of the other's."""
    run(_PUBLISHES)
    found = values(broker)
    assert len(found) == len(set(found)) == 201


def test_a_child_that_ends_leaves_the_parents_queue_and_producer_alone(
    broker: BrokerForTests, run: Callable[[str], None]
) -> None:
    broker.connect().publish("t", b"work")
    run(_WORKS)
    assert values(broker) == [b"work", b"from the producer"]


def test_the_connection_of_a_child_is_kept_alive_as_well(broker: BrokerForTests, run: Callable[[str], None]) -> None:
    """The broker closed it when the child had been idle for a while: the thread for it was left with the parent."""
    run(_IDLES)
    assert values(broker) == [b"x", b"x"]


def test_parent_and_child_ask_with_one_client_and_each_gets_its_own_replies(
    broker: BrokerForTests, run: Callable[[str], None]
) -> None:
    """With one inbox for both, the child took the parent's replies, some of them for its own."""
    with broker.connect().subscribe("echo") as requests:
        service = threading.Thread(target=lambda: [request.reply(request.value) for request in requests])
        service.start()
        try:
            run(_ASKS)
        finally:
            requests.close()
            service.join(10)
