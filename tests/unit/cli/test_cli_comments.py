"""Fields with the comments that the source has above them."""

from __future__ import annotations

from millstream.cli.comments import fields_of
from millstream.client.letters import ReplayOptions
from millstream.dead_letters import DeadLetter
from millstream.wire.queue_calls import QueueSummary


def test_a_field_has_its_type_and_the_comment_above_it() -> None:
    fields = fields_of(QueueSummary)
    assert list(fields)[:3] == ["topic", "group", "depth"]
    assert fields["depth"] == ("int", "", "Messages that are not settled: ready + leased + waiting.")
    assert fields["ready"] == ("int", "", "")
    assert fields["failed"].default == "None"


def test_what_a_typed_dict_inherits_is_there_as_well() -> None:
    fields = fields_of(ReplayOptions)
    assert fields["topic"].comment == "The topic they came from, or a pattern such as `orders.#`."
    assert fields["rate"].comment.startswith("Messages per second")


def test_every_field_of_a_struct_is_found() -> None:
    assert set(DeadLetter.__struct_fields__) <= set(fields_of(DeadLetter))
