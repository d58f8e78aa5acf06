"""Two groups read the same topic with asyncio; each sees every message.

Usage: python examples/async_fan_out.py [HOST:PORT]
"""

from __future__ import annotations

import asyncio
import sys

import millstream.aio


async def read(address: str, group: str, count: int) -> None:
    async with millstream.aio.connect(address) as client, client.stream("signals", group=group) as stream:
        seen = 0
        async for message in stream:
            seen += 1
            print(f"{group}: {message.text}")
            if seen == count:
                await message.commit()  # the last one: only asking for the next says that this one is done
                return


async def main(address: str) -> None:
    async with millstream.aio.connect(address) as client:
        for number in range(3):
            await client.publish("signals", f"signal {number}")
    await asyncio.gather(read(address, "audit", 3), read(address, "billing", 3))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "localhost:9092"))
