"""`dlmrt generate`: where the prompt comes from, what goes to which stream, and how errors end."""

from __future__ import annotations

import json

import pytest

from dlmrt.cli.generate import model_and_prompt
from dlmrt.cli.session import DEFAULT_MODEL, set_cuda_graph
from dlmrt.env import Environment
from dlmrt.errors import UsageError


def _user(text):
    return [{"role": "user", "content": text}]


def test_prints_the_answer_and_nothing_else(cli, tiny_model, engine):
    outcome = cli("generate", tiny_model, "hello")
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out == engine.generate(_user("hello")).text + "\n"


@pytest.mark.parametrize(
    ("arguments", "stdin"),
    [
        (("--model", "MODEL", "hello"), b"ignored"),
        (("--model-path", "MODEL"), b"hello\n"),
        (("MODEL",), b"hello\n"),
        (("MODEL", "-"), b"hello"),
        (("--model", "MODEL", "-"), b"hello"),
    ],
)
def test_prompt_comes_from_argument_or_stdin(cli, tiny_model, engine, arguments, stdin):
    given = [str(tiny_model) if word == "MODEL" else word for word in arguments]
    outcome = cli("generate", *given, stdin=stdin)
    assert outcome.out == engine.generate(_user("hello")).text + "\n", outcome.err


def test_run_is_generate(cli, tiny_model, engine):
    assert cli("run", tiny_model, "hello").out == engine.generate(_user("hello")).text + "\n"


def test_raw_prompt_and_system_message(cli, tiny_model, engine):
    assert cli("generate", tiny_model, "hello", "--raw").out == engine.generate("hello").text + "\n"
    turns = [{"role": "system", "content": "be brief"}, *_user("hello")]
    assert cli("generate", tiny_model, "hello", "--system", "be brief").out == engine.generate(turns).text + "\n"


def test_thinking_is_switched_in_the_chat_template(cli, tiny_model, engine):
    messages = [{"role": "user", "content": "hello"}]
    texts = [engine.generate(messages, template_options={"enable_thinking": value}).text for value in (True, False)]
    assert texts[0] != texts[1]
    assert [cli("generate", tiny_model, "hello", option).out for option in ("--thinking", "--no-thinking")] == [
        text + "\n" for text in texts
    ]
    assert cli("chat", tiny_model, "--no-thinking", stdin=b"hello\n").out == texts[1] + "\n"
    refused = cli("generate", tiny_model, "hello", "--raw", "--no-thinking")
    assert refused.status == 2 and "--raw" in refused.err and refused.err.count("\n") == 1
    with pytest.raises(UsageError, match="no effect without messages"):
        engine.generate("hello", template_options={"enable_thinking": False})


def test_json_is_one_document_that_adds_up(cli, tiny_model, engine):
    """K61, K64: prompt tokens are not output, and the tokens of the forwards sum to the answer."""
    outcome = cli("generate", tiny_model, "hello", "--json", "--max-tokens", "9")
    document = json.loads(outcome.out)
    expected = engine.generate(_user("hello"), max_tokens=9)
    assert outcome.out.count("\n") == 1
    assert document["text"] == expected.text
    assert document["token_ids"] == list(expected.token_ids)
    usage, forwards = document["usage"], document["record"]["forwards"]
    assert usage["completion_tokens"] == 9 == sum(forward["num_finalised"] for forward in forwards)
    assert usage["prompt_tokens"] == len(engine.tokenizer.encode_messages(_user("hello")))
    assert usage["num_forwards"] == usage["num_denoise_steps"] + usage["num_commit_forwards"]
    assert usage["tpf_total"] == pytest.approx(9 / usage["num_forwards"])
    assert (document["finish_reason"], document["record"]["end_reason"]) == ("length", "max_tokens")
    assert document["record"]["settings"]["max_tokens"] == 9


def test_spellings_that_agree_are_accepted(cli, tiny_model):
    options = ("--threshold", "0.5", "--confidence-threshold", "0.5", "--max-tokens", "3")
    outcome = cli("generate", tiny_model, "hello", "--json", *options)
    assert json.loads(outcome.out)["record"]["settings"]["threshold"] == 0.5


def test_timings_go_to_stderr(cli, tiny_model, engine):
    outcome = cli("generate", tiny_model, "hello", "--timings", "--seed", "7")
    assert outcome.out == engine.generate(_user("hello")).text + "\n"
    rows = {line.split()[0]: line for line in outcome.err.splitlines()}
    assert [*rows] == [
        "load",
        "prompt",
        "generation",
        "forwards",
        "tokens/forward",
        "blocks",
        "end",
        "settings",
        "total",
    ]
    assert "20 tokens" in rows["generation"]
    assert "seed=7" in rows["settings"]


