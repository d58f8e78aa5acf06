"""Replays and searches.

python -m tests.simulation SEED          one run, with everything that happens in it
python -m tests.simulation FIRST:LAST    many runs; prints the seeds that fail
python -m tests.simulation               new seeds until one fails

With --unsynced in front, messages are confirmed and shown before they are on disk.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import secrets
import sys
import time
import traceback
from collections import Counter

from tests.simulation.scenarios import simulate_seed

_UNSYNCED = "--unsynced"


def main() -> int:
    arguments = sys.argv[1:]
    unsynced = _UNSYNCED in arguments
    which = next((argument for argument in arguments if argument != _UNSYNCED), "")
    if which and ":" not in which:
        history = simulate_seed(int(which), unsynced=unsynced, verbose=True)
        print(f"seed {which} holds; trace {history.digest}")
        return 0
    first, _, last = which.partition(":")
    seeds = range(int(first), int(last)) if which else (secrets.randbelow(1 << 31) for _ in itertools.count())
    logging.disable()  # clients warn of what the simulation does to them
    done, failed, started_s = 0, 0, time.monotonic()
    traces, counts = hashlib.sha256(), Counter[str]()
    for seed in seeds:
        try:
            history = simulate_seed(seed, unsynced=unsynced)
            traces.update(history.digest.encode())
            counts.update(history.counts)
        except Exception as error:
            failed += 1
            again = f"'{_UNSYNCED} {seed}'" if unsynced else seed
            traceback.print_exception(error, limit=-4)
            print(f"\nseed {seed} fails; replay it with: make sim SEED={again}", flush=True)
            if not which:
                return 1
        done += 1
        if sys.stdout.isatty():
            print(f"\r{done} runs, {done / (time.monotonic() - started_s):.1f} per second", end="", flush=True)
    rate = done / (time.monotonic() - started_s)
    print(f"{done - failed} of {done} seeds hold, {rate:.1f} per second; traces {traces.hexdigest()[:16]}")
    print(json.dumps(counts))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
