"""Real faults, planted: each mutant is an engine (or a chat) with one mistake that an engine of somebody's had.

A mutant of an engine is a function from a right model to a broken engine; the truth is always the right model. A mutant
of the chat turn is a subclass of Chat over a right engine. Every mutant says what people saw.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from engines_of_others import NoRewind

from refengine.cache import Cache
from refengine.chat import Chat
from refengine.engine import Engine, SequentialEngine
from refengine.model import Model
from refengine.pipelined import PipelinedEngine
from refengine.prefix import common_prefix, reusable
from refengine.recurrent import RecurrentCache, State
from refkernels import native

CAPACITY = 128


@dataclass(frozen=True)
class Mutant:
    """name, what people saw, the claim that must kill it, how to build it, and over which model: "T", "ties", "hybrid"."""

    name: str
    story: str
    claim: str
    make: Callable[[Model], Any]
    over: str = "T"


MUTANTS: list[Mutant] = []


def mutant(claim: str, over: str = "T"):
    """Registers a builder; its docstring is the story."""
    def register(make):
        MUTANTS.append(Mutant(make.__name__.replace("_", " "), make.__doc__, claim, make, over))
        return make
    return register


def pipelined(model: Model, kind: type[PipelinedEngine] = PipelinedEngine, chunk_size: int = 5) -> PipelinedEngine:
    return kind(model, capacity=CAPACITY, page_size=4, chunk_size=chunk_size)


def with_cache(model: Model, kind: type[Cache]) -> PipelinedEngine:
    """A right engine over a broken cache."""
    engine = pipelined(model)
    engine.cache = kind(engine.cache.pool, CAPACITY)
    return engine


def with_op(model: Model, **kernels: Callable) -> PipelinedEngine:
    """A right engine over a model some of whose kernels are broken."""
    class Op:
        def __getattr__(self, name):
            return kernels.get(name) or getattr(model.op, name)
    return pipelined(replace(model, op=Op()))


def with_positions(model: Model, rows: Callable[[Model, int, int], tuple[int, int]]) -> PipelinedEngine:
    """A right engine over a model that rotates by wrong positions."""
    class Wrong(Model):
        def rope_rows(self, start, stop):
            return Model.rope_rows(self, *rows(self, start, stop))
    return pipelined(Wrong(model.config, model.weights, model.op, model.checkpoint))


# Rewind, offset and position


@mutant("trim")
def trim_returns_the_number_and_does_not_move_the_offset(model):
    """The second session answers as if the first had never ended."""
    class Broken(PipelinedEngine):
        def trim_kv_cache(self, length):
            self._begin()
            return min(length, self.cache.offset)
    return pipelined(model, Broken)


@mutant("trim")
def trim_to_zero_keeps_everything(model):
    """crop(0) shares a branch with "no limit"."""
    class Broken(Cache):
        def trim_to(self, length):
            super().trim_to(length or self.offset)
    return with_cache(model, Broken)


@mutant("trim")
def trim_counts_pages_instead_of_positions(model):
    """The amount to trim is taken from the allocated size, so that a whole page stays."""
    class Broken(Cache):
        def trim_to(self, length):
            super().trim_to(min(self.offset, -(-length // 4) * 4))
    return with_cache(model, Broken)


@mutant("trim")
def trim_of_layer_0_only(model):
    """The count of layer 0 was reported for all layers; the others still read what was trimmed."""
    class Broken(Cache):
        stale = 0

        def trim_to(self, length):
            self.stale = max(self.stale, self.offset)
            super().trim_to(length)

        def read(self, layer, count=0):
            here, self.offset = self.offset, max(self.offset, self.stale if layer else 0)
            try:
                runs = super().read(layer, count)
            finally:
                self.offset = here
            return runs
    class Longer:
        """Attends over all that the cache gave, as an engine with a length for each layer would."""
        def __getattr__(self, name):
            return getattr(model.op, name)

        def attention(self, q, runs, start):
            return model.op.attention(q, runs, sum(run.k.shape[1] for run in runs) - len(q))
    return with_cache(replace(model, op=Longer()), Broken)


@mutant("trim")
def trimmed_tokens_come_back_with_the_next_append(model):
    """The offset is recomputed from the longest length that was ever stored."""
    class Broken(Cache):
        longest = 0

        def commit(self, tokens):
            super().commit(tokens)
            self.longest = max(self.longest, self.offset)
            self.offset = self.longest
    return with_cache(model, Broken)


@mutant("trim")
def trim_off_by_one(model):
    """One position too many is kept."""
    class Broken(Cache):
        def trim_to(self, length):
            super().trim_to(min(self.offset, length + 1))
    return with_cache(model, Broken)


@mutant("trim")
def logits_survive_a_rewind(model):
    """A full hit answers from the logits of a position that is gone."""
    class Broken(PipelinedEngine):
        def trim_kv_cache(self, length):
            logits = self._logits
            kept = super().trim_kv_cache(length)
            self._logits = logits
            return kept
    return pipelined(model, Broken)


@mutant("trim")
def reset_forgets_to_reset(model):
    """Garbage on the second prompt of an instance: the cache is not cleared when nothing is common."""
    class Broken(PipelinedEngine):
        def reset(self):
            self._begin()
    return pipelined(model, Broken)


@mutant("function")
def rope_position_from_the_chunk_start(model):
    """Every chunk is rotated as if it were the first."""
    return with_positions(model, lambda m, start, stop: (0, stop - start))


@mutant("function")
def rope_position_is_one_ahead_while_decoding(model):
    """The prompt's length is added again on the first decode step: 6, 7, 9."""
    return with_positions(model, lambda m, start, stop: (start + (stop - start == 1), stop + (stop - start == 1)))


