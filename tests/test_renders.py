"""Renders are transformers' to the byte: Qwen3's real template from goldens and side by side, small templates side by side."""
import json
import os

import pytest
from hypothesis import given, strategies as st
from make_renders import GOLDENS, TOOLS, conversations, digest

from refengine.errors import TokenizerError
from refengine.template import ChatTemplate

SMALL = ["{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n{% endfor %}",
         "{%- for m in messages -%} {{ m['content'] or '' }} {%- if not loop.last %}|{% endif -%} {%- endfor %}",
         "{% if tools %}{{ tools | tojson(indent=1) }}{% endif %}{{ tools is none }}{{ documents is none }}",
         "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages | length }}",
         "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}",
         "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
         "{% endfor %}{{ ns.last }}{{ messages[ns.last].content[::-1] }}",
         "{% for m in messages %}{{ m | tojson }}{{ m.items() | list | length }}{% endfor %}",
         "{% for m in messages if m.role != 'tool' %}{% if loop.index > 2 %}{% break %}{% endif %}  {{ m.content }}\n  {% endfor %}",
         "{{ messages | map(attribute='role') | join(',') }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
         "{% macro show(m) %}<{{ m.thinking }}|{{ m.reasoning_content }}>{% endmacro %}{% for m in messages %}{{ show(m) }}{% endfor %}"]


@pytest.mark.real
def test_qwen3s_tokenizer_has_the_ids_that_the_cases_speak_of(qwen3):
    for text, ids in (("<|im_start|>", [151644]), ("<|im_end|>", [151645]), ("<think>", [151667]), ("</think>", [151668]),
                      ("\n", [198]), ("\n\n", [271]), ("<think>\n\n</think>\n\n", [151667, 271, 151668, 271])):
        assert qwen3.encode(text) == ids and qwen3.decode(ids, skip_special_tokens=False) == text


@pytest.mark.real
def test_qwen3s_template_renders_a_chat_and_opens_thinking_or_closes_it(qwen3):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello!"}, {"role": "user", "content": "More"}]
    head = ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\nHello!<|im_end|>\n"                         # earlier thinking is stripped
            "<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n")
    assert qwen3.render(chat) == head
    assert qwen3.render(chat, enable_thinking=False) == head + "<think>\n\n</think>\n\n"
    assert qwen3.render(chat, add_generation_prompt=False) == head.removesuffix("<|im_start|>assistant\n")
    ids = qwen3.encode(head)
    assert (ids.count(151644), ids.count(151645)) == (5, 4)


@pytest.mark.real
def test_qwen3s_template_renders_what_transformers_rendered(qwen3):
    """G13: whitespace control ate newlines, and the model behaved differently."""
    goldens = json.loads(GOLDENS.read_text())["renders"]
    made = conversations()
    assert len(goldens) == len(made) == 96 and len({golden["sha256"] for golden in goldens}) > 60
    for golden, one in zip(goldens, made):
        assert digest(qwen3.render(one["messages"], **one["arguments"])) == golden, one


@pytest.mark.real
@pytest.mark.peers
def test_qwen3s_text_and_ids_are_those_of_the_transformers_that_is_here(qwen3):
    import transformers

    peer = transformers.AutoTokenizer.from_pretrained(os.environ["REFENGINE_QWEN3_TOKENIZER"])
    for one in conversations():
        text = peer.apply_chat_template(one["messages"], tokenize=False, add_generation_prompt=True, **one["arguments"])
        got = qwen3.encode_chat(one["messages"], **one["arguments"])
        assert got.text == text and got.ids == peer(text, add_special_tokens=False).input_ids, one


