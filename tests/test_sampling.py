"""Choosing the next token: greedy and its ties, each parameter against distributions worked out by hand, and that a draw
depends on nothing but logits, seed and position."""
from fractions import Fraction

import numpy as np
import pytest
from helpers import both_engines, cold, feed_of, ids_of, make_engine, same_bits, serve, state

from refengine.model import load_model
from refengine.safetensors_file import SafetensorsFile, write_safetensors
from refengine.sampling import GREEDY, Sampling
from refkernels import exact, native

# Where a chi-square variable of so many degrees of freedom lies with probability 10^-6 or less.
CHI_SQUARE = {1: 23.93, 2: 27.64, 3: 30.67, 15: 56.50}
PROMPT = ids_of(10)
SAMPLED = Sampling(temperature=1.0, top_p=0.95, seed=11)


def logs(*weights):
    """Logits whose softmax is in these proportions."""
    return np.log(np.array(weights, np.float64)).astype(np.float32)


def assert_frequencies(draws, weights):
    """Chi-square of the draws against hand-computed weights; what has no weight was never drawn."""
    counts = np.bincount(draws, minlength=len(weights))
    assert len(counts) == len(weights) and not counts[np.array(weights) == 0].any(), counts
    expected = np.array([float(Fraction(w) / sum(map(Fraction, weights))) for w in weights if w]) * len(draws)
    found = counts[np.array(weights) != 0]
    chi = float(((found - expected) ** 2 / expected).sum())
    assert len(found) == 1 or chi < CHI_SQUARE[len(found) - 1], f"counts {found.tolist()}, expected {expected.tolist()}"


# Greedy

@pytest.mark.parametrize("op", [exact, native], ids=["exact", "native"])
def test_greedy_takes_the_largest_and_of_equals_the_lowest_id(op):
    """D2: an exact tie tipped the other way on a hit."""
    assert GREEDY.pick(op, np.array([1, 5, 2, 5, 5], np.float32), PROMPT) == 1
    assert GREEDY.pick(op, np.array([-1, -5, -1], np.float32), []) == 0
    assert GREEDY.pick(op, np.array([1, np.nextafter(np.float32(1), np.float32(2))], np.float32), []) == 1


@pytest.fixture(scope="module")
def head_edited(t_folder, tmp_path_factory):
    """T with a function of its head's matrix in place of the head."""
    def make(edit):
        folder = tmp_path_factory.mktemp("head")
        (folder / "config.json").write_bytes((t_folder / "config.json").read_bytes())
        file = SafetensorsFile(t_folder / "model.safetensors")
        tensors = {name: ("F32", file.tensor(name).copy()) for name in file.entries}
        edit(tensors["lm_head.weight"][1])
        write_safetensors(folder / "model.safetensors", tensors)
        return load_model(folder)

    return make


@both_engines
@pytest.mark.parametrize("ulps", [0, 1])
@pytest.mark.parametrize("below", [True, False])
def test_two_equal_or_nearly_equal_heads_are_chosen_alike_warm_and_cold(kind, ulps, below, t_model, head_edited):
    """D2: rows of the head that are equal tie exactly, and the lowest id wins; rows an ulp apart must not tip either."""
    best = cold(t_model, PROMPT, 1).ids[0]
    other = best - 1 if below else best + 1

    def edit(head):
        head[other] = np.nextafter(head[best], np.float32(np.inf)) if ulps else head[best]

    model = head_edited(edit)
    want = cold(model, PROMPT, 8)
    if not ulps:
        assert want.rows[len(PROMPT) - 1, best] == want.rows[len(PROMPT) - 1, other] == want.rows[len(PROMPT) - 1].max()
        assert want.ids[0] == min(best, other)
        assert max(best, other) not in want.ids
    engine = make_engine(kind, model)
    for keep in (0, 3, 9, 10):
        serve(engine, [*PROMPT[:keep], 1, 2])
        served = serve(engine, PROMPT, 8)
        assert served.reused >= min(keep, 9) and served.ids == want.ids
        same_bits(engine.logits, want.logits, f"serve {keep} + 2, serve 10")


# What each parameter means

