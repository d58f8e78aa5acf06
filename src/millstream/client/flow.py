"""What the broker has said about how fast to publish.  Heeding it keeps waiting on our side, where it blocks nobody."""

from __future__ import annotations

from millstream.errors import MillstreamError
from millstream.wire.frames import Frame, FrameType
from millstream.wire.messages import decode_json
from millstream.wire.subscription_calls import FlowNotice

__all__ = ["FlowNotices"]


class FlowNotices:
    """The notices of one connection that are in force, by topic; the topic "" stands for all of them."""

    def __init__(self) -> None:
        self._notices: dict[str, FlowNotice] = {}

    def __bool__(self) -> bool:
        return bool(self._notices)

    def hear(self, frame: Frame) -> None:
        """Take in what the broker says by itself, if it is a notice."""
        if frame.type == FrameType.FLOW:
            self.take(frame.payload)

    def take(self, payload: memoryview) -> None:
        try:
            notice: FlowNotice = decode_json(payload, FlowNotice)
        except MillstreamError:
            return  # from a broker that knows more levels than we do; its delays reach us without our help
        if notice.level == "normal" and not notice.delay_ms:
            self._notices.pop(notice.topic, None)
        else:
            self._notices[notice.topic] = notice

    def forget(self) -> None:
        """The connection is gone, and with it whoever would take its notices back; the next one says so again."""
        self._notices.clear()

    def delay_s(self, topic: str) -> float:
        """How long to wait before the next publish."""
        return max((notice.delay_ms for notice in self._of(topic)), default=0) / 1000

    def level(self, topic: str) -> str:
        return next((notice.level for notice in self._of(topic)), "normal")

    def _of(self, topic: str) -> list[FlowNotice]:
        notices = self._notices
        return [notices[name] for name in (topic, "") if name in notices]
