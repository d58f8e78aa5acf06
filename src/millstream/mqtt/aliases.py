"""Topic aliases: numbers that stand for topic names while a connection lasts."""

from __future__ import annotations

from millstream.mqtt.reasons import MqttViolation, Reason

__all__ = ["IncomingAliases", "OutgoingAliases"]


class IncomingAliases:
    """What the client's numbers stand for."""

    __slots__ = ("_names", "maximum")

    def __init__(self, maximum: int) -> None:
        #: The topic alias maximum that we have told the client; 0 = none at all.
        self.maximum = maximum
        self._names: dict[int, str] | None = None

    def resolve(self, topic: str, alias: int | None) -> str:
        """The topic name of a PUBLISH.  A name with an alias gives the alias its meaning."""
        if alias is None:
            if not topic:
                raise MqttViolation(Reason.PROTOCOL_ERROR, "a PUBLISH needs a topic name or a topic alias")
            return topic
        if not 0 < alias <= self.maximum:
            raise MqttViolation(
                Reason.TOPIC_ALIAS_INVALID,
                f"topic alias {alias} is not between 1 and {self.maximum}" if self.maximum else "no aliases are taken",
            )
        if self._names is None:
            self._names = {}
        if topic:
            self._names[alias] = topic
            return topic
        known = self._names.get(alias)
        if known is None:
            raise MqttViolation(Reason.PROTOCOL_ERROR, f"topic alias {alias} has not been given a name")
        return known


class OutgoingAliases:
    """Our numbers: the first topics get one, as many as the client takes."""

    __slots__ = ("_aliases", "maximum")

    def __init__(self, maximum: int) -> None:
        #: The client's topic alias maximum; 0 = none at all.
        self.maximum = maximum
        self._aliases: dict[str, int] | None = None

    def alias_for(self, topic: str) -> tuple[str, int | None]:
        """The topic name and the alias that a PUBLISH must carry.  It must be sent: the next one relies on it."""
        if not self.maximum:
            return topic, None
        if self._aliases is None:
            self._aliases = {}
        alias = self._aliases.get(topic)
        if alias is not None:
            return "", alias
        if len(self._aliases) >= self.maximum:
            return topic, None
        alias = self._aliases[topic] = len(self._aliases) + 1
        return topic, alias
