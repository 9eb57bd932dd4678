"""`dlmrt chat` with lines piped to stdin: history, commands, errors."""

from __future__ import annotations

import pytest

from dlmrt.cli.chat import COMMANDS


def _lines(*lines):
    return "".join(f"{line}\n" for line in lines).encode()


def test_the_history_goes_with_the_next_turn(cli, tiny_model, engine):
    first = engine.generate([{"role": "user", "content": "hello"}])
    turns = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "and?"},
    ]
    second = engine.generate(turns)
    assert second.text != engine.generate(turns[2:]).text  # or the test could not fail
    outcome = cli("chat", tiny_model, stdin=_lines("hello", "and?"))
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out == f"{first.text}\n{second.text}\n"


def test_clear_forgets_and_system_stays(cli, tiny_model, engine):
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    answer = engine.generate(turns).text
    outcome = cli("chat", tiny_model, "--system", "be brief", stdin=_lines("hello", "/clear", "hello", "/exit", "no"))
    assert outcome.out == f"{answer}\n{answer}\n"


def test_set_changes_the_next_answer(cli, tiny_model, engine):
    outcome = cli("chat", tiny_model, stdin=_lines("/set max-tokens 5", "hello", "/stats"))
    expected = engine.generate([{"role": "user", "content": "hello"}], max_tokens=5)
    assert outcome.out == expected.text + "\n"
    assert "max_tokens = 5" in outcome.err
    assert "5 tokens" in outcome.err


def test_help_lists_every_command(cli, tiny_model):
    outcome = cli("chat", tiny_model, stdin=_lines("/help"))
    assert all(command in outcome.err for command in COMMANDS)
    assert outcome.out == ""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/sett x 1", "did you mean '/set'?"),
        ("/set treshold 1", "did you mean 'threshold'?"),
        ("/set threshold", "has no value"),
        ("/set threshold high", "must be a number"),
        ("/clear all", "takes no arguments"),
        ("/set threshold 7", None),
        ('/set sampler_config {"entropy_bound": 1}', "holds several settings"),
        ("/set seed " + "9" * 5000, "must be a whole number"),
        ("/set threshold NaN", None),
        ("/set", None),
        ("/", "unknown command '/'"),
    ],
)
def test_a_mistake_is_reported_and_the_chat_goes_on(cli, tiny_model, engine, line, said):
    outcome = cli("chat", tiny_model, stdin=_lines(line, "/set threshold null", "hello"))
    assert outcome.status == 0
    assert outcome.out == engine.generate([{"role": "user", "content": "hello"}]).text + "\n"
    assert said is None or said in outcome.err


def test_a_failed_request_leaves_the_history_as_it_was(cli, tiny_model, engine):
    outcome = cli("chat", tiny_model, stdin=_lines("/set threshold 7", "lost", "/set threshold null", "hello"))
    assert "error: threshold is 7" in outcome.err
    assert outcome.out == engine.generate([{"role": "user", "content": "hello"}]).text + "\n"


def test_a_line_that_is_not_utf8_is_reported_and_the_chat_goes_on(cli, tiny_model, engine):
    outcome = cli("chat", tiny_model, stdin=b"\xff\xfe\nhello\n")
    assert "valid Unicode" in outcome.err
    assert outcome.out == engine.generate([{"role": "user", "content": "hello"}]).text + "\n"


def test_stats_before_any_answer(cli, tiny_model):
    assert "no answer yet" in cli("chat", tiny_model, stdin=_lines("/stats")).err