def test_canvas_without_a_terminal_is_announced(cli, tiny_model):
    plain = cli("generate", tiny_model, "hello")
    asked = cli("generate", tiny_model, "hello", "--show-canvas")
    assert (asked.status, asked.out) == (0, plain.out)
    assert asked.err.startswith("notice: --show-canvas needs a terminal")
    assert cli("generate", tiny_model, "hello", "--show-canvas", "--quiet").err == ""


def test_settings_file_and_options(cli, tiny_model, engine, tmp_path):
    """K69: overriding one value keeps the others."""
    (tmp_path / "a.toml").write_text("threshold = 0.5\nmax_new_tokens = 6\n")
    (tmp_path / "b.yaml").write_text("dynamic_threshold: 0.5\nmax_tokens: 6\n")
    (tmp_path / "c.json").write_text('{"confidence_threshold": 0.5, "max_completion_tokens": 6}')
    expected = engine.generate(_user("hello"), threshold=0.5, max_tokens=6)
    for file in ("a.toml", "b.yaml", "c.json"):
        document = json.loads(cli("generate", tiny_model, "hello", "--json", "--decode-config", tmp_path / file).out)
        assert document["token_ids"] == list(expected.token_ids)
    overruled = cli(
        "generate", tiny_model, "hello", "--json", "--decode-config", tmp_path / "a.toml", "--max-tokens", "3"
    )
    settings = json.loads(overruled.out)["record"]["settings"]
    assert (settings["max_tokens"], settings["threshold"]) == (3, 0.5)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--treshold", "1"), "--threshold"),
        (("--threshold", "high"), "--threshold"),
        (("--threshold", "1.5"), "threshold is 1.5"),
        (("--threshold", "nan"), "threshold"),
        (("--max-tokens", "0"), "max_tokens"),
        (("--commit-rule", "treshold"), "did you mean 'threshold'"),
        (("--executor", "eagre"), "did you mean 'eager'"),
        (("--dtype", "float23"), "float32"),
        (("--num-threads", "0"), "--num-threads"),
        (("--raw", "--system", "x"), "--system"),
        (("--model", "elsewhere"), "two models"),
        (("--threshold", "0.5", "--confidence-threshold", "0.6"), "given as 0.5, 0.6"),
        (("--seed", "1", "--seed", "2"), "given as 1, 2"),
        (("--seed", "18446744073709551616"), "seed"),
        (("--stop", "\udcff"), "not valid Unicode"),
        (("--num-threads", "9" * 30), "num_threads"),
        (("--revision", "main"), "revision 'main'"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(cli, tiny_model, arguments, said):
    """K70: nonsense values and options without effect are errors."""
    outcome = cli("generate", tiny_model, "hello", *arguments)
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1
    assert said in outcome.err


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.toml", "treshold = 1", "unknown decode setting 'treshold'; did you mean 'threshold'?"),
        ("x.toml", "threshold = 'high'", "must be a number"),
        ("x.toml", "threshold = ", "not valid TOML"),
        ("x.json", "{", "not valid JSON"),
        ("x.yaml", "a: [", "not valid YAML"),
        ("x.yaml", "- 1", "holds no keys"),
        ("x.json", '{"steps": 3, "max_denoising_steps": 4}', "given twice"),
        ("x.ini", "threshold = 1", ".toml, .yaml or .json"),
        ("x.json", '{"threshold": 0.5, "threshold": 0.9}', "'threshold' occurs twice"),
        ("x.yaml", "threshold: 0.5\nthreshold: 0.9\n", "'threshold' occurs twice"),
        ("x.json", "[" * 100_000, "not valid JSON"),
        ("x.yaml", "1: 2", "unknown decode setting 1"),
    ],
)
def test_faulty_settings_files_are_refused(cli, tiny_model, tmp_path, name, content, said):
    (tmp_path / name).write_text(content)
    outcome = cli("generate", tiny_model, "hello", "--decode-config", tmp_path / name)
    assert outcome.status == 2
    assert outcome.err.count("\n") == 1
    assert said in outcome.err


def test_missing_settings_file(cli, tiny_model, tmp_path):
    outcome = cli("generate", tiny_model, "hello", "--decode-config", tmp_path / "no.toml")
    assert outcome.status == 2
    assert "no.toml" in outcome.err


@pytest.mark.parametrize("stdin", [b"", b"\n"])
def test_empty_prompt_is_refused(cli, tiny_model, stdin):
    outcome = cli("generate", tiny_model, stdin=stdin)
    assert outcome.status == 2
    assert "prompt is empty" in outcome.err


