"""Chat templates: Jinja as transformers has it, messages as people write them, and templates that mean no good (K7)."""
import datetime
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from refengine import template as module
from refengine.errors import TokenizerError
from refengine.template import ChatTemplate, plain_messages
from refengine.tokenizer import load_folder_tokenizer

CALL = {"type": "function", "function": {"name": "edit", "arguments": {"path": "b", "edits": [{"a": 1.0}]}}}


def render(source, messages=(), **arguments):
    return ChatTemplate(source).render(list(messages), **arguments)


# As transformers has it (compared with it in test_renders.py)

@pytest.mark.parametrize(("source", "text"), [
    ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),
    ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}", "023"),
    ("{% generation %}a{% set x = 1 %}{% endgeneration %}{{ x is defined }}", "aFalse"),
    ("{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3"),
    ("{{ dict(a=1)['a'] }}{{ dict.fromkeys('ab', 2) }}", "1{'a': 2, 'b': 2}"),
    ("{{ messages }}{{ tools }}{{ documents }}{{ add_generation_prompt }}", "[]NoneNoneTrue"),
    ("{{ x is defined }}{{ y }}", "False7"),
    ("\n{{ 'a' }}\n", "\na"),
], ids=["blocks", "loop controls", "generation", "namespace", "dict", "given", "arguments", "newlines"])
def test_jinja_is_set_as_transformers_sets_it(source, text):
    assert render(source, y=7) == text


@pytest.mark.parametrize("value", [{"b": "a<b & c>d 'e' \"f\" — / 你好", "a": [1, 2.5, None, True]}, "\u2028 🙂", [], 1e16])
def test_tojson_writes_what_json_dumps_writes(value):
    """G10: HTML escapes, escaped Unicode, sorted keys, no spaces: each changed the prompt."""
    assert render("{{ x | tojson }}", x=value) == json.dumps(value, ensure_ascii=False)
    assert render("{{ x | tojson(ensure_ascii=true, indent=2) }}", x=value) == json.dumps(value, indent=2)


def test_the_clock_of_templates_is_ours_to_set(monkeypatch):
    monkeypatch.setattr(module, "now", lambda: datetime.datetime(2024, 2, 29, 10, 1))
    assert render("{{ strftime_now('%d %b %Y %H:%M') }}") == "29 Feb 2024 10:01"


def test_special_tokens_and_arguments_reach_the_template_and_arguments_win():
    template = ChatTemplate("{{ bos_token }}{{ eos_token }}", {"bos_token": "<s>", "eos_token": "</s>"})
    assert template.render([]) == "<s></s>" and template.render([], eos_token="!") == "<s>!"


def test_a_template_for_tools_is_taken_when_tools_are_given():
    """Be they none, as transformers does it."""
    template = ChatTemplate({"default": "d{{ tools }}", "tool_use": "t{{ tools | length }}"})
    assert (template.render([]), template.render([], tools=[]), template.render([], tools=[{}])) == ("dNone", "t0", "t1")
    with pytest.raises(TokenizerError, match="no default chat template, only rag"):
        ChatTemplate({"rag": ""}).render([])


@pytest.mark.parametrize("layout", ["config", "list", "file", "folder"])
def test_templates_are_found_where_the_ecosystem_puts_them(layout, tmp_path):
    from refengine.model import load_tokenizer

    load_tokenizer("tiny").backend.save(str(tmp_path / "tokenizer.json"))
    both = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    settings = {"config": {"chat_template": "d"}, "list": {"chat_template": both}, "file": {"chat_template": "old"}, "folder": {}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}, **settings[layout]}))
    if layout in ("file", "folder"):
        (tmp_path / "chat_template.jinja").write_text("d")
    if layout == "folder":
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("t")
    tokenizer = load_folder_tokenizer(tmp_path, ())
    assert tokenizer.render([]) == "d" and tokenizer.template.special == {"bos_token": "<s>"}
    assert tokenizer.render([], tools=[{}]) == ("t" if layout in ("list", "folder") else "d")