@mutant("trim")
def rope_position_is_not_rewound(model):
    """K/V restored, position not: decode goes on where it was before the rewind."""
    seen = [0]

    def rows(m, start, stop):
        shift = max(0, seen[0] - start) if stop - start == 1 else 0
        seen[0] = max(seen[0], stop)
        return start + shift, stop + shift
    return with_positions(model, rows)


@mutant("function")
def mask_aligned_top_left(model):
    """The causal mask assumes as many queries as keys; a chunk after a prefix sees only the beginning."""
    def attention(q, runs, start):
        first = [type(run)(*(field[:, :len(q)] for field in run)) for run in runs[:1]]
        return model.op.attention(q, first if first[0].k.shape[1] == len(q) else runs, 0 if first[0].k.shape[1] == len(q) else start)
    return with_op(model, attention=attention)


@mutant("trim")
def softmax_over_the_padded_length(model):
    """The last page is attended to its end, slots that hold nothing included."""
    class Broken(Cache):
        def read(self, layer, count=0):
            used = self.offset + count
            return super().read(layer, min(-(-used // 4) * 4, len(self._pages) * 4) - self.offset)

    def attention(q, runs, start):
        keys = sum(run.k.shape[1] for run in runs)
        return model.op.attention(q, runs, keys - len(q))
    engine = with_cache(model, Broken)
    engine.model = with_op(model, attention=attention).model
    return engine


@mutant("function")
def kv_heads_are_tiled_instead_of_repeated(model):
    """Query head h reads kv head h mod N; unit tests with one kv head pass."""
    n = model.config.kv_heads

    def attention(q, runs, start):
        t, h, d = q.shape
        order = np.arange(h).reshape(h // n, n).T.ravel()         # the heads that a tiled cache would give to each kv head
        out = model.op.attention(np.ascontiguousarray(q[:, order]), runs, start).reshape(t, h, d)
        return out[:, np.argsort(order)].reshape(t, h * d)
    return with_op(model, attention=attention)


# Tokens against what is really in the cache


@mutant("atomic")
def the_last_id_is_put_into_the_history_without_being_run(model):
    """Off-by-one positions on the next turn: the history is one longer than the K/V."""
    class Broken(PipelinedEngine):
        last: list[int] = []

        @property
        def tokens(self):
            return self.cache.tokens + self.last

        def _generate(self, *arguments):
            for token in super()._generate(*arguments):
                self.last = []
                yield token
                self.last = [token]

        def _begin(self):
            self.last = []
            return super()._begin()
    return pipelined(model, Broken)


@mutant("atomic")
def a_cancelled_step_is_counted(model):
    """After a cancel the step in flight moves the offset, and its logits are never kept."""
    class Broken(PipelinedEngine):
        step = None

        def _generate(self, *arguments):
            for token in super()._generate(*arguments):
                self.step = token if self._flight else None
                yield token
            self.step = None

        def _land(self):
            flying = self._flight
            super()._land()
            if flying is not None and self.step is not None:
                self.cache.commit([self.step])
                self.step = None
    return pipelined(model, Broken)


@mutant("atomic")
def the_offset_moves_before_the_layers_are_done(model):
    """An error in layer 1 leaves a position that only layer 0 has."""
    class Broken(SequentialEngine):
        def _run(self, tokens):
            for token in tokens:
                step = np.array([token])
                try:
                    self._commit(step, self.model.run(self.cache, step))
                except Exception:
                    self.cache.commit(step)
                    raise
    return Broken(model, capacity=CAPACITY, page_size=4)


@mutant("trim")
def a_replaced_token_keeps_its_old_id(model):
    """[1,2,3,9] -> [1,2,3,11]: the K/V is new, the identity that the next prompt is compared with is not."""
    class Broken(Cache):
        known = 0

        def commit(self, tokens):
            old = self._ids[self.offset:self.known].copy()
            super().commit(tokens)
            self._ids[self.offset - len(tokens):][:len(old)][:len(tokens)] = old[:len(tokens)]
            self.known = max(self.known, self.offset)
    return with_cache(model, Broken)


@mutant("function")
def a_tail_that_fills_no_chunk_is_skipped(model):
    """The last question is forgotten: what does not fill a block never runs."""
    class Broken(PipelinedEngine):
        def _run(self, tokens):
            whole = len(tokens) - len(tokens) % self.chunk_size
            super()._run(tokens[:whole] if whole else tokens)
    return pipelined(model, Broken)


@mutant("function")
def an_empty_last_chunk(model):
    """Crash on turn 3 only: chunks are counted from the full length."""
    class Broken(PipelinedEngine):
        def _run(self, tokens):
            for i in range(0, len(tokens) + (self.cache.offset > 0 and len(tokens) % self.chunk_size == 0), self.chunk_size):
                chunk = tokens[i:i + self.chunk_size]
                self._commit(chunk, self.model.run(self.cache, chunk))
    return pipelined(model, Broken)


@mutant("pages")
def a_page_is_handed_out_twice(model):
    """A block freed while live: two places of one sequence share memory."""
    engine = pipelined(model)
    take, count = engine.cache.pool.take, iter(range(10**9))
    engine.cache.pool.take = lambda: engine.cache._pages[-1] if next(count) == 3 else take()
    return engine


@mutant("pages")
def the_part_after_a_page_border_is_not_written(model):
    """Some positions stay as they were at certain lengths; the output stays fluent."""
    class Broken(Cache):
        def write(self, layer, kv):
            room = 4 - self.offset % 4
            count = kv[0].shape[1]
            if layer == 1 and room < count:
                kv = type(kv)(*(field[:, :room] for field in kv))
            super().write(layer, kv)
    return with_cache(model, Broken)


# Arithmetic that depends on the path


@mutant("rows")
def blas_float_matmul_in_one_layer(model):
    """float32 on the BLAS in a single place: the row's bits depend on how many rows are computed."""
    exact = model.weights.layers[1].down

    def linear(x, w):
        if w is not exact:
            return model.op.linear(x, w)
        return native.linear(x, native.Linear(np.ascontiguousarray(w.weight.T.astype(np.float32)), None))
    return with_op(model, linear=linear)


@mutant("function")
def keys_are_rounded_only_while_decoding(model):
    """K/V stored in half precision, and the prefill attends to the unrounded ones."""
    def pack_kv(k, v):
        return model.op.pack_kv(k.astype(np.float16).astype(np.float32) if len(k) == 1 else k, v)
    return with_op(model, pack_kv=pack_kv)


@mutant("function")
def norm_eps_of_another_model(model):
    """eps falls back to 1e-5 where the file says 1e-6."""
    return with_op(model, rms_norm=lambda x, w, eps: model.op.rms_norm(x, w, 1e-5))


@mutant("function", over="ties")
def ties_go_to_the_last(model):
    """Two equal logits: another choice than everybody else's."""
    def argmax(logits):
        return len(logits) - 1 - int(np.argmax(logits[::-1]))
    return with_op(model, argmax=argmax)


@mutant("pipelined")
def the_worker_starts_from_the_requested_token_twice(model):
    """The step in flight is committed, and then run again."""
    class Broken(PipelinedEngine):
        def _commit(self, tokens, logits):
            super()._commit(tokens, logits)
            if self._flight is None and len(tokens) == 1 and self.cache.offset % 7 == 6:
                super()._commit(tokens, logits)
    return pipelined(model, Broken)


# Recurrent state, which cannot be cut


def recurrent_cache(model: Model, kind: type[RecurrentCache], every: int | str | None = 3) -> PipelinedEngine:
    """A right engine over a broken cache of a model with recurrent layers."""
    engine = pipelined(model)
    engine.cache = kind(engine.cache.pool, CAPACITY, engine.cache._start, snapshot_every=every)
    return engine


@mutant("snapshots", over="hybrid")
def a_rewind_cuts_attention_and_leaves_the_state(model):
    """The attention layers forget; the recurrent ones go on from what they should not know."""
    class Broken(RecurrentCache):
        def trim_to(self, length):
            Cache.trim_to(self, length)

        def reachable(self, length):
            return Cache.reachable(self, length)
    return recurrent_cache(model, Broken, None)


@mutant("snapshots", over="hybrid")
def reset_leaves_the_state(model):
    """State leaks from one request into the next."""
    class Broken(RecurrentCache):
        def trim_to(self, length):
            states = self._states
            super().trim_to(length)
            self._states = self._states if length else states
    return recurrent_cache(model, Broken)


@mutant("snapshots", over="hybrid")
def the_convolution_keeps_its_last_inputs(model):
    """The memory is restored, and the few inputs before it are those of the sequence that was left."""
    class Broken(RecurrentCache):
        def trim_to(self, length):
            before, back = self._states, length < self.offset
            super().trim_to(length)
            if back and length:
                self._states = {layer: state._replace(conv=before[layer].conv) for layer, state in self._states.items()}
    return recurrent_cache(model, Broken)


@mutant("snapshots", over="hybrid")
def a_snapshot_is_a_reference(model):
    """What was kept is the state itself, and goes on changing with it."""
    class Broken(RecurrentCache):
        live = None

        def commit(self, tokens):
            super().commit(tokens)
            if self.live is None:
                self.live = {layer: State(*(array.copy() for array in state)) for layer, state in self._states.items()}
            for layer, state in self._states.items():
                for array, new in zip(self.live[layer], state):
                    np.copyto(array, new)
            self._states = self.live
            if self.offset in self._snapshots:
                self._snapshots[self.offset] = self.live

        def write_state(self, layer, state, count):
            super().write_state(layer, State(*(array.copy() for array in state)), count)
    return recurrent_cache(model, Broken)


@mutant("snapshots", over="hybrid")
def a_restored_state_has_the_count_that_was_asked_for(model):
    """The state of the nearest snapshot, and the offset of the request."""
    class Broken(RecurrentCache):
        def trim_to(self, length):
            near = super().reachable(length)
            super().trim_to(near)
            self.offset = length

        def reachable(self, length):
            return Cache.reachable(self, length)
    return recurrent_cache(model, Broken)


@mutant("snapshots", over="hybrid")
def a_snapshot_is_labelled_by_the_border_that_the_chunk_ran_over(model):
    """Taken when the chunk is done, and named after the multiple that lies inside it."""
    class Broken(RecurrentCache):
        def until_snapshot(self):
            return None

        def commit(self, tokens):
            before = self.offset
            super().commit(tokens)
            if self.offset // 3 > before // 3:
                self._snapshots[self.offset // 3 * 3] = self._states
    return recurrent_cache(model, Broken)


@mutant("snapshots", over="hybrid")
def snapshots_beyond_the_rewind_stay(model):
    """Two sequences of the same length share a snapshot."""
    class Broken(RecurrentCache):
        def trim_to(self, length):
            kept = self._snapshots
            super().trim_to(length)
            self._snapshots = kept

        def _keep(self):
            if self.offset not in self._snapshots:
                super()._keep()
    return recurrent_cache(model, Broken)


@mutant("snapshots", over="hybrid")
def a_state_is_in_force_before_the_step_is_complete(model):
    """The layers that had run when the step failed know its tokens, the others do not."""
    class Broken(RecurrentCache):
        def write_state(self, layer, state, count):
            super().write_state(layer, state, count)
            self._states = {**self._states, layer: state}
    return recurrent_cache(model, Broken)


# The chat turn. These are subclasses of Chat, each with the engine that shows it.


class _KeepsLess(PipelinedEngine):
    """Retains one position less than asked for, and says so: the contract allows it."""

    def trim_kv_cache(self, length):
        return super().trim_kv_cache(max(0, length - 1))


@dataclass(frozen=True)
class ChatMutant:
    """A broken chat turn and the kind of engine under it."""

    chat: type[Chat]
    engine: Callable[[Model], Engine]


@mutant("reuse")
def the_caller_ignores_a_negative_answer(model):
    """The result of the rewind is thrown away; a recurrent state goes on, stale."""
    class Broken(Chat):
        def rewind(self, prompt):
            return max(0, self.engine.trim_kv_cache(reusable(prompt, self.engine.tokens))), ""
    return ChatMutant(Broken, NoRewind)


@mutant("reuse", over="hybrid")
def a_recurrent_state_is_fed_as_if_it_had_been_rewound(model):
    """The rewind answers -1, the caller feeds the rest of the prompt all the same."""
    class Broken(Chat):
        def rewind(self, prompt):
            want = reusable(prompt, self.engine.tokens)
            return (kept if (kept := self.engine.trim_kv_cache(want)) >= 0 else want), ""
    return ChatMutant(Broken, PipelinedEngine)


@mutant("reuse")
def the_caller_goes_on_from_what_it_asked_for(model):
    """The retained prefix was shorter than requested; the tokens between are never fed."""
    class Broken(Chat):
        def rewind(self, prompt):
            want = reusable(prompt, self.engine.tokens)
            self.engine.trim_kv_cache(want)
            return want, ""
    return ChatMutant(Broken, _KeepsLess)


@mutant("reuse")
def the_full_sequence_is_fed_where_the_suffix_is_due(model):
    """The cached part is processed a second time, behind itself."""
    class Broken(Chat):
        def rewind(self, prompt):
            return super().rewind(prompt)[0] and 0, ""
    return ChatMutant(Broken, PipelinedEngine)


@mutant("reuse")
def the_suffix_is_fed_where_the_full_sequence_is_due(model):
    """The engine slices again what was sliced before."""
    class Suffix(SequentialEngine):
        def _new(self, tokens):
            return self._fits(self.model.check_tokens(tokens)[self.cache.offset:])

    class Broken(Chat):
        def rewind(self, prompt):
            kept, fallback = super().rewind(prompt)
            self.engine.prefix_reuse_feeds_full_sequence = False
            return kept, fallback
    return ChatMutant(Broken, Suffix)


@mutant("reuse")
def no_token_is_left_to_run(model):
    """An identical prompt is found whole in the cache, and nothing is left to compute logits from."""
    class Broken(Chat):
        def rewind(self, prompt):
            return self.engine.trim_kv_cache(common_prefix(prompt, self.engine.tokens)), ""
    return ChatMutant(Broken, PipelinedEngine)


@mutant("reuse")
def reuse_is_rounded_down_to_a_page(model):
    """Right answers, and a long common prefix thrown away for a few tokens."""
    class Broken(Chat):
        def rewind(self, prompt):
            return self.engine.trim_kv_cache(reusable(prompt, self.engine.tokens) // 8 * 8), ""
    return ChatMutant(Broken, PipelinedEngine)


@mutant("reuse")
def the_prefix_is_compared_as_text(model):
    """Two spellings of one text have different ids; the cache holds the other one."""
    class Broken(Chat):
        def rewind(self, prompt):
            held = self.engine.tokens
            n = min(len(prompt), len(held))
            while n and self.tokenizer.decode(prompt[:n]) != self.tokenizer.decode(held[:n]):
                n -= 1
            return self.engine.trim_kv_cache(min(n, len(prompt) - 1)), ""
    return ChatMutant(Broken, PipelinedEngine)


@mutant("sampling")
def the_generator_is_keyed_by_the_step(model):
    """A sampled answer changes with the number of tokens that were reused."""
    class Broken(PipelinedEngine):
        def _generate(self, suffix, use, max_tokens, stop_ids, sampling):
            return super()._generate(suffix, use, max_tokens, stop_ids, replace(sampling, seed=sampling.seed % 2**32 + len(suffix)))
    return ChatMutant(Chat, Broken)


@mutant("sampling")
def the_penalty_sees_only_what_was_not_cached(model):
    """The repetition penalty counts the forwarded tokens, so that a hit and a miss differ."""
    class Broken(PipelinedEngine):
        def _generate(self, suffix, use, max_tokens, stop_ids, sampling):
            skip = self.cache.offset

            class Forgetful(type(sampling)):
                def pick(self, op, logits, history):
                    plain = replace(sampling, repetition_penalty=1.0)
                    if sampling.repetition_penalty != 1.0:
                        logits = logits.copy()
                        logits[np.unique(history[skip:])] -= np.float32(sampling.repetition_penalty)
                    return plain.pick(op, logits, history)
            return super()._generate(suffix, use, max_tokens, stop_ids, Forgetful(**vars(sampling)))
    return ChatMutant(Chat, Broken)