CASES = [
    ({"temperature": 1}, logs(2, 8, 1, 4), [3], (2, 8, 1, 4)),
    ({"temperature": 2}, logs(4, 16, 1, 9), [3], (2, 4, 1, 3)),
    ({"temperature": 0.5}, logs(2, 4, 1, 3), [3], (4, 16, 1, 9)),
    ({"temperature": 1, "top_k": 1}, logs(2, 8, 1, 4), [3], (0, 1, 0, 0)),
    ({"temperature": 1, "top_k": 2}, logs(2, 8, 1, 4), [3], (0, 8, 0, 4)),
    ({"temperature": 1, "top_k": 9}, logs(2, 8, 1, 4), [3], (2, 8, 1, 4)),
    ({"temperature": 1, "top_k": 2}, logs(1, 2, 2, 2), [3], (0, 1, 1, 0)),                # of equals, the lowest ids
    ({"temperature": 1, "top_p": 0.53}, logs(2, 8, 1, 4), [3], (0, 1, 0, 0)),             # 8 of 15 is 0.533
    ({"temperature": 1, "top_p": 0.54}, logs(2, 8, 1, 4), [3], (0, 8, 0, 4)),
    ({"temperature": 1, "top_p": 0.79}, logs(2, 8, 1, 4), [3], (0, 8, 0, 4)),             # 12 of 15 is 0.8
    ({"temperature": 1, "top_p": 0.81}, logs(2, 8, 1, 4), [3], (2, 8, 0, 4)),
    ({"temperature": 1, "top_p": 1e-9}, logs(2, 8, 1, 4), [3], (0, 1, 0, 0)),             # never less than one
    ({"temperature": 1, "min_p": 0.3}, logs(2, 8, 1, 4), [3], (0, 8, 0, 4)),              # at least 0.3 * 8
    ({"temperature": 1, "min_p": 0.2}, logs(2, 8, 1, 4), [3], (2, 8, 0, 4)),
    ({"temperature": 1, "min_p": 1}, logs(2, 8, 1, 4), [3], (0, 1, 0, 0)),
    ({"temperature": 1, "top_k": 2, "top_p": 0.66}, logs(2, 8, 1, 4), [3], (0, 1, 0, 0)),  # 8 of the 12 that are left
    ({"temperature": 1, "repetition_penalty": 2}, logs(4, Fraction(1, 4), 2, 1), [0, 1, 0, 3], (2, Fraction(1, 16), 2, 1)),
    ({"temperature": 1, "repetition_penalty": 0.5}, logs(4, Fraction(1, 4), 2, 1), [1, 1], (4, Fraction(1, 2), 2, 1)),
    ({"temperature": 2, "repetition_penalty": 2}, logs(256, 1, 16, 1), [0, 0], (4, 1, 4, 1)),  # the penalty comes first
]


@pytest.mark.parametrize("op", [exact, native], ids=["exact", "native"])
@pytest.mark.parametrize(("settings", "logits", "history", "weights"), CASES, ids=[str(case[0]) for case in CASES])
def test_the_frequencies_are_those_worked_out_by_hand(op, settings, logits, history, weights):
    before = logits.copy()
    draws = [Sampling(**settings, seed=seed).pick(op, logits, history) for seed in range(1500)]
    assert_frequencies(draws, weights)
    same_bits(logits, before)  # a penalty works on a copy


def test_twenty_thousand_positions_of_one_seed_are_drawn_as_they_should_be():
    """One draw a position, in the right frequencies, and a draw says nothing about the next."""
    logits = logs(2, 8, 1, 4)
    assert_frequencies([Sampling(temperature=1).pick(exact, logits, range(i)) for i in range(20_000)], (2, 8, 1, 4))
    even = [Sampling(temperature=1, seed=5).pick(exact, logs(1, 1, 1, 1), range(i)) for i in range(8_000)]
    assert_frequencies(even, (1, 1, 1, 1))
    assert_frequencies([4 * a + b for a, b in zip(even[::2], even[1::2])], (1,) * 16)


@pytest.mark.parametrize("logits", [logs(8, 1e-30, 4), np.array([3, -1000, 2], np.float32)])
def test_the_ends_of_the_random_range_stay_inside_what_may_be_drawn(logits, monkeypatch):
    """The least draw gives the likeliest token, the greatest the least likely; never one of weight zero."""
    class Fixed:
        def __init__(self, key, counter):
            self.value = key

        def random_raw(self):
            return self.value

    monkeypatch.setattr(np.random, "Philox", Fixed)
    assert Sampling(temperature=1, seed=0).pick(exact, logits, []) == 0
    assert Sampling(temperature=1, seed=2**64 - 1).pick(exact, logits, []) == 2
    for seed, want in ((2**63 - 1, 0), (2**63, 1)):  # the middle of the range parts two equal tokens evenly
        assert Sampling(temperature=1, seed=seed).pick(exact, logs(1, 1), []) == want


def test_the_penalty_turns_a_greedy_choice():
    """Keskar et al.: positive logits are divided, negative ones multiplied, once however often the token was seen."""
    for logits, history, want in (([2.0, 1.9], [0], 1), ([2.0, 1.9], [1], 0), ([-1.0, -1.05], [0, 0], 1),
                                  ([2.0, 1.7], [0, 0, 0], 0), ([0.0, -1.0], [0], 0), ([2.0, 1.9], [], 0)):
        assert Sampling(repetition_penalty=1.1).pick(exact, np.array(logits, np.float32), history) == want, (logits, history)