@pytest.mark.parametrize(("settings", "files"), [
    ({"chat_template": 3}, {}), ({"chat_template": [3]}, {}), ({"chat_template": [{"name": "x"}]}, {}),
    ({"chat_template": {"default": "x"}}, {}),
    ({"chat_template": [{"name": 1, "template": "x"}]}, {}), ({"chat_template": [{"name": "x", "template": None}]}, {}),
    ({"chat_template": [{"name": [], "template": ""}]}, {}), ({}, {"chat_template.jinja": b"\xff\xfe"}),
    ({}, {"additional_chat_templates/rag.jinja": b"\xff"})])
def test_settings_that_are_broken_are_one_error_that_names_the_file(settings, files, tmp_path):
    from refengine.model import load_tokenizer

    load_tokenizer("tiny").backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "additional_chat_templates").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=next(iter(files), "tokenizer_config.json: chat_template is ").replace("/", ".")):
        load_folder_tokenizer(tmp_path, ())


def test_special_tokens_that_are_not_given_as_texts_are_left_out(tmp_path):
    from refengine.model import load_tokenizer

    load_tokenizer("tiny").backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({
        "bos_token": {}, "eos_token": {"content": "</s>"}, "pad_token": None, "add_bos_token": True, "unk_token": 3, "chat_template": ""}))
    assert load_folder_tokenizer(tmp_path, ()).template.special == {"eos_token": "</s>"}


# Messages

def test_a_history_is_copied_and_never_changed():
    messages = [{"role": "assistant", "content": None, "reasoning": "r", "tool_calls": [CALL, {"name": "f", "arguments": '{"a": 1}'}]}]
    before = json.dumps(messages)
    plain = plain_messages(messages)
    assert json.dumps(messages) == before
    assert plain == [{"role": "assistant", "reasoning": "r", "reasoning_content": "r", "thinking": "r",
                      "tool_calls": [CALL, {"name": "f", "arguments": {"a": 1}}]}]


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_found_under_any_name(name):
    source = "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}"
    assert render(source, [{"role": "assistant", name: "hm"}]) == "hmhm"


def test_arguments_as_an_object_and_as_json_text_are_the_same():
    """G9: double escaping, or a TypeError. The order of keys is the caller's (G7)."""
    text = {**CALL, "function": {**CALL["function"], "arguments": json.dumps(CALL["function"]["arguments"])}}
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    one, two = (render(source, [{"role": "assistant", "tool_calls": [call]}]) for call in (CALL, text))
    assert one == two == '{"path": "b", "edits": [{"a": 1.0}]}'


@pytest.mark.parametrize(("message", "where"), [
    ("hi", r"messages\[1\] is 'hi', not a dict with a role"), ({"content": "x"}, r"messages\[1\] is .* not a dict with a role"),
    ({"role": 3}, r"messages\[1\]"), ({"role": "assistant",
    "tool_calls": {}}, r"messages\[1\]\.tool_calls is \{\}, not a list"),
    ({"role": "assistant", "tool_calls": ["f"]}, r"messages\[1\]\.tool_calls\[0\] is 'f', not a dict"),
    ({"role": "assistant", "tool_calls": [{"function": {"name": "f",
    "arguments": "{"}}]}, r"tool_calls\[0\]\.function\.arguments is no JSON"),
    ({"role": "assistant", "tool_calls": [{"function": {"name": "f",
    "arguments": "[1]"}}]}, r"arguments is \[1\], not an object"),
    ({"role": "assistant", "tool_calls": [{"function": {"name": "f",
    "arguments": "[" * 10**5}}]}, "the messages are nested too deeply"),
    ({"role": "user", "content": b"x"}, "must be of JSON types"), ({"role": "user",
    "content": {1, 2}}, "must be of JSON types")])
def test_a_message_that_is_none_is_refused_by_name(message, where):
    with pytest.raises(TokenizerError, match=where):
        render("{{ messages[1].content }}", [{"role": "user", "content": "ok"}, message])


@given(st.text(st.characters(codec=None, categories=None), max_size=20))
def test_any_text_survives_the_way_to_the_template_and_back(text):
    """Lone surrogates, NUL, line separators, private use: what is between the processes does not show."""
    assert render("{{ messages[0].content }}", [{"role": "user", "content": text}]) == text


# Templates that fail, and templates that mean no good

