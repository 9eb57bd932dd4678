"""Write docs/benchmarks.md from benchmarks/results/*.json; with --check, fail when the page is stale.

A number on the page is a number of a result file; the page adds no judgement of its own.

Source: ours.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from measure import RESULTS, SCHEMA

TARGET = RESULTS.parents[1] / "docs" / "benchmarks.md"
Result = Mapping[str, Any]

HEAD = """# Benchmarks

This page is written by `python benchmarks/report.py` from `benchmarks/results/*.json`; do not edit it.

## How it is measured

Cores are shared, so separate runs differ by a quarter where ratios within one run repeat within a few percent. The
results are therefore ratios. Every runtime lives in a process of its own that is stopped while another one has the
turn, so that no two thread pools ever run side by side; all have the same number of threads. In each round every
runtime takes one turn, the order is reversed from round to round, and a ratio is formed within each round. Given are
the median and, in brackets, the quartiles. Rounds in which other processes took more than 12 % of a core are dropped;
where fewer than three were left, all are used and the row says so.

| name | formula |
|---|---|
| seconds a step | (a block of 32 positions in 16 steps, less the same block in one) / 15, in the executor's own loop |
| `tps_e2e` | completion tokens / seconds from the request to the last token, prefill included; the stop token counts |
| `tpf_total` | completion tokens / (denoising + commit forwards) |
| `tpf_denoise` | completion tokens / denoising forwards |
| `tpf_total_orl` | (completion tokens - stop tokens) / (denoising forwards + blocks) |
| run | ratio of sums over all prompts; median, p10, p90: of the ratios prompt by prompt, linear interpolation |

Peers: torch as `benchmarks/runtimes/torch_step.py` says; llama.cpp built for this machine from its source package
(`benchmarks/peers.py`), through a driver in C++, flash attention off; its block forward leaves softmax and commit out.

