"""What a turn costs, counted in work instead of seconds, so that a machine cannot show: forwarded tokens, products, bytes of
the cache, large allocations. A change that makes a turn do more of them fails here. Floor 9.
"""
import tracemalloc
from collections import Counter

import numpy as np
import pytest

from helpers import make_engine
from refengine.cache import Cache
from refengine.model import Model, load_model
from refengine.synth import write_checkpoint

# Large enough that a copy of a layer's weights or K/V stands out among the small arrays of one token.
CONFIG = {"model_type": "qwen3", "hidden_act": "silu", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 512, "vocab_size": 2048, "rms_norm_eps": 1e-6,
          "max_position_embeddings": 4096, "rope_theta": 10000.0, "tie_word_embeddings": False, "attention_bias": False}
L, N, D = 2, 2, 32
HELD, CAPACITY = 900, 1024


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    write_checkpoint(folder, CONFIG)
    return folder


@pytest.fixture(scope="module", params=["exact", "native"])
def model(folder, request) -> Model:
    return load_model(folder, request.param)


def engine_holding(model: Model, count: int, kind: str = "pipelined"):
    engine = make_engine("pipelined", model, capacity=CAPACITY, page_size=64, chunk_size=256)
    engine.prefill(range(count))
    if kind == "sequential":
        other = make_engine("sequential", model, capacity=CAPACITY, page_size=64)
        other.cache = engine.cache
        return other
    return engine


@pytest.fixture
def work(monkeypatch) -> Counter:
    """Counts products, forwarded tokens, and bytes of K/V written and read."""
    counts, matmul, run, write, read = Counter(), np.matmul, Model.run, Cache.write, Cache.read

    def counted_matmul(*arguments, **options):
        counts["products"] += 1
        return matmul(*arguments, **options)

    def counted_run(self, cache, tokens, **options):
        counts["forwards"] += 1
        counts["tokens"] += len(tokens)
        return run(self, cache, tokens, **options)

    def counted_write(self, layer, kv):
        counts["written"] += sum(field.nbytes for field in kv)
        return write(self, layer, kv)

    def counted_read(self, layer, count=0):
        runs = read(self, layer, count)
        counts["read"] += sum(field.nbytes for kv in runs for field in kv)
        return runs

    monkeypatch.setattr(np, "matmul", counted_matmul)
    monkeypatch.setattr(Model, "run", counted_run)
    monkeypatch.setattr(Cache, "write", counted_write)
    monkeypatch.setattr(Cache, "read", counted_read)
    return counts


def position_bytes(model: Model) -> int:
    """K/V of one position in all layers."""
    return L * N * sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in model.op.kv_fields(D).values())


def test_k_and_v_of_a_position_are_two_rows_of_numbers_and_one_step(model):
    assert position_bytes(model) == L * N * (2 * D * 8 + 8 if model.op.NAME == "exact" else 2 * D * 4)


@pytest.mark.parametrize("kind", ["sequential", "pipelined"])
def test_a_rewind_forwards_nothing_and_touches_no_byte(model, work, kind):
    engine = engine_holding(model, HELD, kind)
    work.clear()
    for length in (HELD, HELD - 1, 300, 0):
        assert engine.trim_kv_cache(length) == length
    assert not work


def test_a_turn_forwards_what_is_not_reused_and_nothing_else(model, work):
    engine = engine_holding(model, HELD)
    work.clear()
    kept = engine.trim_kv_cache(HELD - 100)
    next(engine.generate(range(28), max_tokens=1))
    each = position_bytes(model)
    assert (work["forwards"], work["tokens"]) == (1, 28)
    assert work["written"] == 28 * each
    assert work["read"] == (kept + 28) * each, "each position once"


def test_the_same_turn_with_one_token_a_forward(model, work):
    engine = engine_holding(model, HELD, "sequential")
    work.clear()
    engine.trim_kv_cache(HELD - 5)
    next(engine.generate(range(HELD), max_tokens=1))
    each = position_bytes(model)
    assert (work["forwards"], work["tokens"], work["written"]) == (5, 5, 5 * each)
    assert work["read"] == sum(range(HELD - 4, HELD + 1)) * each


@pytest.mark.parametrize("model", ["exact"], indirect=True)  # native's @ cannot be counted
def test_products_of_a_forward(model, work):
    """qkv, o, gate and up, down: four a layer. Scores and values: two a block of attention. One for the head."""
    engine = engine_holding(model, HELD)
    work.clear()
    engine.prefill([1])
    assert work["products"] == L * (4 + 2) + 1
    work.clear()
    engine.prefill(range(28))
    assert work["products"] == L * (4 + 2) + 1


def test_a_prefill_is_as_many_forwards_as_chunks(model, work):
    engine_holding(model, HELD)
    assert (work["forwards"], work["tokens"]) == (4, HELD)


@pytest.mark.parametrize("kind", ["sequential", "pipelined"])
def test_a_decode_step_allocates_nothing_large(model, kind):
    """No copy of a layer's weights, nor of its keys: everything that a step allocates together is smaller than either."""
    engine = engine_holding(model, HELD, kind)
    engine.trim_kv_cache(HELD - 1)
    answer = engine.generate([5] if kind == "pipelined" else [*range(HELD - 1), 5], max_tokens=8)
    next(answer), next(answer)
    tracemalloc.start()
    try:
        next(answer)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        next(answer)
        peak = tracemalloc.get_traced_memory()[1] - held
    finally:
        tracemalloc.stop()
    item = 8 if model.op.NAME == "exact" else 4
    keys, weights = N * HELD * D * item, 4 * 32 * 128 * item
    assert peak < min(keys, weights), f"{peak:,} bytes"


def test_a_cache_that_is_not_used_takes_no_memory(model):
    """Pages are lazy: a cache of a million positions costs nothing before it is written."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cache = model.new_cache(2**20, 64)
    assert sum(field.nbytes for field in cache.pool.fields) > 2**29
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**17, "KiB"