@pytest.mark.parametrize(("source", "why"), [
    ("{{ raise_exception('roles must alternate') }}", "the chat template failed: roles must alternate"),
    ("x\n{% if", "line 2: "), ("{{ nothing.at.all }}", "'nothing' is undefined"), ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ("{% include 'x' %}", "failed"), ("{% nonsense %}", "unknown tag 'nonsense'"), ("{{ 'a' + 1 }}", "TypeError")])
def test_a_template_that_fails_is_one_error_that_says_why(source, why):
    with pytest.raises(TokenizerError, match=why):
        render(source)


@pytest.mark.parametrize("source", [
    "{{ ''.__class__.__mro__ }}", "{{ messages.__class__.__base__ }}", "{{ ''['__class__']['__mro__'] }}",
    "{{ (''|attr('__class__')).mro() }}", "{{ lipsum.__globals__['os'] }}", "{{ cycler.__init__.__globals__ }}",
    "{{ joiner.__init__.__globals__ }}", "{{ namespace.__init__.__globals__ }}", "{{ raise_exception.__globals__['json'] }}",
    "{{ strftime_now.__self__.__class__.__mro__ }}", "{{ dict.__call__.__globals__['json'] }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ messages|map(attribute='__class__')|map(attribute='__mro__')|list }}",
    "{{ '{0.__class__.__mro__}'.format('') }}", "{{ '{a.__class__.__mro__}'.format_map({'a': 1}) }}",
    "{% set f = ''.format %}{{ '{0.__class__.__mro__}'|format('') }}{{ f.__self__.__class__.mro() }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "{% set ns = namespace(_x=1) %}",
    "{% for x in [1] %}{{ loop.__init__.__globals__['sys'] }}{% endfor %}",
    "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__['x'] }}",
    "{{ caller.__globals__['x'] }}", "{{ (messages|list).append(1) }}", "{{ messages.append(1) }}",
    "{{ messages[0].update({'a': 1}) }}",
    "{{ messages[0].pop('role') }}", "{% set _ = messages.clear() %}", "{{ messages[0].__setitem__('role', 1) }}",
    "{{ open('/etc/passwd') }}",
    "{{ dict.update(messages[0], {'a': 1}) }}", "{{ dict.pop(messages[0], 'role') }}", "{{ dict.__subclasses__() }}",
    "{% set ns = namespace() %}{{ ns.__init__.__globals__ }}", "{{ ({} | attr('update'))(messages[0], a=1) }}",
    "{% import 'os' as os %}", "{{ ''.join.__self__.__class__.__subclasses__() }}"])
def test_a_template_reaches_neither_python_nor_the_messages(source):
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(TokenizerError):
        render(source, messages)
    assert messages == [{"role": "user", "content": "x"}]


@pytest.fixture
def one_second(monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 1.0)


NEST = "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4


@pytest.mark.parametrize("source", [
    NEST, "{{ 'x' * 10**11 }}", "{{ 2 ** (10 ** 10) }}", "{{ '%1000000000000d' % 1 }}", "{{ '{:1000000000000}'.format(1) }}",
    "{{ 'x'|center(10**11) }}", "{{ ('x\n' * 10**6)|indent(10**6) }}", "{{ [0] * 10**11 }}", "{{ range(10**12)|list }}",
    "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ 'x'.ljust(10**11) }}", "{{ lipsum(n=10**9) }}", "{{ 'x'.zfill(10**11) }}",
    "{{ ('a' * 9**6).replace('a', 'b' * 9**6) }}"])
def test_a_template_can_neither_hang_nor_fill_memory(source, one_second):
    """One expression is enough for either, and nothing inside the process can stop it."""
    with pytest.raises(TokenizerError, match="chat template"):
        render(source)
    assert render("{{ 1 + 1 }}") == "2", "and the next one renders"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the address space")
def test_what_needs_too_much_memory_says_so():
    with pytest.raises(TokenizerError, match="failed: it needs more than 1024 MiB of memory"):
        render("{{ ('x' * n) | length }}", n=15 * 10**8)
    assert render("{{ ('x' * n) | length }}", n=10**6) == "1000000"


