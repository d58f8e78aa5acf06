"""Which stored topics the filters of a session read: asked of many topics at a time, for all filters at once.

A session may have a thousand filters and a broker ten thousand topics: to try all with all takes many seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from millstream.mqtt.filters import FilterTrie
from millstream.mqtt.topics import filter_matches, from_topic, is_special

if TYPE_CHECKING:
    from millstream.broker.mqtt.subscription import Subscription

__all__ = ["Readers"]

#: So many filters are tried one after the other, and so many topics looked up, before it pays to make a trie.
_FEW: Final = 8


class Readers:
    """The subscriptions, of some, that read the log: of QoS 1 and 2, and to no share, queue or figure of the broker."""

    def __init__(self, subscriptions: Iterable[Subscription], *, catch_all: str) -> None:
        self._catch_all = catch_all
        self.filters = {one.filter for one in subscriptions if one.qos and not is_special(one.filter)}
        self.wildcards = [one for one in self.filters if "+" in one or "#" in one]
        self._trie: FilterTrie[str] | None = None
        self._asked = 0

    def read(self, name: str) -> bool:
        """Whether a topic is read; what is in no topic of its own may be anybody's."""
        if name == self._catch_all:
            return bool(self.filters)
        topic = from_topic(name)
        return topic in self.filters or self._is_matched(topic)

    def _is_matched(self, topic: str) -> bool:
        if self._trie is None:
            self._asked += 1
            if len(self.wildcards) <= _FEW or self._asked <= _FEW:
                return any(filter_matches(wildcard, topic) for wildcard in self.wildcards)
            self._trie = FilterTrie()
            for wildcard in self.wildcards:
                self._trie.insert(wildcard, wildcard, None)
        return bool(self._trie.match(topic))
