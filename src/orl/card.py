"""Model cards written from measured numbers: a card cannot say what no evaluation report says.

Source: front matter keys of the Hugging Face hub's model cards; ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orl.evaluate import by_task

LICENSE = "apache-2.0"


def model_card(
    name: str, reports: Sequence[Mapping[str, Any]], *, summary: str, training: str, limits: Sequence[str]
) -> str:
    """The README.md of a checkpoint folder.

    Args:
        reports: reports of `orl.evaluate.evaluate` on this checkpoint; their settings become rows of one table.
        summary: one paragraph on what the model is.
        training: one paragraph on how it was made.
        limits: what it cannot do, a sentence each.
    """
    front = ["---", f"license: {LICENSE}", "library_name: dlmrt", "pipeline_tag: text-generation",
             "tags: [diffusion-language-model, block-diffusion]", "datasets: [reasoning-gym]", "---"]  # fmt: skip
    lines = [*front, "", f"# {name}", "", summary, "", "```", f"dlmrt generate {name} 'What is 2 + 3?'", "```", ""]
    lines += ["## How it was made", "", training, "", "## Measured", "", conditions_line(reports[0]), ""]
    lines += _markdown_table(reports) + ["", "## Limits", ""] + [f"- {limit}" for limit in limits]
    return "\n".join(lines) + "\n"


def conditions_line(report: Mapping[str, Any]) -> str:
    """What the numbers were measured under, in one sentence."""
    c = report["conditions"]
    num_tasks = len(report["results"][0]["tasks"])
    return (
        f"{c['num_problems'] // num_tasks} held-out problems per task, never seen in training; executor "
        f"{c['executor']}, {c['dtype']}, seed {c['seed']}. Each cell: share of verified answers @ tokens per forward "
        "(sum of tokens / sum of denoise and commit forwards)."
    )


def _markdown_table(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """A task a row, a decode setting a column."""
    results = [row for report in reports for row in report["results"]]
    lines = ["| task | " + " | ".join(row["setting"] for row in results) + " |", "|---" * (len(results) + 1) + "|"]
    for task, cells in by_task(results).items():
        text = (f"{c['verified_rate']:.3f} @ {c['tpf_total']:.2f}" for c in cells)
        lines.append(f"| {task} | " + " | ".join(text) + " |")
    return lines
