"""The forward pass against numbers that it did not make: the goldens of make_goldens.py (oracle and transformers agreed).

How far a result may be from the truth is not typed here. Each golden holds the distance of transformers' float32 run;
the exact set may be twice as far, and float64, whose roundings are 2^29 times smaller, that much nearer. Floor 9.
"""
import dataclasses
import functools
import json
from types import SimpleNamespace

import make_goldens
import numpy as np
import pytest
from make_goldens import CASES
from safetensors.numpy import load_file, save_file

from refengine.config import parse_config
from refengine.loading import load
from refengine.errors import FeedError, NonFiniteError
from refengine.model import load_model
from refengine.rope import Rope
from refengine.vectors import oracle
from refkernels import SETS, arithmetic

PAGE = 4


class Golden:
    """A stored golden, and its checkpoint made anew."""

    def __init__(self, name, folder):
        self.name, self.folder = name, folder
        self.stored = json.loads((make_goldens.FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        self.digest = make_goldens.build(CASES[name], folder)
        self.prompt, self.positions = self.stored["prompt"], self.stored["positions"]
        self.truth = np.array(self.stored["logits"])                              # (positions, V)
        self.bound = 2 * self.stored["float32_distance"]

    def error(self, model) -> np.ndarray:
        """How far a model's logits are from the truth, one number a stored position."""
        logits = model.run(model.new_cache(len(self.prompt), 64), np.array(self.prompt), every=True)
        return np.abs(logits[self.positions].astype(np.float64) - self.truth).max(axis=1)


@pytest.fixture(scope="session")
def golden(tmp_path_factory):
    """Name -> Golden, each built once."""
    return functools.cache(lambda name: Golden(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="session")
def exact(golden):
    """Name -> the golden's model in exact arithmetic, loaded once."""
    return functools.cache(lambda name: load_model(golden(name).folder))


every_golden = pytest.mark.parametrize("name", CASES)


def test_there_is_a_golden_for_every_case_and_no_other():
    assert sorted(path.stem for path in make_goldens.FOLDER.glob("*.json")) == sorted(CASES)


@every_golden
def test_a_golden_says_what_it_hunts_and_was_made_from_this_checkpoint(golden, name):
    stored = golden(name).stored
    assert {key: stored[key] for key in CASES[name]} == CASES[name], "run make_goldens.py again"
    assert golden(name).prompt == make_goldens.prompt(stored["seed"], stored["length"], stored["config"]["vocab_size"])
    assert golden(name).digest == stored["safetensors_sha256"], "synth.py makes other weights than it did"
    assert stored["agreement"] <= make_goldens.LIMIT and "transformers" in stored["made"]


@every_golden
def test_the_oracle_computes_the_stored_logits_again(golden, name):
    """Not byte for byte: another libm or BLAS may round otherwise. The room is that of two runs in float64."""
    g = golden(name)
    again = oracle.read(g.folder).logits(g.prompt)[g.positions]
    assert np.abs(again - g.truth).max() <= 2 * g.bound * 2.0**-29


@every_golden
def test_exact_logits_are_within_twice_the_distance_of_float32_transformers(golden, exact, name):
    assert golden(name).error(exact(name)).max() <= golden(name).bound


@every_golden
def test_native64_logits_are_as_near_as_float64_allows(golden, name):
    """The float32 run's distance times 2^-29, with the same factor 2, and 2 because the oracle itself rounds in float64."""
    assert golden(name).error(load_model(golden(name).folder, "native64")).max() <= 2 * golden(name).bound * 2.0**-29


@pytest.mark.parametrize("engine", ["sequential", "pipelined"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3-gqa-6-2", "llama-biases"])
def test_an_engine_that_reuses_nothing_gives_the_golden_logits(golden, exact, name, engine):
    """Case J13: the path without a cache to reuse is held against the truth by itself, not against the path with one."""
    g, engine = golden(name), load(exact(name), engine=engine, capacity=64, page_size=PAGE)
    for position, truth in zip(g.positions, g.truth):
        engine.reset()
        engine.prefill(g.prompt[:position + 1])
        assert np.abs(engine.logits.astype(np.float64) - truth).max() <= g.bound, f"position {position}"


# J1, J11: queries and keys around the norm and the rotation

def activations(model, ids, tap=lambda name, x: x):
    """Name -> array of every activation of a pass."""
    seen = {}

    def note(name, x):
        seen[name] = tap(name, x)
        return seen[name]

    model.run(model.new_cache(len(ids), 64), np.array(ids), every=True, tap=note)
    return seen


@pytest.mark.parametrize("name", ["qwen3", "qwen3-gqa-6-2"])
def test_q_and_k_of_each_head_are_golden_after_the_norm_and_after_the_rotation(golden, exact, name):
    g = golden(name)
    seen, rows = activations(exact(name), g.prompt), g.stored["activations_at"]
    assert rows == [0, 7] and len(g.stored["activations"]) == 4 * exact(name).config.layers
    for key, stored in g.stored["activations"].items():
        error = np.abs(seen[key][rows].astype(np.float64) - np.array(stored["values"]))
        assert error.max() <= 2 * stored["float32_distance"], f"{key}[{np.unravel_index(error.argmax(), error.shape)}]"


def test_a_small_query_grows_in_the_norm_and_both_sides_of_it_can_be_seen(t_model):
    """Case J11: a difference before the norm is multiplied by gain / rms. One that looks is shown both."""
    ids, at, delta = list(range(6)), (3, 1), np.float32(2.0**-14)   # position 3, head 1

    def small(name, x, extra=np.float32(0)):
        if name == "layers.0.q":
            x = x.copy()
            x[at] *= np.float32(2.0**-8)
            x[at][5] += extra
        return x

    one = activations(t_model, ids, small)
    other = activations(t_model, ids, functools.partial(small, extra=delta))
    before = other["layers.0.q"] - one["layers.0.q"]
    after = other["layers.0.q_norm"] - one["layers.0.q_norm"]
    assert {tuple(index[:2]) for index in np.argwhere(before)} == {tuple(index[:2]) for index in np.argwhere(after)} == {at}
    q, gain = one["layers.0.q"][at].astype(np.float64), t_model.weights.layers[0].q_norm
    rms = np.sqrt((q**2).mean() + 1e-6)
    growth = after[at][5] / before[at][5]
    # To first order gain / rms * (1 - q^2 / (K rms^2)); the rest is below delta / rms.
    assert growth == pytest.approx(gain[5] / rms * (1 - q[5]**2 / (len(q) * rms**2)), rel=2 * float(delta) / rms)
    assert growth > 50


# Mutants: faults that others had, planted in our pass. Each must be further from the truth than the bound allows.

def with_op(model, **changes):
    """The same model with some kernels replaced."""
    return dataclasses.replace(model, op=SimpleNamespace(**{**vars(model.op), **changes}))


def with_config(model, **changes):
    return dataclasses.replace(model, config=dataclasses.replace(model.config, **changes), _table=None)


def with_rope(model, **changes):
    return with_config(model, rope=dataclasses.replace(model.config.rope, **changes))


def norm_after_rotation(model):
    """Case J1."""
    op, pending = model.op, []

    def rms_norm(x, weight, eps):
        if x.ndim == 2:                       # not of heads
            return op.rms_norm(x, weight, eps)
        pending.append((weight, eps))
        return x

    return with_op(model, rms_norm=rms_norm, rotate=lambda x, c, s: op.rms_norm(op.rotate(x, c, s), *pending.pop(0)))


def tiled_heads(model):
    """Case J6: query head h looks at kv head h % N instead of h // G."""
    op, n = model.op, model.config.kv_heads

    def attention(q, runs, start):
        order = np.argsort(np.arange(q.shape[1]) % n, kind="stable")
        out = op.attention(np.ascontiguousarray(q[:, order]), runs, start).reshape(q.shape)
        return out[:, np.argsort(order)].reshape(len(q), -1)

    return with_op(model, attention=attention)


def factor_on_the_scores_too(model):
    """Case J12: yarn's factor multiplies cos and sin, and once more the scores."""
    op, factor = model.op, np.float32(model.config.rope.attention_factor)
    return with_op(model, attention=lambda q, runs, start: op.attention(q * factor, runs, start))


def interleaved_pairs(model):
    """Pairs (0, 1), (2, 3) as in GGUF's llama instead of (0, D/2), (1, D/2 + 1)."""
    op = model.op

    def rotate(x, cos, sin):
        y = op.rotate(np.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1), cos, sin)
        return np.stack(np.split(y, 2, axis=-1), axis=-1).reshape(x.shape)

    return with_op(model, rotate=rotate)


def without_biases(model):
    op = model.op
    return with_op(model, linear=lambda x, w: op.linear(x, w._replace(bias=None)))


def gate_and_up_swapped(model):
    op = model.op
    return with_op(model, swiglu=lambda x: op.swiglu(np.concatenate(np.split(x, 2, axis=-1)[::-1], axis=-1)))


def rope_type_ignored(model):
    return with_config(model, rope=Rope(model.config.rope.theta))


MUTANTS = [
    ("qwen3", norm_after_rotation), ("qwen3-gqa-6-2", norm_after_rotation),
    ("qwen3", tiled_heads), ("qwen3-gqa-6-2", tiled_heads),
    ("qwen3", interleaved_pairs), ("qwen3", gate_and_up_swapped),
    ("qwen3-attention-bias", without_biases), ("qwen2-f16", without_biases), ("llama-biases", without_biases),
    ("qwen3-yarn", rope_type_ignored), ("qwen3-yarn-factor-1", rope_type_ignored), ("llama-linear", rope_type_ignored),
    ("llama-llama3-1500", rope_type_ignored), ("qwen3-yarn", factor_on_the_scores_too),
    ("qwen3-yarn-mscale", factor_on_the_scores_too),
]


@pytest.mark.parametrize(("name", "mutant"), MUTANTS, ids=[f"{name}-{mutant.__name__}" for name, mutant in MUTANTS])
def test_a_planted_fault_exceeds_the_bound(golden, exact, name, mutant):
    assert golden(name).error(mutant(exact(name))).max() > golden(name).bound


@pytest.mark.parametrize(("name", "changes"), [
    ("qwen3-yarn", {"attention_factor": 1.0}), ("qwen3-yarn-factor-1", {"attention_factor": 1.1386294361119891}),
    ("qwen3-yarn", {"beta_fast": 8.0}), ("qwen3-yarn", {"factor": 2.0}), ("qwen3-yarn", {"type": "linear"}),
    ("qwen3-yarn", {"original_max_position_embeddings": 4096}), ("qwen3-yarn-mscale", {"beta_fast": 32.0}),
    ("qwen3-yarn-mscale", {"truncate": True}), ("qwen3-yarn-mscale", {"beta_slow": 1.0}),
    ("qwen3-yarn-mscale", {"attention_factor": 1.2772588722239782}),
    ("llama-llama3-1500", {"low_freq_factor": 0.5}), ("llama-llama3-1500", {"high_freq_factor": 8.0}),
    ("llama-llama3-1500", {"original_max_position_embeddings": 512}), ("llama-linear", {"factor": 2.0}),
], ids=str)
def test_each_setting_of_a_rope_type_shows_in_its_golden(golden, exact, name, changes):
    """Case J5, and the same for every other key: one that was ignored would be found."""
    assert golden(name).error(with_rope(exact(name), **changes)).max() > golden(name).bound


def test_the_right_settings_through_the_mutants_road_stay_within_the_bound(golden, exact):
    """The control of the mutants: it is not the road that makes them fail."""
    for name in ("qwen3", "qwen3-yarn"):
        same = with_rope(with_op(exact(name), rms_norm=exact(name).op.rms_norm), type=exact(name).config.rope.type)
        assert golden(name).error(same).max() <= golden(name).bound


def test_an_epsilon_ten_times_too_large_shows_when_inputs_are_small(golden, exact):
    """Case J3: inputs of 1e-3 have a mean square of 1e-6, just the epsilon."""
    g = golden("qwen3-small-inputs")
    assert (g.error(with_config(exact(g.name), rms_norm_eps=1e-5)) > g.bound).all()


@pytest.mark.parametrize("theta", [1e3, 1e4, 1.01e6])
def test_a_wrong_rope_theta_shows_at_position_1000_and_beyond(golden, exact, theta):
    """Case J4. At position 0 nothing turns, so a short prompt would have looked fine."""
    g = golden("qwen3-theta-1e6")
    error = g.error(with_rope(exact(g.name), theta=theta))
    assert g.positions[0] == 0 and error[0] <= g.bound
    assert (error[np.array(g.positions) >= 1000] > g.bound).all()


@pytest.mark.parametrize("name", ["qwen3-theta-1e6", "qwen3-yarn-mscale", "llama-llama3-1500", "llama-linear"])
def test_old_and_new_rope_layout_mean_the_same_turns(golden, exact, name):
    """Case J4: transformers 5 moved rope_theta into rope_parameters."""
    raw = dict(golden(name).stored["config"])
    scaling = dict(raw.pop("rope_scaling", None) or {})
    raw["rope_parameters"] = {"rope_type": scaling.pop("type", "default"), **scaling, "rope_theta": raw.pop("rope_theta")}
    old, new = exact(name).config, parse_config(raw, "config.json")
    assert new.rope.turns(new.head_dim).tobytes() == old.rope.turns(old.head_dim).tobytes()
    assert new == dataclasses.replace(old, rope=new.rope) and new.rope == old.rope


def test_yarn_multiplies_cos_and_sin_and_nothing_else(golden, exact):
    """Cases J5 and J12. The same weights and prompt with the factor inferred (0.1 ln 4 + 1) and stated as 1.0.

    A first token sees only itself, so the factor cannot show there: its logits are equal. Later it shows. That the
    scores get no factor of their own is what the two goldens say: `factor_on_the_scores_too` exceeds the bound.
    """
    inferred, stated = golden("qwen3-yarn"), golden("qwen3-yarn-factor-1")
    assert (inferred.digest, inferred.prompt, inferred.positions) == (stated.digest, stated.prompt, stated.positions)
    assert (exact(inferred.name).config.rope.attention_factor, exact(stated.name).config.rope.attention_factor) == (
        0.1 * np.log(4) + 1, 1.0)
    assert np.abs(inferred.truth[0] - stated.truth[0]).max() <= 2 * inferred.bound * 2.0**-29
    assert (np.abs(inferred.truth[1:] - stated.truth[1:]).max(axis=1) > 1e3 * inferred.bound).all()


# J6, J8

@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (6, 2), (4, 1), (4, 4)])
def test_neighbouring_query_heads_share_a_kv_head(kernels, heads, kv_heads):
    """Case J6: values are 1.0 in kv head 0, 2.0 in kv head 1, ...: a head's output says which one it looked at."""
    op, t, d = arithmetic(kernels), 5, 16
    raw = np.random.Philox(key=heads * 10 + kv_heads).random_raw(t * (heads + kv_heads) * d)
    x = (raw / 2.0**63 - 1).astype(op.DTYPE).reshape(t, heads + kv_heads, d)
    v = np.broadcast_to(np.arange(1, kv_heads + 1, dtype=op.DTYPE)[:, None], (t, kv_heads, d))
    out = op.attention(x[:, :heads], [op.pack_kv(x[:, heads:], v)], 0).reshape(t, heads, d)
    want = np.arange(heads) // (heads // kv_heads) + 1
    # A weighted mean of equal values: off by a few roundings of the sums over 5 positions (and of exact's 2^-28 grid).
    assert np.abs(out - want[:, None]).max() <= want.max() * 8 * 2.0**-24


@pytest.mark.parametrize("tokens", [np.ones((2, 3), np.int64), [[1, 2], [3, 4]], [[0, 0, 5], [1, 2, 3]]])
def test_a_batch_is_refused_rather_than_padded(t_model, tokens):
    """Case J8: one sequence is all that there is."""
    with pytest.raises(FeedError, match=r"shape \(2, \d\)"):
        t_model.logits(tokens)


def test_rows_of_different_lengths_are_refused_in_words(t_model):
    with pytest.raises(FeedError):
        t_model.logits([[1, 2, 3], [4]])


# J9: infinities and NaN

def names_of(model, ids):
    return list(activations(model, ids))


def plant(where, row, value):
    def tap(name, x):
        if name == where:
            x = x.copy()
            x[row].flat[-1] = value
        return x
    return tap


LAYER_NAMES = ["attn_norm", "q", "k", "v", "q_norm", "k_norm", "q_rope", "k_rope", "heads", "o", "attn_residual", "mlp_norm",
               "gate_up", "act", "down", "residual"]


def test_the_places_to_plant_at_are_all_the_places(t_model):
    layers = [f"layers.{i}.{name}" for i in range(2) for name in LAYER_NAMES]
    assert sorted(names_of(t_model, [1, 2])) == sorted(["embed", *layers, "norm", "logits"])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("where", ["embed", *[f"layers.1.{name}" for name in LAYER_NAMES], "norm"])
def test_the_first_infinity_or_nan_is_named_by_operation_layer_and_position(t_model, where, value):
    """Case J9. Two positions are held, the fault is in the third of four new ones: position 4."""
    cache = t_model.new_cache(16, PAGE)
    t_model.run(cache, np.array([5, 6]))
    cache.commit([5, 6])
    with pytest.raises(NonFiniteError, match=rf"^{where} is infinite or NaN at position 4$"):
        t_model.run(cache, np.array([1, 2, 3, 4]), every=True, tap=plant(where, 2, value))
    assert cache.tokens == [5, 6]


@pytest.mark.parametrize("where", ["embed", "layers.0.v", "layers.1.q_norm", "layers.1.act", "layers.1.residual"])
def test_native_arithmetic_names_a_nan_too(t_native, where):
    with pytest.raises(NonFiniteError, match=rf"^{where} is infinite or NaN at position 2$"):
        t_native.run(t_native.new_cache(16, PAGE), np.array([1, 2, 3, 4]), every=True, tap=plant(where, 2, np.nan))


def test_a_nan_in_the_logits_of_a_position_is_named_by_that_position(t_model):
    with pytest.raises(NonFiniteError) as caught:
        t_model.run(t_model.new_cache(16, PAGE), np.array([1, 2, 3, 4]), every=True, tap=plant("logits", 1, np.nan))
    assert "position 1" in str(caught.value)


def test_a_nan_in_the_last_norm_of_one_position_is_named_by_that_position(t_model):
    with pytest.raises(NonFiniteError) as caught:
        t_model.run(t_model.new_cache(16, PAGE), np.array([1, 2, 3, 4]), tap=plant("norm", 0, np.nan))
    assert "position 3" in str(caught.value) or "last position" in str(caught.value)


@pytest.mark.parametrize("kernels", ["exact", "native"])
def test_weights_that_overflow_at_one_token_are_named_where_it_stands(t_folder, tmp_path, kernels):
    """Finite weights, fluent until a token comes whose residual passes the largest float32: "!!!!" elsewhere."""
    tensors = load_file(t_folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][63] = np.finfo(np.float32).max
    tensors["model.layers.0.self_attn.o_proj.weight"] *= np.float32(2.0**122)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((t_folder / "config.json").read_text())
    model = load_model(tmp_path, kernels)
    with np.errstate(over="ignore", invalid="ignore"):
        assert np.isfinite(model.logits([1, 2, 3, 4, 5])).all()
        with pytest.raises(NonFiniteError, match="^layers.0.attn_residual is infinite or NaN at position 5$"):
            model.logits([1, 2, 3, 4, 5, 63, 6])


@pytest.mark.parametrize("kernels", ["t_model", "t_native"])
@pytest.mark.parametrize("position", [0, 1, 3])
def test_an_overflow_after_the_last_layers_k_and_v_is_found_in_any_row_of_a_chunk(kernels, position, request):
    """Its logits are not asked for and its K/V are right, so nothing later shows it; token by token it would be an error."""
    model = request.getfixturevalue(kernels)
    with pytest.raises(NonFiniteError, match=rf"^layers.1.act is infinite or NaN at position {position}$"):
        model.run(model.new_cache(16, PAGE), np.array([1, 2, 3, 4]), tap=plant("layers.1.act", position, np.inf))


# J10

@pytest.mark.parametrize("kind", ["qwen3", "qwen3-gqa-6-2", "llama-biases"])
def test_prefill_writes_the_rows_that_decoding_writes_at_every_length(golden, exact, kind):
    """Case J10: at some lengths others left rows zero, and the text stayed fluent."""
    model, prompt = exact(kind), golden(kind).prompt
    slow = model.new_cache(16, PAGE)
    for token in prompt[:3 * PAGE + 1]:
        model.run(slow, np.array([token]))
        slow.commit([token])
    for length in range(1, 3 * PAGE + 2):
        fast = model.new_cache(16, PAGE)
        fast.poison()
        model.run(fast, np.array(prompt[:length]))
        fast.commit(prompt[:length])
        for layer in range(model.config.layers):
            want, have = slow.snapshot(layer, 0, length), fast.snapshot(layer)
            for name, rows in have.items():                                        # (N, length, ...)
                assert rows.tobytes() == want[name].tobytes(), f"{name} of layer {layer} at length {length}"
                assert rows.reshape(*rows.shape[:2], -1).any(axis=-1).all(), f"a zero row: {name}, layer {layer}"
