"""The command line: what it prints, its exit codes, and a short import."""
import json
import os
import subprocess
import sys

import pytest

from refengine.cli import main


def run(*arguments, stdin=None, **environment):
    """refengine in a process of its own."""
    return subprocess.run([sys.executable, "-m", "refengine", *arguments], input=stdin, capture_output=True, text=True,
                          env={**os.environ, **environment}, timeout=120)


def test_import_needs_neither_numpy_nor_any_extra():
    code = "import sys, refengine; print([m for m in ('numpy', 'tokenizers', 'jinja2', 'rich', 'gguf', 'torch') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_loading_and_chatting_needs_no_extra():
    code = """import sys
for name in ('gguf', 'torch', 'transformers', 'matplotlib'): sys.modules[name] = None
import refengine
chat = refengine.Chat(refengine.load("tiny"), refengine.load_tokenizer("tiny"), max_tokens=3)
print(len("".join(chat.send("Hello"))) > 0)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr


def test_every_public_name_is_there():
    import refengine

    assert all(getattr(refengine, name) is not None for name in refengine.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        refengine.no_such_name


def test_generate_prints_the_same_text_on_both_engines(capsys):
    texts = []
    for engine in ("sequential", "pipelined"):
        assert main(["generate", "--model", "tiny", "--engine", engine, "--max-tokens", "12", "Once upon a time"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and len(texts[0]) > 5


def test_a_chat_from_a_script_shows_what_was_cached_and_logs_it(tmp_path):
    log = tmp_path / "stats.log"
    done = run("chat", "--model", "tiny", "--greedy", "--max-tokens", "6", "--stats-log", str(log),
               stdin="Hello\n/regen\n/stats\n/undo\nHi\n/nonsense\n/reset\n/regen\n/quit\n")
    assert done.returncode == 0, done.stderr
    assert "0 cached" in done.stdout and "/regen" in done.stdout
    assert "there is no user message yet" in done.stdout, "a mistake is told, and the chat goes on"
    lines = log.read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["PFXCACHE", "PFXANSWER"] * 3
    assert lines[1] == lines[3] and json.loads(lines[1].removeprefix("PFXANSWER "))
    first, again = (dict(pair.split("=") for pair in line.split()[1:]) for line in lines[0:3:2])
    assert int(again["reused"]) == int(first["prompt"]) - 1 and again["forwarded"] == "1"


def test_answers_are_the_same_bytes_with_the_cache_off(tmp_path):
    logs = []
    for switch in ({}, {"REFENGINE_NO_PREFIX_CACHE": "1"}):
        log = tmp_path / f"{len(logs)}.log"
        run("chat", "--model", "tiny", "--max-tokens", "8", stdin="Hello\nAnd then?\nWhy?\n",
            REFENGINE_STATS_LOG=str(log), REFENGINE_GREEDY="1", **switch)
        logs.append(log.read_text().splitlines())
    answers = [[line for line in log if line.startswith("PFXANSWER")] for log in logs]
    assert answers[0] == answers[1] and len(answers[0]) == 3
    assert "reused=0" not in logs[0][2] and "reused=0" in logs[1][2]


@pytest.mark.parametrize(("arguments", "says"), (
    (["prove", "--model", "no/such/path"], "no such folder or file"),
    (["prove", "--chats", "0"], "must be at least 1"),
    (["prove", "--page-size", "0"], "at least 1"),
    (["generate", "--model", "tiny", "--capacity", "2", "a long prompt that does not fit"], "do not fit"),
    (["generate", "--model", "tiny", "--temperature", "-1", "x"], "temperature is -1.0"),
    (["synth", "--shape", "huge", "/nowhere"], "not one of"),
))
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(arguments, says, capsys):
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1 and "Traceback" not in err


def test_a_hub_id_offline_says_what_to_do_instead(capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["generate", "--model", "refengine-test/does-not-exist", "x"]) == 2
    err = capsys.readouterr().err
    assert "refengine-test/does-not-exist" in err and "Offline, give the path" in err


def test_doctor_finds_this_machine_fit(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "WRONG" not in out and out.count("ok ") >= 6 and "numpy" in out


def test_synth_writes_a_checkpoint_that_loads(tmp_path, capsys):
    assert main(["synth", "--shape", "tiny", "--seed", "4", str(tmp_path / "m")]) == 0
    assert main(["generate", "--model", str(tmp_path / "m"), "--max-tokens", "3", "Hello"]) == 0


HI, CALL = {"role": "user", "content": "Hi"}, {"function": {"name": "f", "arguments": '{"a": 1}'}}


def explained(tmp_path, value):
    (tmp_path / "t.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return main(["explain", "--model", "tiny", str(tmp_path / "t.json")])


def test_explain_says_of_each_turn_what_it_reused(tmp_path, capsys):
    thought = "<think>\nhm\n</think>\n\nHello"
    assert explained(tmp_path, {"messages": [HI, {"role": "assistant", "content": thought}, HI],
                                "template_arguments": {"enable_thinking": True}}) == 0
    out = capsys.readouterr().out
    assert "turn 0: 0 of" in out and "turn 1: " in out and "stripped reasoning" in out and "at message 1 (assistant)" in out
    assert int(out.splitlines()[-1].split()[0]) > 5 and out.splitlines()[-1].endswith("tokens forwarded again in all")


@pytest.mark.parametrize(("value", "says"), [
    ("{", "not a JSON file"), ('{"messages": ' + "[" * 5000, "not a JSON file"), (3, "a list of messages"),
    ([], "a list of messages"),
    ({"messages": []}, "a list of messages"), ([3], "messages[0] is 3"), ([{"content": "x"}], "messages[0] is"),
    ([{"role": "user"}], "no attribute 'content'"),
    ({"messages": [HI], "template_arguments": [1]}, "template_arguments is [1]"),
    ({"messages": [HI], "template_arguments": {"messages": []}}, "template_arguments is"),
    ([HI, {"role": "assistant", "content": "", "tool_calls": [3]}, HI], "messages[1].tool_calls[0] is 3"),
    ([HI, {"role": "assistant", "content": "", "raw": 3}, HI], "raw of messages[1]"), ([HI, {"role": "assistant",
    "content": "", "ids": [-1]}, HI], "raw of messages[1]"),
    ([{"role": "user", "content": "\ud800"}], "half a character")])
def test_a_broken_transcript_is_one_line_on_stderr(value, says, tmp_path, capsys):
    assert explained(tmp_path, value) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


@pytest.mark.parametrize("call", [CALL, {"function": {"name": "f"}}, {"name": "f", "arguments": {}}, {}])
def test_a_transcript_may_write_tool_calls_as_any_api_does(call, tmp_path, capsys):
    assert explained(tmp_path, [HI, {"role": "assistant", "content": "", "tool_calls": [call]}, HI]) == 0
    assert "template re-rendering" in capsys.readouterr().out, "this template does not show them"


def test_lint_template_says_where_the_built_in_template_stops_being_append_only(capsys):
    assert main(["lint-template", "tiny", "--conversations", "3"]) == 1
    out = capsys.readouterr().out
    assert "append-only  plain" in out and "NOT          thinking" in out and "stripped reasoning" in out and "generation-prompt think block" in out


def test_ctrl_c_before_an_answer_leaves_the_chat_as_it_was(monkeypatch, capsys):
    """While a template renders there is no answer yet to stop: it ended the session."""
    from refengine import template

    lines, render = iter(["Hello", "Hello again", "/stats"]), template._process.render
    monkeypatch.setattr("builtins.input", lambda _: next(lines, "/quit"))
    rendered = []

    def interrupted(request):
        rendered.append(request)
        if len(rendered) == 1:
            raise KeyboardInterrupt
        return render(request)

    monkeypatch.setattr(template._process, "render", interrupted)
    assert main(["chat", "--model", "tiny", "--max-tokens", "3"]) == 0
    out = capsys.readouterr().out
    assert out.count("PFXCACHE") == 1 and "Hello again" in rendered[1] and '"Hello"' not in rendered[1]
