"""Pictures are tested by what they draw, not by pixels. Floor 9."""
import numpy as np
import pytest

from helpers import make_chat, make_engine
from refengine.errors import InspectError
from refengine.inspect import Recorder, Replay, read_record, trace
from refengine.inspect.plots import plot_attention, plot_bits, plot_reuse, plot_ttft

IDS = list(range(3, 40))


@pytest.fixture(scope="module")
def talked(tmp_path_factory):
    path = tmp_path_factory.mktemp("talk") / "c.json"
    chat = make_chat()
    recorder = Recorder(chat, path)
    for text in ("Hello", "And you?", "Why?"):
        list(chat.send(text))
    recorder.save()
    return chat, Replay(read_record(path)).data


def test_bars_are_what_was_reused_and_what_was_forwarded(talked):
    chat, data = talked
    for turns in (chat.turns, data["turns"]):
        reused, forwarded = plot_reuse(turns).axes[0].containers
        assert [bar.get_height() for bar in reused] == [turn.reused for turn in chat.turns]
        assert [bar.get_height() for bar in forwarded] == [turn.forwarded for turn in chat.turns]
        assert [bar.get_y() for bar in forwarded] == [turn.reused for turn in chat.turns]


def test_lines_are_the_times_of_each_turn(talked):
    _, data = talked
    off, on = plot_ttft(data["turns"]).axes[0].lines
    assert list(on.get_xdata()) == sorted(turn["prompt"] for turn in data["turns"])
    assert sorted(on.get_ydata()) == sorted(turn["on"] for turn in data["turns"])
    assert sorted(off.get_ydata()) == sorted(turn["off"] for turn in data["turns"])


def test_an_image_for_each_head(t_model):
    weights = trace(make_engine("sequential", t_model), IDS[:9], "layers.1.weights")["layers.1.weights"]
    figure = plot_attention(weights, [f"<{id}>" for id in IDS[:9]])
    assert len(figure.axes) == 4
    for head, axes in enumerate(figure.axes):
        assert np.array_equal(axes.images[0].get_array(), weights[head])
        assert [label.get_text() for label in axes.get_xticklabels()][0] == "<3>"
    with pytest.raises(InspectError, match=r"\(H, T, S\)"):
        plot_attention(weights[0])


def test_exact_is_the_zero_line_and_native_is_not(t_model, t_native):
    def pair(model):
        whole = trace(make_engine("pipelined", model), IDS, "layers.*.residual")
        engine = make_engine("pipelined", model)
        engine.prefill(IDS[:-1])
        last = trace(engine, IDS[-1:], "layers.*.residual")
        return {name: x[-1:].copy() for name, x in whole.items()}, last

    exact, native = plot_bits({"exact": pair(t_model), "native": pair(t_native)}).axes[0].lines
    assert not np.any(exact.get_ydata()) and np.any(native.get_ydata())
    with pytest.raises(InspectError, match="not of the same activations"):
        plot_bits({"x": (pair(t_model)[0], {})})
