"""What the broker counts.  Plain integers on one object: counting costs an addition and blocks nobody."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from millstream.broker.latency import Latencies

__all__ = ["Metrics"]


@dataclass(slots=True)
class Metrics:
    """Totals since the broker started, and some numbers of now.  What Prometheus calls them is in stats/families.py."""

    messages_published: int = 0
    batches_published: int = 0
    bytes_published: int = 0
    duplicates: int = 0
    publish_failures: int = 0
    fetches: int = 0
    bytes_fetched: int = 0
    sync_rounds: int = 0
    files_synced: int = 0
    sync_us: int = 0
    connections_opened: int = 0
    connections_refused: int = 0
    connections: int = 0
    requests_failed: int = 0
    protocol_errors: int = 0
    segments_deleted: int = 0
    compactions: int = 0
    rebalances: int = 0
    offsets_committed: int = 0
    leases_granted: int = 0
    leases_expired: int = 0
    leases_returned: int = 0
    messages_leased: int = 0
    messages_acked: int = 0
    messages_nacked: int = 0
    messages_rejected: int = 0
    messages_released: int = 0
    messages_dead_lettered: int = 0
    messages_expired: int = 0
    messages_purged: int = 0
    settles_refused: int = 0
    subscriptions: int = 0
    patterns: int = 0
    deliveries: int = 0
    messages_delivered: int = 0
    messages_missed: int = 0
    publishes_throttled: int = 0
    publishes_refused: int = 0
    messages_evicted: int = 0
    mode_changes: int = 0
    memory_bytes: int = 0
    disk_free_bytes: int = 0
    dead_letters_replayed: int = 0
    dead_letters_purged: int = 0
    dead_letter_alerts_sent: int = 0
    dead_letter_alerts_failed: int = 0
    webhook_deliveries: int = 0
    webhook_failures: int = 0
    webhook_messages_dead: int = 0
    keys_refused: int = 0
    requests_forbidden: int = 0
    requests_limited: int = 0
    quota_refusals: int = 0
    audit_entries: int = 0
    trace_events_recorded: int = 0
    trace_events_dropped: int = 0
    mqtt_connections: int = 0
    mqtt_connected: int = 0
    mqtt_connected_max: int = 0
    mqtt_subscriptions: int = 0
    #: Packets of every kind; what follows is about messages.
    mqtt_packets_received: int = 0
    mqtt_packets_sent: int = 0
    mqtt_bytes_received: int = 0
    mqtt_bytes_sent: int = 0
    mqtt_received: int = 0
    mqtt_sent: int = 0
    mqtt_dropped: int = 0
    stages_opened: int = 0
    stages_aborted: int = 0
    stages_expired: int = 0
    staged_messages: int = 0
    staged_bytes: int = 0
    stage_batches_published: int = 0
    stage_messages_published: int = 0
    stages_repeated: int = 0
    #: Clients that are connected now, by the door they came through; `connections` is their sum.
    connections_by_door: dict[str, int] = field(default_factory=dict)
    #: How long things took; not among the totals.
    latency: Latencies = field(default_factory=Latencies)

    def count_connections(self, door: str, number: int) -> None:
        self.connections += number - self.connections_by_door.get(door, 0)
        self.connections_by_door[door] = number

    def count_sync(self, seconds: float, files: int) -> None:
        self.sync_rounds += 1
        self.files_synced += files
        took_us = int(seconds * 1e6)
        self.sync_us += took_us
        self.latency.fsync.observe(took_us)

    def as_dict(self) -> dict[str, int]:
        numbers = ((entry.name, getattr(self, entry.name)) for entry in fields(self))
        return {name: number for name, number in numbers if isinstance(number, int)}
