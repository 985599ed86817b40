"""The page pool and the cache by themselves, without a model: what is written, seen, forgotten, and who holds which page."""
import numpy as np
import pytest
from helpers import same_bits, same_kv, snapshots
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from refengine.cache import Cache, PagePool
from refengine.errors import CapacityError
from refkernels import exact, native

LAYERS, HEADS, DIM = 2, 2, 4


def pool_of(pages, page_size, order=None, op=exact):
    return PagePool(op, layers=LAYERS, kv_heads=HEADS, head_dim=DIM, pages=pages, page_size=page_size, order=order)


def random_kv(rng, count, op=exact):
    """Packed K/V of some positions, one a layer."""
    return [op.pack_kv(*rng.standard_normal((2, count, HEADS, DIM), np.float32)) for _ in range(LAYERS)]


def append(cache, tokens, kv):
    cache.reserve(len(tokens))
    for layer in range(LAYERS):
        cache.write(layer, kv[layer])
    cache.commit(tokens)


def joined(pieces):
    """What appends have written, one dict of fields a layer."""
    return [{name: np.concatenate([getattr(kv[layer], name) for kv in pieces], axis=1) for name in pieces[0][0]._fields}
            for layer in range(LAYERS)]


@pytest.mark.parametrize("op", [exact, native], ids=["exact", "native"])
@pytest.mark.parametrize("order", [None, [5, 0, 3, 1, 4, 2]], ids=["ascending", "shuffled"])
def test_snapshot_gives_back_what_was_written_in_order(op, order):
    rng = np.random.default_rng(1)
    cache, pieces = Cache(pool_of(6, 3, order, op), 18), []
    for count in (1, 4, 2, 7):
        pieces.append(random_kv(rng, count, op))
        append(cache, range(count), pieces[-1])
    assert cache.tokens == [*range(1), *range(4), *range(2), *range(7)]
    same_kv(snapshots(cache), joined(pieces))
    for layer in range(LAYERS):
        for name, whole in joined(pieces)[layer].items():
            same_bits(cache.snapshot(layer, 2, 9)[name], whole[:, 2:9], name=name)


def test_snapshot_outside_the_positions_held_is_refused():
    cache = Cache(pool_of(2, 4), 8)
    append(cache, [1, 2, 3], random_kv(np.random.default_rng(2), 3))
    for start, stop in ((0, 4), (2, 1), (-1, 2)):
        with pytest.raises(ValueError, match="not in 0..3"):
            cache.snapshot(0, start, stop)


def test_what_is_written_is_not_seen_before_the_commit():
    rng = np.random.default_rng(3)
    cache, first = Cache(pool_of(4, 2), 8), random_kv(rng, 3)
    append(cache, [1, 2, 3], first)
    cache.reserve(2)
    for layer, kv in enumerate(random_kv(rng, 2)):
        cache.write(layer, kv)
    assert cache.offset == 3 and cache.tokens == [1, 2, 3]
    same_kv(snapshots(cache), joined([first]))


@pytest.mark.parametrize("length", [4, 5, 128, -1, -5])
def test_trim_to_outside_the_positions_held_is_refused_and_changes_nothing(length):
    """A1: a crop to 0 or to a negative length kept positions; here a wrong length is an error and all stays."""
    cache = Cache(pool_of(3, 2), 6)
    append(cache, [7, 8, 9], random_kv(np.random.default_rng(4), 3))
    memory = [field.tobytes() for field in cache.pool.fields]
    with pytest.raises(ValueError, match=rf"trim_to\({length}\): not in 0..3"):
        cache.trim_to(length)
    assert cache.offset == 3 and cache.tokens == [7, 8, 9]
    assert [field.tobytes() for field in cache.pool.fields] == memory


def test_trim_to_keeps_the_pages_and_clears_nothing():
    cache = Cache(pool_of(3, 2), 6)
    append(cache, [7, 8, 9, 1, 2], random_kv(np.random.default_rng(5), 5))
    memory, holders = [field.tobytes() for field in cache.pool.fields], list(cache.pool.holders)
    cache.trim_to(1)
    assert cache.offset == 1 and cache.tokens == [7]
    assert [field.tobytes() for field in cache.pool.fields] == memory and cache.pool.holders == holders


def test_trim_to_twice_is_trim_to_once():
    rng = np.random.default_rng(6)
    kv = random_kv(rng, 5)
    once, twice = (Cache(pool_of(3, 2), 6) for _ in range(2))
    for cache in (once, twice):
        append(cache, [1, 2, 3, 4, 5], kv)
    once.trim_to(2)
    twice.trim_to(4)
    twice.trim_to(2)
    assert once.tokens == twice.tokens == [1, 2]
    same_kv(snapshots(twice), snapshots(once))


