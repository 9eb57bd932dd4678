"""The page in a headless browser: the canvas changes step by step, is replayed, and two settings race."""

from __future__ import annotations

import numpy as np
import pytest

from dlmrt.testing import END, encode_bytes, peaked, scripted_engine, tiny_config

from .browser import CHROMIUM, Browser

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: install the package chromium to test the page")

ANSWER = "Noise becomes text,\nposition by position."


def resolving(canvas, positions, step, view):
    """Surer with every step, in an order of its own; some slots are wrong at first and mended later."""
    draw = np.random.default_rng(len(view.context_S))
    sure = np.clip(0.6 * draw.random(len(canvas)) + 0.15 * step, 0.02, 0.97).astype(np.float32)
    logits = peaked([*encode_bytes(ANSWER), END], positions - view.num_prompt, confidence=sure, fill=END)
    wrong = peaked(encode_bytes("?"), np.zeros(1, dtype=np.int32), confidence=0.95)[0]
    logits[draw.random(len(canvas)) < (0.2 if step < 2 else 0.0)] = wrong
    return logits


@pytest.fixture
def page(start, tmp_path):
    """The page of a server whose answers resolve, open in a browser."""
    config = tiny_config(diffusion={"canvas_length": 16, "noise": "uniform", "commit_rule": "joint_threshold"})
    engine, _ = scripted_engine(
        resolving, config=config, generation_defaults={"diffusion": {"threshold": 0.8, "edit_threshold": 0.5}}
    )
    server = start(engine)
    browser = Browser(tmp_path)
    browser.open(server.url)
    browser.wait_for("document.getElementById('model').textContent.includes('canvas of 16')")
    yield browser
    browser.close()


FINAL = "[...document.querySelectorAll('#lane-A .slot:not(.past)')].map(s => s.textContent).join('')"
DONE = "!document.getElementById('scrub').hidden"


def test_the_canvas_changes_and_can_be_replayed(page, tmp_path):
    page.type("Show me")
    page.press("Enter", modifiers=2, code=13)
    page.wait_for(DONE)
    assert page.run(FINAL).rstrip("\u00b7") == ANSWER
    assert page.run("document.querySelector('#lane-A .answer').textContent") == ANSWER
    seen = page.run(
        "(() => { const at = document.getElementById('at'), seen = [];"
        "for (let k = 0; k <= Number(at.max); k += 1) { at.value = k; at.dispatchEvent(new Event('input'));"
        "const slots = [...document.querySelectorAll('#lane-A .slot')];"
        "const count = (name) => slots.filter((slot) => slot.classList.contains(name)).length;"
        "seen.push([slots.length, count('open'), count('new'), count('edited'),"
        " Number(document.querySelector('#lane-A [data-stat=forwards]').textContent)]); } return seen; })()"
    )
    assert seen[0][0] == 0 and [row[0] for row in seen[1:]] == sorted(row[0] for row in seen[1:])
    opened = [row[1] for row in seen[1:-1] if row[0] == 16]  # within the first block: noise -> committed
    assert opened == sorted(opened, reverse=True) and opened[0] > opened[-1]
    assert any(row[2] for row in seen) and any(row[3] for row in seen)  # new and edited positions are marked
    shades = page.run("new Set([...document.querySelectorAll('#lane-A .slot')].map(s => s.dataset.sure)).size")
    assert shades > 1  # certainty as shade
    assert page.run("document.getElementById('at').getAttribute('aria-valuetext')").startswith("block 3, step ")
    shot = tmp_path / "page.png"
    page.screenshot(shot)
    assert shot.stat().st_size > 10_000
    assert page.complaints == []


def test_a_race_shows_both_and_names_the_faster_one(page):
    page.type("Race")
    page.run("document.getElementById('race').click()")
    page.run("document.querySelector('#settings-A [name=threshold]').value = '0.5'")
    page.run("document.getElementById('run').click()")
    page.wait_for(DONE)
    page.wait_for("document.getElementById('play').textContent === 'Play'")
    verdict = page.run("document.getElementById('verdict').textContent")
    assert verdict.startswith("A was ") and "forwards against" in verdict
    assert page.run("document.querySelectorAll('.lane').length") == 2
    forwards = "Number(document.querySelector('#lane-%s [data-stat=forwards]').textContent)"
    assert page.run(forwards % "A") < page.run(forwards % "B")
    assert page.complaints == []


def test_an_example_is_there_and_typing_replaces_it(page):
    prompt = "document.getElementById('prompt').value"
    first = page.run(prompt)
    assert first.endswith("?") and page.run("document.querySelectorAll('.lane').length") == 1
    page.run("document.getElementById('example').click()")
    assert page.run(prompt) not in ("", first)
    page.run("document.getElementById('prompt').select()")
    page.type("mine")
    assert page.run(prompt) == "mine"
    names = page.run(
        "[...document.querySelectorAll('button, input, select, textarea')].filter(e => e.offsetParent !== null)"
        ".map(e => e.ariaLabel || e.labels?.[0]?.textContent || e.textContent)"
    )
    assert all(names), names  # every control has a name for a screen reader


def test_a_race_waits_where_motion_is_not_wanted(page):
    page.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
    page.run("document.getElementById('race').click()")
    page.run("document.getElementById('run').click()")
    page.wait_for(DONE)
    at, last, label = page.run(
        "(() => { const at = document.getElementById('at');"
        "return [at.value, at.max, document.getElementById('play').textContent]; })()"
    )
    assert (at, label) == (last, "Play")


def test_errors_are_shown_and_a_phone_sees_everything(page):
    page.resize(320, 700, is_mobile=True)
    page.type("x")
    page.run("document.querySelector('#settings-A [name=max_tokens]').value = '100000'")
    page.run("document.getElementById('run').click()")
    page.wait_for("!document.getElementById('problem').hidden")
    assert "do not fit a context" in page.run("document.getElementById('problem').textContent")
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    for is_dark in (False, True):
        page.dark(is_dark)
        colours = "(() => { const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]; })()"
        ink, paper = (sum(map(int, c[4:-1].split(","))) for c in page.run(colours))
        assert (ink > paper) == is_dark
    page.complaints = [c for c in page.complaints if "status of 400" not in c]
    assert page.complaints == []