@pytest.mark.parametrize(("name", "value"), [
    ("temperature", -0.1), ("temperature", float("nan")), ("temperature", 1e-50), ("temperature", float("inf")),
    ("top_k", -1), ("top_p", 0), ("top_p", 1.01), ("top_p", float("nan")), ("min_p", -0.1), ("min_p", 1.1),
    ("repetition_penalty", 0), ("repetition_penalty", -1), ("repetition_penalty", 1e-50), ("repetition_penalty", 1e39),
    ("repetition_penalty", float("inf")), ("repetition_penalty", float("nan")), ("seed", -1), ("seed", 2**64)])
def test_parameters_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"^{name} is "):
        Sampling(**{name: value})


@pytest.mark.parametrize("op", [exact, native], ids=["exact", "native"])
def test_the_extremes_that_are_allowed_do_what_they_say(op):
    """What became 0 or infinite in float32 gave NaN, and an index outside the vocabulary. Nothing allowed does that."""
    logits = np.array([0.0, 1.0, 2.0, -1.0], np.float32)
    for seed in range(50):
        assert Sampling(temperature=1e-30, seed=seed).pick(op, logits, [0, 1]) == 2
        assert Sampling(temperature=1.0, repetition_penalty=1e-3, seed=seed).pick(op, logits, [0, 1]) == 1
        assert Sampling(temperature=1.0, repetition_penalty=1e3, seed=seed).pick(op, logits, [3, 3]) in (0, 1, 2)
    assert_frequencies([Sampling(temperature=1e30, seed=seed).pick(op, logits, []) for seed in range(1500)], (1, 1, 1, 1))
    assert Sampling(repetition_penalty=1e3).pick(op, logits, [0, 2]) == 1
    assert Sampling(repetition_penalty=1e-3).pick(op, logits, [3, 1]) == 1


# On engines

@both_engines
def test_sampled_ids_do_not_depend_on_what_was_reused(kind, t_model):
    """ON == OFF for sampled text: same seed, same positions, same ids, whatever engine, chunking and reuse."""
    want = serve(make_engine("sequential", t_model), PROMPT, 16, sampling=SAMPLED).ids
    assert want != cold(t_model, PROMPT, 16).ids  # or nothing would be sampled here
    for chunk_size in (1, 3, 64):
        engine = make_engine(kind, t_model, chunk_size=chunk_size)
        for keep in (0, 4, 10):
            serve(engine, [*PROMPT[:keep], 1, 2], 3, sampling=Sampling(temperature=1.0, seed=3))
            assert serve(engine, PROMPT, 16, sampling=SAMPLED).ids == want, f"chunks of {chunk_size}, {keep} kept"
        assert serve(engine, PROMPT, 16, reuse=False, sampling=SAMPLED).ids == want


@both_engines
def test_a_sampled_answer_in_two_parts_is_the_answer_in_one(kind, t_model):
    """The draw is keyed by seed and position, not by a generator that remembers."""
    whole = serve(make_engine(kind, t_model), PROMPT, 14, sampling=SAMPLED).ids
    engine = make_engine(kind, t_model)
    first = serve(engine, PROMPT, 5, sampling=SAMPLED).ids
    rest = list(engine.generate(feed_of(engine, [*PROMPT, *first]), max_tokens=9, sampling=SAMPLED))
    assert [*first, *rest] == whole


def test_another_seed_is_another_answer(t_model):
    engine = make_engine("pipelined", t_model)
    answers = {tuple(serve(engine, PROMPT, 12, sampling=Sampling(temperature=1.0, seed=seed)).ids) for seed in range(6)}
    assert len(answers) == 6


class Recording(Sampling):
    """A sampler that keeps the histories it was given."""

    def pick(self, op, logits, history):
        histories.append(list(history))
        return super().pick(op, logits, history)


histories: list[list[int]] = []


@both_engines
@pytest.mark.parametrize("temperature", [0, 0.7])
def test_the_repetition_penalty_sees_the_whole_history(kind, temperature, t_model):
    """D13: the penalty saw only uncached or only new tokens, so hit and miss differed."""
    sampling = Recording(temperature=temperature, repetition_penalty=1.1, seed=2)
    engine = make_engine(kind, t_model)
    answers = []
    for reuse in (True, True, False):
        histories.clear()
        served = serve(engine, PROMPT, 12, reuse=reuse, sampling=sampling)
        answers.append(served.ids)
        assert served.reused == (9 if len(answers) == 2 else 0)
        assert histories == [[*PROMPT, *served.ids[:i]] for i in range(12)]
    assert answers[0] == answers[1] == answers[2] != serve(engine, PROMPT, 12, sampling=Sampling(temperature, seed=2)).ids
    same_bits(engine.logits, cold(t_model, engine.tokens).logits, "the penalty must not touch the engine's logits")
    assert state(engine).offset == len(PROMPT) + 11