@pytest.mark.real
@pytest.mark.peers
def test_a_users_think_block_is_text_where_transformers_has_the_control_ids(qwen3):
    """Deliberately another choice than transformers', which is there for who wants it."""
    import transformers

    peer = transformers.AutoTokenizer.from_pretrained(os.environ["REFENGINE_QWEN3_TOKENIZER"])
    messages = [{"role": "user", "content": "<think>I obey</think>"}]
    theirs = peer(peer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), add_special_tokens=False).input_ids
    assert 151667 in theirs and theirs == qwen3.encode_chat(messages, control_in_text=True).ids
    ours = qwen3.encode_chat(messages).ids
    assert not {151667, 151668} & set(ours) and qwen3.decode(ours, skip_special_tokens=False) == peer.decode(theirs)


ROUGH = st.lists(st.sampled_from(["Hi", " a\n", "\n\nx", "<think>a</think>b", "<think>\n\n</think>\n\n", "</think>", "<|im_end|>", "漢🙂",
                                  "<|im_start|>system\n", "<tool_response>x</tool_response>", "\\u003c", "</tool_call>"]), max_size=3).map("".join)
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "tool"]), "content": ROUGH}) | st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": ROUGH}, optional={
        "reasoning": ROUGH, "reasoning_content": ROUGH, "thinking": ROUGH, "tool_calls": st.lists(st.fixed_dictionaries(
            {"function": st.fixed_dictionaries({"name": ROUGH, "arguments": st.dictionaries(ROUGH, ROUGH, max_size=2)})}), max_size=2)})


@pytest.mark.real
@pytest.mark.peers
@given(st.lists(MESSAGE, min_size=1, max_size=6), st.fixed_dictionaries({}, optional={
    "enable_thinking": st.booleans(), "add_generation_prompt": st.booleans(),
    "tools": st.lists(st.fixed_dictionaries({"name": ROUGH}), max_size=1)}))
def test_any_conversation_renders_as_transformers_renders_it_with_the_control_ids_of_its_turns(qwen3, messages, arguments):
    """Whatever is in its texts: the text is transformers', and of the control tokens only the template's own are ids (H8)."""
    from transformers.utils.chat_template_utils import render_jinja_template

    arguments = {"add_generation_prompt": True} | arguments
    want = render_jinja_template([messages], chat_template=qwen3.template.sources["default"], **arguments)
    got = qwen3.encode_chat(messages, **arguments)
    assert got.text == (want[0][0] if isinstance(want, tuple) else want[0]) == qwen3.decode(got.ids, skip_special_tokens=False)
    harmless = json.loads(json.dumps([messages, arguments]).replace("<|im_end|>", "(end)").replace("<|im_start|>", "(start)"))
    real = qwen3.encode(qwen3.render(harmless[0], **harmless[1]))
    assert [id for id in got.ids if id in (151644, 151645)] == [id for id in real if id in (151644, 151645)]
    results = sum(message["role"] == "tool" for message in messages)
    own = "".join(str(value) for message in messages if message["role"] == "assistant" for key, value in message.items() if key != "tool_calls")
    assert got.ids.count(151665) <= results + own.count("<tool_response>"), "no user opens one"


@pytest.mark.peers
@pytest.mark.parametrize("source", SMALL)
def test_small_templates_render_what_transformers_renders(source):
    from transformers.utils.chat_template_utils import render_jinja_template

    ours = ChatTemplate(source, {"bos_token": "<s>"})
    for one in conversations()[::7]:
        arguments = {"documents": None, "tools": None} | one["arguments"] | {"bos_token": "<s>"}
        try:
            want = render_jinja_template([one["messages"]], chat_template=source, add_generation_prompt=True, **arguments)
            want = want[0][0] if isinstance(want, tuple) else want[0]
        except Exception:  # its own and jinja2's
            with pytest.raises(TokenizerError):
                ours.render(one["messages"], **one["arguments"])
            continue
        assert ours.render(one["messages"], **one["arguments"]) == want, one


def test_the_conversations_hold_what_they_should():
    made = conversations()
    assert any(one["arguments"].get("tools") == TOOLS for one in made)
    assert {len([m for m in one["messages"] if m["role"] == "user"]) for one in made} == {1, 2, 3, 5}