def test_capacity_error_says_used_needed_and_capacity_and_changes_nothing():
    cache = Cache(pool_of(4, 2), 7)
    append(cache, [1, 2, 3], random_kv(np.random.default_rng(7), 3))
    holders = list(cache.pool.holders)
    with pytest.raises(CapacityError) as caught:
        cache.reserve(5)
    assert (caught.value.used, caught.value.needed, caught.value.capacity) == (3, 5, 7)
    assert "5 more tokens do not fit: 3 of 7 are used" in str(caught.value)
    assert cache.pool.holders == holders and cache.offset == 3
    cache.reserve(4)


def test_an_exhausted_pool_is_a_capacity_error_that_takes_no_page():
    pool = pool_of(5, 2)
    one, two = Cache(pool, 10), Cache(pool, 10)
    one.reserve(5)  # 3 pages
    two.reserve(1)  # 1 page
    with pytest.raises(CapacityError) as caught:
        two.reserve(5)  # 3 pages, of which it has 1 and the pool 1
    assert (caught.value.used, caught.value.needed, caught.value.capacity) == (0, 5, 4)
    assert pool.free == 1 and sum(pool.holders) == 4
    two.reserve(4)
    assert pool.free == 0


def test_neighbouring_pages_are_read_as_one_view_of_the_pool():
    cache = Cache(pool_of(4, 3), 12)
    kv = random_kv(np.random.default_rng(8), 10)
    append(cache, range(10), kv)
    for layer in range(LAYERS):
        runs = cache.read(layer)
        assert len(runs) == 1
        for name, field, view in zip(exact.KV._fields, cache.pool.fields, runs[0]):
            assert np.shares_memory(field, view)
            same_bits(view, getattr(kv[layer], name), name=name)


def test_pages_out_of_order_are_read_as_runs_in_the_order_of_positions():
    cache = Cache(pool_of(6, 2, [4, 5, 0, 1, 3, 2]), 12)
    kv = random_kv(np.random.default_rng(9), 11)
    append(cache, range(11), kv)
    runs = cache.read(1)
    assert [run.k.shape[1] for run in runs] == [4, 4, 2, 1]  # pages 4 5 | 0 1 | 3 | 2
    for name, field in zip(exact.KV._fields, cache.pool.fields):
        assert all(np.shares_memory(field, getattr(run, name)) for run in runs)
        same_bits(np.concatenate([getattr(run, name) for run in runs], axis=1), getattr(kv[1], name), name=name)


def test_read_with_a_count_sees_what_was_written_above_the_offset():
    rng = np.random.default_rng(10)
    cache, kv, more = Cache(pool_of(4, 2), 8), random_kv(rng, 3), random_kv(rng, 2)
    append(cache, [1, 2, 3], kv)
    cache.reserve(2)
    cache.write(0, more[0])
    same_bits(np.concatenate([run.v for run in cache.read(0, 2)], axis=1), np.concatenate([kv[0].v, more[0].v], axis=1))


def test_poisoned_slots_are_finite_again_once_they_are_written():
    """A3: trimmed tokens came back. Every slot from the offset on is NaN, none below, and a write replaces it."""
    rng = np.random.default_rng(11)
    cache, kv, more = Cache(pool_of(4, 2, [2, 0, 3, 1]), 8), random_kv(rng, 7), random_kv(rng, 4)
    append(cache, range(7), kv)
    cache.trim_to(3)
    cache.poison()
    for layer in range(LAYERS):
        for name in exact.KV._fields:
            field = np.concatenate([getattr(run, name) for run in cache.read(layer, 5)], axis=1)
            same_bits(field[:, :3], getattr(kv[layer], name)[:, :3], name=name)
            assert field.shape[1] == 8 and np.isnan(field[:, 3:]).all()
    append(cache, range(4), more)
    assert all(np.isfinite(field).all() for layer in snapshots(cache) for field in layer.values())


def test_two_caches_over_one_pool_never_share_memory():
    """E6: two writers in one block gave the same wrong text. They append in turn, and none sees the other's."""
    rng = np.random.default_rng(12)
    pool = pool_of(6, 4)
    caches, pieces = [Cache(pool, 12), Cache(pool, 12)], [[], []]
    for count in (6, 1, 2, 3):  # the first 6 end inside a page
        for i, cache in enumerate(caches):
            pieces[i].append(random_kv(rng, count))
            append(cache, range(count), pieces[i][-1])
    for cache, written in zip(caches, pieces):
        same_kv(snapshots(cache), joined(written))
    for one in caches[0].read(0):
        assert not any(np.shares_memory(one.k, other.k) for other in caches[1].read(0))


def test_release_gives_the_pages_back_and_the_next_sequence_gets_them():
    pool = pool_of(3, 2, [1, 2, 0])
    one, two = Cache(pool, 6), Cache(pool, 6)
    append(one, range(5), random_kv(np.random.default_rng(13), 5))
    assert pool.free == 0 and pool.holders == [1, 1, 1]
    one.release()
    assert (one.offset, one.tokens, pool.free, pool.holders) == (0, [], 3, [0, 0, 0])
    one.release()  # nothing is held: nothing happens
    with pytest.raises(ValueError, match="nobody holds it"):
        pool.release(0)
    assert pool.free == 3
    kv = random_kv(np.random.default_rng(14), 6)
    append(two, range(6), kv)
    same_kv(snapshots(two), joined([kv]))
    assert pool.free == 0