def test_what_renders_too_much_says_so():
    with pytest.raises(TokenizerError, match="failed: it rendered more than 33554432 characters"):
        render("{% for i in range(5) %}{{ 'x' * 9999999 }}{% endfor %}")
    assert len(render("{{ 'x' * 9999999 }}")) == 9999999


def test_what_took_too_long_says_so(one_second):
    with pytest.raises(TokenizerError, match="stopped: it took longer than 1 s"):
        render(NEST)


def test_a_process_that_was_killed_is_started_again():
    render("")
    module._process._child.kill()
    module._process._child.wait()
    assert render("{{ 'b' }}") == "b"


def test_a_process_that_dies_while_it_renders_is_one_error(monkeypatch):
    render("")
    monkeypatch.setattr(module._process, "_started", lambda child=module._process._child: child)
    module._process._child.kill()
    with pytest.raises(TokenizerError, match="stopped: its process died"):
        render("a")
    monkeypatch.undo()
    assert render("{{ 'b' }}") == "b"


def test_an_interrupted_rendering_leaves_no_answer_for_the_next(monkeypatch):
    """Ctrl-C while a template renders: its text must not be taken for another's."""
    render("")
    child = module._process._child

    class Interrupted:
        def readline(self):
            raise KeyboardInterrupt

        def close(self):
            pass

    monkeypatch.setattr(child, "stdout", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        render("old")
    assert render("new") == "new"


def test_a_process_that_was_interrupted_while_it_started_is_started_again(monkeypatch):
    """Its "ready" was still to be read, and was taken for the next text."""
    module._process.stop()
    popen = subprocess.Popen

    def interrupted(*arguments, **options):
        child = popen(*arguments, **options)
        out = child.stdout

        def readline():
            child.stdout = out
            raise KeyboardInterrupt

        child.stdout = SimpleNamespace(readline=readline)
        return child

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        render("a")
    monkeypatch.undo()
    assert render("b") == "b"


@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
def test_ctrl_c_in_a_terminal_reaches_the_process_too_and_it_goes_on():
    render("")
    child = module._process._child
    os.kill(child.pid, signal.SIGINT)
    assert render("{{ 'b' }}") == "b" and module._process._child is child


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers")
def test_a_template_without_end_does_not_outlive_whoever_asked_for_it():
    """Killed, nobody is left to stop it: it kept a processor busy for ever."""
    code = "import threading, time, refengine.template as t\nt.SECONDS = 1.0\nt.ChatTemplate('').render([])\n" \
           f"threading.Thread(target=t.ChatTemplate({NEST!r}).render, args=([],), daemon=True).start()\ntime.sleep(0.2)\n" \
           "import os\nprint(t._process._child.pid, flush=True)\nos.kill(os.getpid(), 9)\n"
    pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout)
    until = time.monotonic() + 10
    while alive(pid):
        assert time.monotonic() < until
        time.sleep(0.1)


def alive(pid):
    stat = Path(f"/proc/{pid}/stat")
    if stat.parent.parent.joinpath("self").exists():
        return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"  # a zombie is dead
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_threads_share_the_process_and_do_not_mix_answers():
    found = {}

    def work(n):
        found[n] = [render("{{ x }}", x=f"{n} {i}") for i in range(20)]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: [f"{n} {i}" for i in range(20)] for n in range(4)}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_a_renderer_of_its_own():
    render("")
    code = "import os, refengine.template as t\nr = t.ChatTemplate('{{ x }}').render\nr([], x=1)\npid = os.fork()\n" \
           "texts = [r([], x=(pid > 0, i)) for i in range(50)]\n" \
           "assert texts == [str([pid > 0, i]) for i in range(50)], texts\n" \
           "if pid: assert os.waitpid(pid, 0)[1] == 0\n"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, timeout=60).returncode == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_made_while_another_thread_renders_can_render():
    """The fork inherited a lock that nobody was left to release."""
    code = "import os, threading, time, refengine.template as t\nr = t.ChatTemplate('{{ x }}').render\nr([], x=1)\n" \
           "t._process._lock.acquire()\npid = os.fork()\n" \
           "if not pid: os._exit(r([], x=2) != '2')\n" \
           "t._process._lock.release()\nassert os.waitpid(pid, 0)[1] == 0 and r([], x=3) == '3'\n"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, timeout=60).returncode == 0
