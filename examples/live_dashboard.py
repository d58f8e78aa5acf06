"""Subscribe to topics by pattern, including topics that do not exist yet, and watch messages as they are published.

Usage: python examples/live_dashboard.py [HOST:PORT]
"""

from __future__ import annotations

import sys

import millstream


def main(address: str) -> None:
    patterns = ("sensors.*.temperature", "alarms.#")
    with millstream.connect(address) as client, client.subscribe(*patterns) as subscription:
        client.publish("sensors.kitchen.temperature", "21.5")
        client.publish("sensors.kitchen.humidity", "40")  # matches neither pattern
        client.publish("alarms.fire.cellar", "smoke")
        for message in subscription:
            print(f"{message.topic}: {message.text}")
            if message.topic.startswith("alarms."):
                break
        print(f"missed: {subscription.missed}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "localhost:9092")
