"""Run two public clients against a server, over held-out word problems: lm-evaluation-harness and DFlash's benchmark.

    pip install 'dlmrt[serve,train]' 'lm-eval[api]' dflash
    python benchmarks/clients.py [MODEL] [--base-url URL] [--problems 50]

The clients read data sets by name; the problems are written where they look: a task file for lm-eval, a folder
`openai/gsm8k` for DFlash's client, both in a temporary folder, so nothing is downloaded. The last line on stdout is one
JSON document; the exit status is 1 when a client failed. What is shown is that the clients complete and read figures
they understand; the rates belong to the machine.

Source: ours; options as in lm-eval 0.4.13 and dflash 0.1.0.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from orl.tasks import get_task
from soak import start_server

TASK = "dlmrt_word_problems"
MAX_TOKENS = 192
LM_EVAL_TASK = f"""\
task: {TASK}
dataset_path: json
dataset_kwargs: {{data_files: {{test: FILE}}}}
test_split: test
output_type: generate_until
num_fewshot: 0
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer.split('#### ')[-1]}}}}"
generation_kwargs: {{until: ["</s>"], max_gen_toks: {MAX_TOKENS}, temperature: 0}}
filter_list:
  - name: strict-match
    filter: [{{function: regex, regex_pattern: "#### (-?[0-9]+)"}}, {{function: take_first}}]
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
GSM8K_CARD = """\
---
configs:
- config_name: main
  data_files: [{split: test, path: test.jsonl}]
---
"""


def write_problems(folder: Path, count: int) -> None:
    """Problems in the form of GSM8K, where both clients find them."""
    task = get_task("word_problems")
    problems = [task.problem(index, "heldout") for index in range(count)]
    lines = "".join(json.dumps({"question": p.prompt, "answer": p.response}) + "\n" for p in problems)
    data = folder / "openai" / "gsm8k"
    data.mkdir(parents=True)
    (data / "test.jsonl").write_text(lines, encoding="utf-8")
    (data / "README.md").write_text(GSM8K_CARD, encoding="utf-8")
    tasks = folder / "tasks"
    tasks.mkdir()
    text = LM_EVAL_TASK.replace("FILE", str(data / "test.jsonl"))
    (tasks / f"{TASK}.yaml").write_text(text, encoding="utf-8")


def run(folder: Path, *command: str) -> str:
    """What a client prints; its failure is ours."""
    environment = {**os.environ, "HF_DATASETS_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    environment |= {"OPENAI_API_KEY": "none", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"error: {command[1]} ended with status {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


def run_lm_eval(folder: Path, url: str, model: str) -> dict[str, float]:
    """Exact match of the harness."""
    where = f"model={model},base_url={url}/v1/chat/completions,num_concurrent=1,max_retries=1,timeout=600"
    run(
        folder, "-m", "lm_eval", "run", "--model", "local-chat-completions", "--model_args", where, "--tasks", TASK,
        "--include_path", "tasks", "--apply_chat_template", "--output_path", "out", "--log_samples",
    )  # fmt: skip
    (found,) = (folder / "out").rglob("results_*.json")
    results = json.loads(found.read_text(encoding="utf-8"))["results"][TASK]
    return {name: value for name, value in results.items() if name.startswith("exact_match")}


def run_dflash(folder: Path, url: str, model: str, count: int) -> dict[str, float]:
    """The figures that DFlash's client prints."""
    text = run(
        folder, "-m", "dflash.cli", "benchmark", "openai", "--base-url", url, "--model", model, "--dataset", "gsm8k",
        "--num-prompts", str(count), "--concurrency", "1", "--temperature", "0", "--max-new-tokens", str(MAX_TOKENS),
    )  # fmt: skip
    pairs = re.findall(r"^(Latency|Output tokens|Throughput|Accept length|Spec verify ct): +([\d.,]+)", text, re.M)
    return {name: float(value.replace(",", "")) for name, value in pairs}


def main() -> int:
    """Run both clients; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", nargs="?", default="dlmrt-tiny")
    parser.add_argument("--base-url", help="a server that runs already")
    parser.add_argument("--problems", type=int, default=50)
    options = parser.parse_args()
    child, url = None, options.base_url
    if url is None:
        child, server = start_server(options.model, [])
        url = f"http://{server.host}:{server.port}"
    document: dict[str, Any] = {"schema_version": 1, "benchmark": "clients", "model": options.model}
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_problems(folder, options.problems)
            document["lm_eval"] = run_lm_eval(folder, url, Path(options.model).name)
            document["dflash"] = run_dflash(folder, url, Path(options.model).name, options.problems)
    finally:
        if child is not None:
            child.terminate()
            child.wait(120)
    print(json.dumps({**document, "problems": options.problems}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
