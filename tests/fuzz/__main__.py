"""`python -m tests.fuzz [TARGET…] --minutes 10`: each target for so long, one after the other, each in a process."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from itertools import accumulate
from pathlib import Path
from random import Random

#: What is kept of a corpus: enough for a good beginning, little enough to be committed.
CORPUS_BYTES = 24 * 1024
HERE = Path(__file__).parent
_NAMES = ("native", "mqtt", "http", "websocket", "log", "backup", "pipeline", "config")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(_NAMES))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="0 draws one")
    parser.add_argument("--keep", action="store_true", help="add inputs that reach new lines to the corpus")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    said = parser.parse_args()
    unknown = set(said.targets) - set(_NAMES)
    if unknown:
        parser.error(f"there is no target {min(unknown)}; there are {', '.join(_NAMES)}")
    if said.inside:
        return _fuzz(said.targets[0], said.minutes, said.seed, keep=said.keep)
    failed = 0
    for name in said.targets or _NAMES:
        options = ["--minutes", str(said.minutes), "--seed", str(said.seed), *(["--keep"] if said.keep else [])]
        failed |= subprocess.run([sys.executable, "-m", "tests.fuzz", name, "--inside", *options]).returncode
    return 1 if failed else 0


def _fuzz(name: str, minutes: float, seed: int, *, keep: bool) -> int:
    try:
        import atheris
    except ImportError:
        print("fuzzing needs atheris: pip install -r requirements-fuzz.txt, or `make fuzz`", file=sys.stderr)
        return 2
    with atheris.instrument_imports(include=["millstream"], enable_loader_override=False):
        from tests.fuzz import engine

        if name in ("log", "pipeline"):
            import millstream.spark.pipelines.loading  # noqa: F401
    from tests.fuzz.target import listening, write_inputs

    target = engine.TARGETS[name]()
    runner = engine.Runner(target, save_to=HERE / "found")
    seed = seed or int.from_bytes(os.urandom(3))
    until_s = time.monotonic() + minutes * 60

    def mutate(data: bytes, size: int, number: int) -> bytes:
        random = Random(number)
        return target.mutate(data, random) if random.random() < 0.8 else atheris.Mutate(data, size)

    def one(data: bytes) -> None:
        if time.monotonic() > until_s:
            report()
            os._exit(1 if runner.harms else 0)  # libFuzzer would report a crash
        runner.run(data)

    def report() -> None:
        found = [path.read_bytes() for path in Path(place).iterdir()]
        kept, lines = engine.smallest(name, [*target.corpus, *found])
        print(f"{name}: {runner.runs:,} runs, {lines:,} lines reached, {len(runner.harms)} findings, seed {seed}")
        for harm in runner.harms.values():
            print(f"\n{name}: {harm}")
        if keep and kept:
            small = [data for data, size in zip(kept, accumulate(map(len, kept)), strict=True) if size <= CORPUS_BYTES]
            write_inputs(HERE / "corpus" / f"{name}.txt", small)
        sys.stdout.flush()

    with tempfile.TemporaryDirectory(prefix="millstream-fuzz-") as place, listening():
        for number, data in enumerate(target.corpus):
            (Path(place) / f"seed-{number:04d}").write_bytes(data)
        options = ("-verbosity=0", f"-seed={seed}", f"-max_len={target.bytes_max}", "-rss_limit_mb=4096")
        # Its alarm would be taken for ours: a hang is noticed in target.py.
        options += (f"-artifact_prefix={place}/", "-timeout=0")
        atheris.Setup([sys.argv[0], *options, place], one, custom_mutator=mutate)
        atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