def test_prompt_that_is_not_utf8_is_refused(cli, tiny_model):
    for outcome in (cli("generate", tiny_model, stdin=b"\xff\xfe"), cli("generate", tiny_model, "a\udcff")):
        assert outcome.status == 2
        assert "UTF-8" in outcome.err


def test_unknown_model(cli):
    outcome = cli("generate", "no-such-model", "hello")
    assert outcome.status == 2
    assert "'no-such-model' is neither an embedded model nor a folder" in outcome.err


def test_damaged_checkpoint_exits_1_and_debug_shows_where(cli, tiny_model, tmp_path):
    (tmp_path / "config.json").write_text("{")
    quiet = cli("generate", tmp_path, "hello")
    assert quiet.status == 1
    assert quiet.err.count("\n") == 1
    assert "Traceback" in cli("generate", tmp_path, "hello", "--debug").err


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("DLMRT_NUM_THREADS", "two", "DLMRT_NUM_THREADS='two'"),
        ("DLMRT_NUM_THREADS", "9" * 5000, "not a whole number"),
        ("DLMRT_NUM_THREADS", "99999", "num_threads is 99999"),
        ("DLMRT_LOG_LEVEL", "loud", "DLMRT_LOG_LEVEL='loud'"),
        ("DLMRT_EXECUTOR", "gpu", "unknown executor 'gpu'"),
        ("DLMRT_CUDA_GRAPH", "whole", "use one of loop, step, off"),
        ("DLMRT_EXECUTR", "eager", "did you mean 'DLMRT_EXECUTOR'"),
    ],
)
def test_environment_is_checked(cli, tiny_model, monkeypatch, name, value, said):
    monkeypatch.setenv(name, value)
    outcome = cli("generate", tiny_model, "hello")
    assert outcome.status == 2
    assert said in outcome.err


def test_an_option_overrules_the_environment(cli, tiny_model, monkeypatch):
    monkeypatch.setenv("DLMRT_EXECUTOR", "gpu")
    assert cli("generate", tiny_model, "hello", "--executor", "eager").status == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--cuda-graph", "whole", "--executor", "cuda"), "use one of loop, step, off"),
        (("--cuda-graph", "step", "--executor", "eager"), "no effect on executor 'eager'"),
        (("--cuda-graph", "step"), "no effect on executor 'auto'"),
    ],
)
def test_how_the_cuda_executor_runs_loops_is_said_to_that_executor_only(cli, tiny_model, options, said):
    outcome = cli("generate", tiny_model, "hello", *options)
    assert outcome.status == 2
    assert said in outcome.err


def test_the_option_of_the_cuda_executor_reaches_it(monkeypatch):
    monkeypatch.setenv("DLMRT_CUDA_GRAPH", "loop")
    set_cuda_graph(None, "cpu")
    assert Environment.read().cuda_graph == "loop"
    set_cuda_graph("step", "cuda")
    assert Environment.read().cuda_graph == "step"


class TestModelAndPrompt:
    """`[MODEL] [PROMPT]` with either left out."""

    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            ((None, None, None), (DEFAULT_MODEL, None)),
            (("What is 2 + 3?", None, None), (DEFAULT_MODEL, "What is 2 + 3?")),
            (("-", None, None), (DEFAULT_MODEL, "-")),
            (("Qwen/Qwen3-0.6B", None, None), ("Qwen/Qwen3-0.6B", None)),
            (("Is it 3/4 or 1/2?", None, None), (DEFAULT_MODEL, "Is it 3/4 or 1/2?")),
            (("word", None, "there"), ("there", "word")),
            (("here", "word", None), ("here", "word")),
            (("here", "word", "here"), ("here", "word")),
            ((None, None, "there"), ("there", None)),
            (("line\nline", None, None), (DEFAULT_MODEL, "line\nline")),
            (("\u4f60" * 200, None, None), (DEFAULT_MODEL, "\u4f60" * 200)),  # 600 bytes, too long for a file name
            (("", None, None), (DEFAULT_MODEL, "")),
            (("x", None, ""), ("", "x")),
            (("x" * 100_000, None, None), (DEFAULT_MODEL, "x" * 100_000)),
        ],
    )
    def test_table(self, given, expected):
        assert model_and_prompt(*given) == expected

    def test_a_folder_is_a_model(self, tmp_path):
        assert model_and_prompt(str(tmp_path), None, None) == (str(tmp_path), None)

    def test_two_models_that_differ_are_refused(self):
        with pytest.raises(UsageError, match="two models"):
            model_and_prompt("here", "word", "there")
