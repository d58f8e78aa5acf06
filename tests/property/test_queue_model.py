"""The queue core against the model of tests/queue_model.py: Hypothesis shrinks, seeds go far."""

from __future__ import annotations

import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from millstream.queues.records import Rules
from millstream.retries import RetryPolicy
from tests.examples import examples, seeds
from tests.queue_model import QueueModel, some_bits

KEYS = (None, b"a", b"b", b"c")
CONSUMERS = ("ann", "bob")
ACTIONS = ("ack", "ack", "ack", "nack", "nack", "reject", "release", "extend")
LANES = ((50, 25, 15, 7, 3), (2, 1, 1, 1, 1), ())
MESSAGES = st.lists(
    st.tuples(st.sampled_from(KEYS), st.integers(0, 4), st.sampled_from([0, 0, 0, 5, 40])), min_size=1, max_size=9
)


def make_rules(kind: str, lanes: tuple[int, ...], dead: bool, max_retries: int) -> Rules:
    return Rules(
        ordering=kind if kind in ("key", "strict") else "none",
        fair_by="key:." if kind == "fair" else "",
        lanes=lanes,
        expired_are_dead=dead,
        retry=RetryPolicy(max_retries=max_retries),
        max_deliveries=4,
    )


class QueueMachine(RuleBasedStateMachine):
    model: QueueModel | None = None

    @initialize(
        kind=st.sampled_from(["plain", "lanes", "key", "strict", "fair"]),
        lanes=st.sampled_from(LANES),
        dead=st.booleans(),
        max_retries=st.integers(0, 3),
        batches=st.lists(MESSAGES, min_size=1, max_size=4),
    )
    def begin(self, kind: str, lanes: tuple[int, ...], dead: bool, max_retries: int, batches: list) -> None:  # type: ignore[type-arg]
        self.model = QueueModel(make_rules(kind, lanes, dead, max_retries))
        self.priorities = kind == "lanes"
        for messages in batches:
            self.model.publish(messages, priorities=self.priorities)

    @rule(messages=MESSAGES, gap=st.sampled_from([0, 0, 0, 2]), step=st.sampled_from([1, 1, 2]))
    def publish(self, messages: list, gap: int, step: int) -> None:  # type: ignore[type-arg]
        self.model.publish(messages, gap, step, self.priorities)

    # Hypothesis leaves out some rules in each run; in a queue where nobody works nothing else matters, so this is one.
    @rule(
        consumer=st.sampled_from(CONSUMERS),
        want=st.integers(1, 12),
        alone=st.booleans(),
        limited=st.booleans(),
        settles=st.lists(
            st.tuples(st.sampled_from(ACTIONS), st.integers(0, 9), st.integers(0, 4095), st.booleans()), max_size=3
        ),
    )
    def work(self, consumer: str, want: int, alone: bool, limited: bool, settles: list) -> None:  # type: ignore[type-arg]
        self.model.lease(consumer, want, alone=alone, limited=limited)
        for how, which, bits, whole in settles:
            self.model.settle(how, which, bits, whole=whole)

    @rule(seconds=st.sampled_from([0, 1, 2, 31, 400]))
    def time_passes(self, seconds: int) -> None:
        self.model.time_passes(seconds)

    @rule(consumer=st.sampled_from(CONSUMERS))
    def consumer_goes_away(self, consumer: str) -> None:
        self.model.consumer_goes_away(consumer)

    @rule(size=st.integers(1, 6), how=st.sampled_from(["evict", "purge", "trim", "seek", "sweep", "rules"]))
    def interfere(self, size: int, how: str) -> None:
        interfere(self.model, how, size)

    @rule(how=st.sampled_from(["record", "roll", "crash"]))
    def stop(self, how: str) -> None:
        getattr(self.model, how)()

    @invariant()
    def every_message_is_in_one_place(self) -> None:
        if self.model is not None:
            self.model.check()


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = examples(16, stateful_step_count=30)


def interfere(model: QueueModel, how: str, size: int) -> None:
    match how:
        case "evict":
            model.evict(size)
        case "purge" | "trim":
            model.settle_below(size, retention=how == "trim")
        case "seek":
            model.seek(size)
        case "sweep":
            model.sweep()
        case _:
            model.change_rules_and_back()


@pytest.mark.parametrize("kind", ["plain", "lanes", "key", "strict", "fair"])
@pytest.mark.parametrize("round_of_seeds", seeds(1, 4))
def test_any_history_leaves_every_message_in_one_place(kind: str, round_of_seeds: int) -> None:
    for seed in range(round_of_seeds * 10, round_of_seeds * 10 + 10):
        try:
            walk(kind, seed, steps=120)
        except AssertionError as problem:
            raise AssertionError(f"walk({kind!r}, {seed}): {problem}") from problem


def walk(kind: str, seed: int, steps: int) -> None:
    chance = random.Random(seed)
    rules = make_rules(kind, chance.choice(LANES), chance.random() < 0.5, chance.randint(0, 3))
    model = QueueModel(rules)
    expires = chance.choice([[0], [0, 0, 0, 5, 40]])
    for _ in range(steps):
        draw = chance.random()
        if draw < 0.2:
            size = chance.randint(1, 9)
            messages = [(chance.choice(KEYS), chance.randint(0, 4), chance.choice(expires)) for _ in range(size)]
            model.publish(messages, chance.choice([0, 0, 0, 2]), chance.choice([1, 1, 1, 2]), kind == "lanes")
        elif draw < 0.45:
            cold, limited = chance.random() < 0.1, chance.random() < 0.2
            model.lease(
                chance.choice(CONSUMERS), chance.randint(1, 12), alone=chance.random() < 0.7, limited=limited, cold=cold
            )
        elif draw < 0.75:
            bits = some_bits(chance.getrandbits(12), chance.choice([1, 1, 3, 12]))
            model.settle(chance.choice(ACTIONS), chance.randint(0, 9), bits, whole=chance.random() < 0.5)
        elif draw < 0.78:
            model.settle_what_never_was(chance.choice(CONSUMERS))
        elif draw < 0.86:
            model.time_passes(chance.choice([0, 1, 2, 31, 400]))
        elif draw < 0.89:
            model.consumer_goes_away(chance.choice(CONSUMERS))
        elif draw < 0.93:
            interfere(model, chance.choice(["evict", "purge", "trim", "seek", "sweep", "rules"]), chance.randint(1, 6))
        else:
            getattr(model, chance.choice(["record", "record", "roll", "crash"]))()
        model.check()
