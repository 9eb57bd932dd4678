"""Peak memory of loading against the size on disk: `python benchmarks/load_memory.py [SHAPE]`.

A process imports everything, then loads a checkpoint while its memory is watched. Two peaks are given, both less what
was there before: all resident memory (VmHWM), and private memory alone. int8 is made from the bfloat16 file, which is
then the yardstick.

Source: ours; /proc as in proc(5).
"""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

from child import RUNTIMES, Child, ChildError
from conditions import conditions, num_cpus
from measure import Check, Turn, check, document, publish, row
from shapes import SHAPES, checkpoint_of, size_on_disk

LIMIT = 1.15  # of the size on disk
LOADERS = ("cpu bfloat16", "cpu int8", "cpu nvfp4", "eager bfloat16")


def main() -> None:
    """Parse, run, publish."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", nargs="?", choices=SHAPES, default="0.6b")
    parser.add_argument("--loader", action="append", choices=LOADERS, help="by default all of them")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=num_cpus())
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results")
    args = parser.parse_args()
    circumstances = conditions(num_threads=args.threads, shape=list(SHAPES[args.shape]))
    rows, checks, skipped = [], [], []
    for loader in args.loader or LOADERS:
        executor, _, option = loader.partition(" ")
        folder, dtype = checkpoint_of(args.shape, option)
        try:
            loads = [load(folder, executor, dtype, num_threads=args.threads) for _ in range(args.repeats)]
        except ChildError as error:
            skipped.append(f"{loader}: {error}")
            continue
        rows.append(row(args.shape, f"{loader}, load", [turn for _, _, turn in loads], unit="s"))
        checks += _checks(args.shape, loader, loads, size_on_disk(folder))
    publish(
        document("load_memory", conditions=circumstances, rows=rows, checks=checks, skipped=skipped), save=args.save
    )


def load(folder: Path, executor: str, dtype: str, *, num_threads: int) -> tuple[int, int, Turn]:
    """Peak resident bytes, peak private bytes and time of one load, in a new process."""
    with Child(["python", str(RUNTIMES / "load.py"), str(folder), str(num_threads)],
               num_threads=num_threads, is_paused=False) as child:  # fmt: skip
        before = memory_of(child.pid)
        Path(f"/proc/{child.pid}/clear_refs").write_text("5", encoding="ascii")  # VmHWM starts anew
        private: list[int] = []
        is_loaded = threading.Event()

        def sample() -> None:
            while not is_loaded.wait(0.002):
                private.append(memory_of(child.pid)["RssAnon"])

        sampler = threading.Thread(target=sample)
        sampler.start()
        try:
            turn = child.turn("load", executor, dtype)
        finally:
            is_loaded.set()
            sampler.join()
        after = memory_of(child.pid)
    return after["VmHWM"] - before["VmRSS"], max([*private, after["RssAnon"]]) - before["RssAnon"], turn


def memory_of(pid: int) -> dict[str, int]:
    """Byte counts of /proc/PID/status by name."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    values = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(amount) * 1024 for name, amount, _ in values}


def _checks(shape: str, loader: str, loads: list[tuple[int, int, Turn]], on_disk: int) -> list[Check]:
    resident = [peak / on_disk for peak, _, _ in loads]
    private = [peak / on_disk for _, peak, _ in loads]
    return [
        check(shape, f"{loader}: peak resident / size on disk", resident, limit=LIMIT),
        check(shape, f"{loader}: peak private / size on disk", private),
    ]


if __name__ == "__main__":
    main()
