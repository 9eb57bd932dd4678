"""Take the pictures of docs/images anew: the page in light and dark, a race, a phone, and the terminal chat.

    python scripts/screenshots.py [FOLDER]

The pages come from `dlmrt serve` with the embedded model, shown by a headless Chromium; the terminal is a real one, of
which one frame of the live canvas and the end are shown. Requests have temperature 0, so pictures change only when the
program or the model does.

Source: ours.
"""

from __future__ import annotations

import html
import json
import os
import pty
import re
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "src"), str(ROOT / "tests" / "dlmrt" / "serve")]

from browser import Browser  # noqa: E402  the tests' own

MODEL = "dlmrt-tiny"
PROBLEM = (
    "A cake has 60 servings. If Emma can eat 4 servings a day while Liam can eat 2 times as much, how many days will "
    "the cake last?"
)
DONE = "!document.getElementById('scrub').hidden && document.getElementById('play').textContent === 'Play'"
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"  # around the live canvas
REPAINT = re.compile(r"\r(?:\x1b\[2K|\x1b\[1A)+")
WIDTH = 88


@contextmanager
def server() -> Iterator[str]:
    """The URL of a server that is ready."""
    command = [sys.executable, "-m", "dlmrt", "serve", MODEL, "--port", "0", "--quiet"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    assert child.stdout is not None
    try:
        yield json.loads(child.stdout.readline())["url"]
    finally:
        child.terminate()
        child.wait(60)


def environment() -> dict[str, str]:
    """Of a child."""
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    return {**kept, "PYTHONPATH": str(ROOT / "src"), "TERM": "xterm-256color", "COLORTERM": "truecolor"}


def ask(browser: Browser, url: str, **settings: str) -> None:
    """Load the page anew, enter the problem and run it; settings are those of A, and of B with a prefix `B_`."""
    browser.open(url)
    browser.wait_for("document.getElementById('model').textContent.includes('canvas of')")
    if any(name.startswith("B_") for name in settings):
        browser.run("document.getElementById('race').click()")
    for name, value in settings.items():
        lane, field = ("B", name[2:]) if name.startswith("B_") else ("A", name)
        browser.run(f"document.querySelector('#settings-{lane} [name={field}]').value = {json.dumps(value)}")
    browser.run(f"document.getElementById('prompt').value = {json.dumps(PROBLEM)}")
    browser.run("document.getElementById('prompt').blur()")
    browser.run("document.getElementById('run').click()")
    browser.wait_for(DONE)


def seek(browser: Browser, share: float) -> None:
    """Move the slider."""
    browser.run(
        "(() => { const at = document.getElementById('at'); "
        f"at.value = Math.round({share} * at.max); at.dispatchEvent(new Event('input')); scrollTo(0, 0); }})()"
    )


def page_shots(folder: Path) -> None:
    """The page in its states."""
    with server() as url, tempfile.TemporaryDirectory() as profile:
        browser = Browser(Path(profile), width=1000, height=700)
        try:
            for is_dark in (False, True):
                browser.dark(is_dark)
                ask(browser, url, temperature="0", commit_rule="steps", max_denoising_steps="12")
                seek(browser, 0.62)
                browser.screenshot(folder / f"page-{'dark' if is_dark else 'light'}.png", full=True)
            ask(
                browser, url, commit_rule="threshold", threshold="0.9", temperature="0", B_commit_rule="steps",
                B_temperature="0",
            )  # fmt: skip
            seek(browser, 0.3)
            browser.screenshot(folder / "page-race.png", full=True)
            browser.dark(False)
            browser.resize(390, 844, is_mobile=True, scale=2)
            ask(browser, url, temperature="0", commit_rule="steps", max_denoising_steps="12")
            seek(browser, 0.62)
            browser.screenshot(folder / "page-phone.png", full=True)
            assert browser.complaints == [], browser.complaints
        finally:
            browser.close()


def terminal() -> str:
    """What the terminal receives during a chat of one question and /stats."""
    ours, theirs = pty.openpty()
    os.set_blocking(ours, True)
    subprocess.run(["stty", "-F", os.ttyname(theirs), "cols", str(WIDTH), "rows", "40"], check=True)
    command = [sys.executable, "-m", "dlmrt", "chat", MODEL, "--temperature", "0", "--commit-rule", "steps"]
    child = subprocess.Popen(
        [*command, "--max-denoising-steps", "12"], stdin=theirs, stdout=theirs, stderr=theirs, env=environment(),
        start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    text = ""
    for line in (None, PROBLEM, "/stats", "/exit"):
        if line is not None:
            os.write(ours, line.encode() + b"\n")
        before = len(text)
        while not text[before:].endswith("> ") and select.select([ours], [], [], 120)[0]:
            try:
                piece = os.read(ours, 65536).decode("utf-8", "replace")
            except OSError:  # closed
                break
            text += piece
    child.wait(60)
    os.close(ours)
    return text


def chat_shot(folder: Path) -> None:
    """One frame of the live canvas, and the end of the same chat."""
    from rich.ansi import AnsiDecoder
    from rich.console import Console

    before, _, rest = terminal().partition(HIDE_CURSOR)
    live, _, after = rest.partition(SHOW_CURSOR)
    frames = [frame for frame in REPAINT.split(live) if "step" in frame]
    parts = []
    for text in (before + frames[len(frames) // 3], before + REPAINT.sub("", after).lstrip("\r\n")):
        console = Console(record=True, width=WIDTH, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        for line in AnsiDecoder().decode(text.replace("\r\n", "\n").removesuffix("/exit\n")):
            console.print(line)
        parts.append(console.export_html(inline_styles=True, code_format="<pre>{code}</pre>"))
    style = (
        "body{margin:0;background:#16181b;color:#e6e3dc;font:15px/1.5 'DejaVu Sans Mono',monospace}"
        "pre{font:inherit;margin:0;padding:18px 22px;white-space:pre-wrap}pre+pre{border-top:1px solid #3a3d42}"
    )
    with tempfile.TemporaryDirectory() as profile:
        page = Path(profile) / "chat.html"
        title = html.escape("dlmrt chat")
        page.write_text(
            f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{style}</style>{''.join(parts)}",
            encoding="utf-8",
        )
        browser = Browser(Path(profile) / "browser", width=860, height=300)
        try:
            browser.open(page.as_uri())
            browser.screenshot(folder / "chat.png", full=True)
        finally:
            browser.close()


def main() -> None:
    """Take all pictures."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images"
    folder.mkdir(parents=True, exist_ok=True)
    page_shots(folder)
    chat_shot(folder)
    print("\n".join(str(path.name) for path in sorted(folder.glob("*.png"))))


if __name__ == "__main__":
    main()