```
python benchmarks/run_cpu.py                  # all of the following, about 15 minutes on two cores
python benchmarks/cpu_kernels.py --save
python benchmarks/cpu_step.py 0.6b --save     # also tiny, 135m, 270m
python benchmarks/cpu_loop.py --save
python benchmarks/cpu_accuracy.py --save
python benchmarks/cold_start.py --save
python benchmarks/load_memory.py --save
python benchmarks/full_layer.py --save
python benchmarks/report.py
```
"""

TITLES = {
    "cpu_kernels": "Kernels against the machine's peaks",
    "cpu_accuracy": "What number formats cost in answers",
    "cpu_step": "One denoising step, 32 rows behind 256 tokens",
    "cpu_loop": "The whole loop and whole answers",
    "cold_start": "Process start to the first block",
    "load_memory": "Peak memory of loading",
    "full_layer": "One layer of the published models at full size: a canvas behind 256 tokens",
}


def page(results: Sequence[Result]) -> str:
    """The whole text of docs/benchmarks.md."""
    return "\n".join([HEAD, *(section(result) for result in results)])


def section(result: Result) -> str:
    """One result: conditions, ratios, measured values, what is specific to it."""
    name = result["name"]
    title = next((text for prefix, text in TITLES.items() if name.startswith(prefix)), name)
    parts = [f"## {title}: `{name}`\n", conditions_line(result["conditions"]) + "\n"]
    if result["checks"]:
        parts.append(table(("", "value", "target", ""), (_check(item) for item in result["checks"])))
    if result["rows"]:
        parts.append(table(("", "median", "rounds", ""), (_row(item) for item in result["rows"])))
    if result["details"]:
        parts.append((_layers if name == "full_layer" else _answers)(result["details"]))
    if result["skipped"]:
        parts.append("Not measured: " + "; ".join(result["skipped"]) + ".\n")
    return "\n".join(parts)


def conditions_line(c: Mapping[str, Any]) -> str:
    """The circumstances in a sentence; the result file has all of them."""
    flags = ", ".join(c["cpu"]["flags"])
    packages = ", ".join(f"{name} {version}" for name, version in c["packages"].items() if version)
    commit = f"{c['commit']}{' with local changes' if c['is_modified'] else ''}"
    words = [f"{c['cpu']['model']}, {c['num_threads']} threads of {c['cpu']['num_cpus_allowed']} CPUs ({flags})"]
    words += [f"{c['memory_bytes'] / 2**30:.0f} GiB", f"load {c['load_average_before'][0]} before", c["date"]]
    words += [f"commit {commit}", f"Python {c['python']}", packages]
    return "; ".join([*words, *([c["llama.cpp"]] if "llama.cpp" in c else [])]) + "."


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in rows)]) + "\n"


def quantity(value: float, unit: str) -> str:
    """A number with its unit, seconds scaled. Example: quantity(0.0123, "s a step") == "12.3 ms a step"."""
    if unit != "s" and not unit.startswith("s "):
        return f"{value:.3g} {unit}"
    rest = unit[1:]
    for scale, name in ((1.0, "s"), (1e-3, "ms")):
        if value >= scale:
            return f"{value / scale:.3g} {name}{rest}"
    return f"{value * 1e6:.3g} us{rest}"


def _check(item: Mapping[str, Any]) -> tuple[str, ...]:
    limit, verdict = "", ""
    if item["limit"] is not None:
        limit = f"{'>=' if item.get('is_floor') else '<='} {item['limit']:g}"
        verdict = "met" if item["is_met"] else "**missed**"
    value = f"{item['value']:.3g} ({item['q25']:.3g} .. {item['q75']:.3g}, {item['num']} rounds)"
    return f"{item['group']}: {item['what']}", value, limit, verdict


def _row(item: Mapping[str, Any]) -> tuple[str, ...]:
    low, high = (quantity(item[name], item["unit"].partition(" ")[0]) for name in ("q25", "q75"))
    dropped = f"{item['num']}, {item['num_dropped']} dropped"
    value = f"{quantity(item['median'], item['unit'])} ({low} .. {high})"
    return f"{item['group']}: {item['name']}", value, dropped, "" if item["is_quiet"] else "not quiet"


def _layers(details: Mapping[str, Any]) -> str:
    head = ("", "CPU time of a forward, least", "drawing and packing the weights", "peak memory")
    rows = (
        (name, quantity(told["least_cpu_seconds"], "s"), quantity(told["seconds_to_draw_and_pack"], "s"),
         f"{told['peak_bytes'] / 2**30:.2f} GiB") for name, told in details.items()
    )  # fmt: skip
    return table(head, rows)


def _answers(details: Mapping[str, Any]) -> str:
    head = ("", "`tps_e2e` run", "median (p10 .. p90)", "tokens", "`tpf_total` run", "median", "`tpf_denoise`",
            "`tpf_total_orl`", "verified (95 %)")  # fmt: skip
    return table(head, (_answer_row(name, told) for name, told in details.items()))


def _answer_row(name: str, told: Mapping[str, Any]) -> tuple[str, ...]:
    tps, tpf, tokens = told.get("tps_e2e"), told.get("tpf_total"), told["num_tokens"]
    cells = [name, "", ""] if tps is None else [
        name, f"{tps['run']:.0f}", f"{tps['median']:.0f} ({tps['p10']:.0f} .. {tps['p90']:.0f})",
    ]  # fmt: skip
    cells.append(f"{tokens['median']:.0f}")
    cells += ["", "", "", ""] if tpf is None else [
        f"{tpf['run']:.2f}", f"{tpf['median']:.2f}", f"{told['tpf_denoise']:.2f}", f"{told['tpf_total_orl']:.2f}",
    ]  # fmt: skip
    if "verified_rate" not in told:
        return *cells, ""
    low, high = told["verified_interval"]
    return *cells, f"{told['verified_rate']:.3f} ({low:.3f} .. {high:.3f}) of {told['num']}"


def read_results() -> list[Result]:
    """All results of this schema, by name."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))]
    return [result for result in found if result.get("schema") == SCHEMA]


def main() -> int:
    """Write the page, or compare it; returns the exit status."""
    text = page(read_results())
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(text, encoding="utf-8")
        return 0
    if not TARGET.exists() or TARGET.read_text(encoding="utf-8") != text:
        print(f"error: docs/{TARGET.name} is stale; run python benchmarks/report.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