@pytest.mark.parametrize("make", [lambda: pool_of(0, 4), lambda: pool_of(4, 0), lambda: pool_of(3, 1, [0, 1, 1]),
                                  lambda: pool_of(3, 1, [0, 1]), lambda: pool_of(3, 1, [1, 2, 3]),
                                  lambda: Cache(pool_of(1, 1), 0)])
def test_sizes_and_orders_that_make_no_sense_are_refused(make):
    with pytest.raises(ValueError):
        make()


def test_the_ids_view_cannot_be_written():
    cache = Cache(pool_of(2, 2), 4)
    append(cache, [5, 6, 7], random_kv(np.random.default_rng(15), 3))
    with pytest.raises(ValueError, match="read-only"):
        cache.ids()[0] = 1
    assert cache.tokens == [5, 6, 7] and cache.ids().dtype == np.int64


@given(st.integers(1, 6), st.lists(st.integers(1, 6), min_size=1, max_size=5), st.randoms(use_true_random=False), st.data())
def test_any_appends_and_any_stretch_read_the_same_on_any_pages(page_size, counts, random, data):
    """Page size and page order cannot show: a stretch of positions is what was written there."""
    total = sum(counts)
    pages = -(-total // page_size) + 2
    order = random.sample(range(pages), pages)
    rng = np.random.default_rng(16)
    cache, pieces = Cache(pool_of(pages, page_size, order), total), [random_kv(rng, count) for count in counts]
    for count, kv in zip(counts, pieces):
        append(cache, range(count), kv)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    for layer, whole in enumerate(joined(pieces)):
        for name, field in cache.snapshot(layer, start, stop).items():
            same_bits(field, whole[name][:, start:stop], f"pages {order} of {page_size}, appends {counts}", name)


class PagesOfSeveralSequences(RuleBasedStateMachine):
    """E7: a block was freed while live. Three sequences append, trim and release over one pool; each has a naive twin."""

    sequence = st.integers(0, 2)

    @initialize(order=st.permutations(range(7)), page_size=st.integers(1, 3))
    def start(self, order, page_size):
        self.rng = np.random.default_rng(17)
        self.pool = pool_of(7, page_size, order)
        self.caches = [Cache(self.pool, 12) for _ in range(3)]
        self.twins = [joined([random_kv(self.rng, 0)]) for _ in range(3)]
        self.ids = [[], [], []]
        self.pages = [0, 0, 0]  # a trim keeps the pages: this is the most that was ever needed

    @rule(i=sequence, count=st.integers(1, 6))
    def append(self, i, count):
        cache, size = self.caches[i], self.pool.page_size
        needed = max(self.pages[i], -(-(len(self.ids[i]) + count) // size))
        if len(self.ids[i]) + count > 12 or needed - self.pages[i] > 7 - sum(self.pages):
            with pytest.raises(CapacityError):
                cache.reserve(count)
            return
        kv, ids = random_kv(self.rng, count), self.rng.integers(0, 100, count).tolist()
        append(cache, ids, kv)
        self.ids[i] += ids
        self.pages[i] = needed
        self.twins[i] = [{name: np.concatenate([old[name], getattr(new, name)], axis=1) for name in old}
                         for old, new in zip(self.twins[i], kv)]

    @rule(i=sequence, part=st.floats(0, 1), poison=st.booleans())
    def trim(self, i, part, poison):
        length = round(part * len(self.ids[i]))
        self.caches[i].trim_to(length)
        if poison:
            self.caches[i].poison()
        del self.ids[i][length:]
        self.twins[i] = [{name: field[:, :length] for name, field in layer.items()} for layer in self.twins[i]]

    @precondition(lambda self: any(self.pages))
    @rule(i=sequence)
    def release(self, i):
        self.caches[i].release()
        self.ids[i], self.pages[i] = [], 0
        self.twins[i] = joined([random_kv(self.rng, 0)])

    @invariant()
    def every_page_is_free_or_in_one_table(self):
        held = [page for cache in self.caches for page in cache._pages]
        free = [page for _, page in self.pool._free]
        assert sorted(held + free) == list(range(7))  # none twice, none lost
        assert self.pool.holders == [held.count(page) for page in range(7)]
        assert self.pool.free == 7 - sum(self.pages)

    @invariant()
    def every_sequence_reads_what_it_wrote(self):
        for cache, ids, twin in zip(self.caches, self.ids, self.twins):
            assert cache.tokens == ids and cache.offset == len(ids)
            same_kv(snapshots(cache), twin)


TestPagesOfSeveralSequences = PagesOfSeveralSequences.TestCase
TestPagesOfSeveralSequences.settings = settings(stateful_step_count=30)
