"""Write what the program knows into docs; with --check, fail when a file is stale.

cli.md comes from the live --help of `dlmrt` and `orl`, the table of request fields in server.md from the server.

Source: ours; the habit is simonw/llm's docs/help.md.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "cli.md"
SERVER = ROOT / "docs" / "server.md"
WIDTH = 110
HEAD = """# Command line

This page is written by `make docs` from the programs' own help; do not edit it.

Data goes to stdout; notices, statistics and errors go to stderr. An error is one line, `--debug` adds its traceback.
Exit status: 0, 1 failure, 2 usage, 130 Ctrl-C. A model is the name of an embedded checkpoint, a folder in Hugging Face
layout, or a hub id such as `org/name`. `dlmrt run` is `dlmrt generate`, and without a prompt on a terminal it is
`dlmrt chat`; `dlmrt doctor` is `dlmrt env`, `dlmrt convert` is `dlmrt quantize`.

`--decode-config` reads TOML, YAML or JSON with the long names of the decode options as keys (`max_denoising_steps`, or
an alias); an option on the command line overrules the file. What neither gives comes from the checkpoint's
generation_config.json, then from the commit rule's own defaults; `dlmrt show` prints the result.
"""


def page() -> str:
    """The whole text of docs/cli.md."""
    parts = [HEAD]
    for program in ("dlmrt", "orl"):
        top = _help(program)
        parts.append(f"## {program}\n\n```text\n{top}```\n")
        parts += [f"## {program} {verb}\n\n```text\n{_help(program, verb)}```\n" for verb in _verbs(top)]
    return "\n".join(parts)


def _help(*words: str) -> str:
    environment = {**os.environ, "COLUMNS": str(WIDTH), "NO_COLOR": "1", "TERM": "dumb"}
    command = [sys.executable, "-m", words[0], *words[1:], "--help"]
    done = subprocess.run(command, env=environment, cwd=ROOT / "src", capture_output=True, text=True, check=True)
    text = done.stdout.replace(f"python -m {words[0]}", words[0])
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines()) + "\n"


def _verbs(top: str) -> list[str]:
    """Names under "Commands:"; continuation lines are indented further."""
    return re.findall(r"^  ([a-z][a-z-]*)(?=  )", top.partition("Commands:")[2], flags=re.MULTILINE)


def server_page() -> str:
    """The text of docs/server.md with the table of fields as the server has it."""
    sys.path.insert(0, str(ROOT / "src"))
    from dlmrt.serve.fields import markdown_table

    before, start, rest = SERVER.read_text(encoding="utf-8").partition("<!-- fields -->\n")
    _, end, after = rest.partition("<!-- /fields -->")
    return f"{before}{start}{markdown_table()}\n{end}{after}"


def main() -> int:
    """Write the pages, or compare them; returns the exit status."""
    status = 0
    for target, text in ((TARGET, page()), (SERVER, server_page())):
        if "--check" not in sys.argv[1:]:
            target.write_text(text, encoding="utf-8")
        elif not target.exists() or target.read_text(encoding="utf-8") != text:
            print(f"error: {target.relative_to(ROOT)} is stale; run make docs", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
