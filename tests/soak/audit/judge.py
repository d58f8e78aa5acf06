"""All that is checked about a run."""

from __future__ import annotations

from tests.queue_kills import LETTERS
from tests.queue_kills import TOPIC as JOBS
from tests.soak.audit import logs, mqtt, queues, streams
from tests.soak.audit.evidence import Evidence
from tests.soak.audit.verdict import Verdict
from tests.soak.traffic import mqtt as mqtt_traffic
from tests.soak.traffic import queues as queue_traffic
from tests.soak.traffic import streams as stream_traffic
from tests.soak.traffic import web

__all__ = ["judge", "topics"]


def topics() -> list[str]:
    """What an audit reads from the broker."""
    mine = [stream_traffic.TOPIC, stream_traffic.COPIES, JOBS, LETTERS, web.TOPIC]
    return [*mine, *(f"{mqtt_traffic.TOPIC}.{name}" for name, *_ in mqtt_traffic.PUBLISHERS)]


def judge(evidence: Evidence, *, spark: bool) -> Verdict:
    verdict = Verdict(sorted(evidence.faults, key=lambda fault: fault.begin_s))
    _judge_streams(verdict, evidence, spark=spark)
    _judge_queues(verdict, evidence)
    _judge_web(verdict, evidence)
    _judge_mqtt(verdict, evidence)
    return verdict


def _judge_streams(verdict: Verdict, evidence: Evidence, *, spark: bool) -> None:
    topic = stream_traffic.TOPIC
    stored = evidence.stored[topic]
    sent, sure = evidence.ids(topic, "sent"), evidence.ids(topic, "sure")
    logs.check_stored(verdict, topic, (message.value for message in stored), sent=sent, sure=sure)
    logs.check_order(verdict, topic, stored)
    ends = dict.fromkeys(range(stream_traffic.PARTITIONS), 0)
    for message in stored:
        ends[message.partition] = max(ends[message.partition], message.offset + 1)
    streams.check_group(verdict, stream_traffic.GROUP, evidence.notes(stream_traffic.GROUP), ends)
    if spark:
        logs.check_copies(verdict, stored, evidence.stored[stream_traffic.COPIES])


def _judge_queues(verdict: Verdict, evidence: Evidence) -> None:
    stored = evidence.stored[JOBS]
    sent = evidence.values("jobs", "sent") | evidence.values("later", "sent")
    sure = evidence.values("jobs", "sure") | evidence.values("later", "sure")
    logs.check_stored(verdict, JOBS, (message.value for message in stored), sent=sent, sure=sure)
    logs.check_order(verdict, JOBS, [message for message in stored if message.value.endswith(":0")])
    logs.check_due(verdict, JOBS, stored, evidence.clocks)
    entries = evidence.diaries()
    groups = queue_traffic.GROUPS
    queues.check_outcomes(verdict, groups, stored, evidence.stored[LETTERS], entries)
    durable = [group for group, policy in groups.items() if policy["ack_durability"] == "sync"]
    queues.check_promises(verdict, durable, entries, evidence.grants)
    keys = {(message.partition, message.offset): message.key for message in stored}
    for group, policy in groups.items():
        if policy.get("ordering") == "key":
            silent = queues.timed_out(group, evidence.stored[LETTERS])
            queues.check_keys(verdict, group, keys, entries, silent)


def _judge_web(verdict: Verdict, evidence: Evidence) -> None:
    stored = evidence.stored[web.TOPIC]
    sent, sure = evidence.ids(web.TOPIC, "sent"), evidence.ids(web.TOPIC, "sure")
    logs.check_stored(verdict, web.TOPIC, (message.value for message in stored), sent=sent, sure=sure)
    queues.check_leases(verdict, web.TOPIC, evidence.notes(web.GROUP), stored)


def _judge_mqtt(verdict: Verdict, evidence: Evidence) -> None:
    stored = {}
    for name, _, qos in mqtt_traffic.PUBLISHERS:
        numbers = [int(message.value) for message in evidence.stored[f"{mqtt_traffic.TOPIC}.{name}"]]
        mqtt.check_publisher(verdict, name, qos, evidence.session(name), numbers)
        stored[name, qos] = numbers
    for name, _, qos in mqtt_traffic.READERS:
        mqtt.check_reader(verdict, name, qos, evidence.session(name), stored)
