"""`make soak MINUTES=60`, or `python -m tests.soak --minutes 60`; see docs/soak.md."""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.soak.audit import Evidence, judge, read_grants, read_removals, read_stored
from tests.soak.audit.judge import topics
from tests.soak.processes import ROOT
from tests.soak.progress import Progress
from tests.soak.report import Report, write_report
from tests.soak.run import Soak
from tests.soak.sparks import can_start


def soak(folder: Path, *, seed: int, seconds: float, spark: bool = False, brief: bool = False) -> Report:
    """Run, let it come to rest, audit.  What is found is in the report."""
    with Soak(folder, seed, seconds, spark=spark, brief=brief) as run:
        with Progress(run):
            run.run()
            run.finish()
            run.phase = "audit"
            with run.connect() as client:
                stored = {topic: read_stored(client, topic) for topic in topics()}
            run.broker.end(signal.SIGTERM)
            run.verify_files()
            reasons = [*run.faults, *read_removals(run.broker.log)]
            grants = read_grants(run.broker.control / "grants")
            verdict = judge(Evidence(folder / "ledgers", stored, reasons, run.clocks, grants), spark=spark)
        return Report.of(run, verdict)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--spark", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "soak")
    parser.add_argument("--keep", action="store_true", help="keep data and ledgers also when nothing was found")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything that was started ends, too
    why_not = can_start()
    spark = (options.minutes >= 30 if options.spark is None else options.spark) and not why_not
    if options.spark and why_not:
        print(f"without Spark: {why_not}", file=sys.stderr)
    folder = Path(tempfile.mkdtemp(prefix="millstream-soak-")) / "run"
    print(f"seed {options.seed}, {options.minutes:g} minutes{', with Spark' if spark else ''}; data in {folder}")
    begin_s = time.monotonic()
    report = soak(folder, seed=options.seed, seconds=options.minutes * 60, spark=spark)
    written = write_report(report, options.out)
    print(f"{report.sentence()} ({(time.monotonic() - begin_s) / 60:.0f} minutes in all); report in {written}")
    for finding in report.findings:
        print(f"  {finding['rule']}: {finding['text']} ({finding['count']})")
    if report.findings or options.keep:
        print(f"ledgers, logs and data are kept in {folder}")
        return 1 if report.findings else 0
    shutil.rmtree(folder.parent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
