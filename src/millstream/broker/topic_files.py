"""Where the files of a topic are, and how they go away."""

from __future__ import annotations

from typing import Final

from millstream.broker.registry import Topic
from millstream.log.storage import Storage

__all__ = ["directory_of", "remove_files"]

#: A partition has directories with these ends of their names.
_KINDS: Final = ("", ".state", ".schedules", ".due")


def directory_of(topic: Topic) -> str:
    return f"topics/{topic.namespace}/{topic.name}"


def remove_files(storage: Storage, topic: Topic) -> None:
    """Remove a topic's directory; or the link there, and what the topic has behind it.  Can be repeated."""
    directory = directory_of(topic)
    if storage.is_link(directory):  # to another disk, where others may have put things beside those of the topic
        own = {f"{number}{kind}" for number in range(len(topic.partitions)) for kind in _KINDS}
        for name in own.intersection(storage.names(directory)):
            storage.remove_tree(f"{directory}/{name}")
    storage.remove_tree(directory)
