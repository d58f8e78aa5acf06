"""Who answers which of the control calls (see wire/calls.py)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from millstream.broker.administration import Administration
from millstream.broker.group_calls import GroupCalls
from millstream.broker.messages.summaries import Summaries
from millstream.broker.mqtt.views import MqttViews
from millstream.broker.queues.claims import Claims
from millstream.broker.queues.text_leases import TextLeases
from millstream.broker.queues.views import QueueViews
from millstream.broker.queues.why import Why
from millstream.broker.sessions import Session
from millstream.broker.topic_calls import TopicCalls
from millstream.broker.traces.traces import Traces
from millstream.clock import Clock
from millstream.wire import queue_calls

if TYPE_CHECKING:
    from millstream.broker.broker import Broker
    from millstream.broker.life import Life

__all__ = ["Handler", "call_handlers"]

Handler = Callable[[Session, Any], Awaitable[object]]


def call_handlers(broker: Broker, life: Life, *, clock: Clock) -> dict[type, Handler]:
    """The kinds of calls, each with who answers it."""
    return {
        **TopicCalls(broker).handlers(),
        **GroupCalls(broker.groups, session_ms_max=broker.settings.groups.session_ms_max).handlers(),
        queue_calls.Explain: Why(broker).explain,
        **QueueViews(broker.queues).handlers(),
        **TextLeases(broker.queues, broker.check_serving).handlers(),
        **Claims(broker.queues, broker.check_serving).handlers(),
        **broker.subscriptions.handlers(),
        **broker.inboxes.handlers(),
        **broker.flow.handlers(),
        **broker.modes.handlers(),
        **broker.schedules.handlers(),
        **broker.letters.handlers(),
        **broker.replays.handlers(),
        **broker.stats.handlers(),
        **broker.webhooks.handlers(),
        **broker.messages.handlers(),
        **Traces(broker, broker.recorder, clock=clock).handlers(),
        **Summaries(broker).handlers(),
        **MqttViews(broker.mqtt).handlers(),
        **broker.stages.handlers(),
        **broker.pipelines.handlers(),
        **broker.access.handlers(),
        **broker.quotas.handlers(),
        **broker.audit.handlers(),
        **broker.health.handlers(),
        **life.holds.handlers(),
        **Administration(broker, life.cleanup, life.state_logs, clock=clock, sessions=broker.sessions).handlers(),
    }
