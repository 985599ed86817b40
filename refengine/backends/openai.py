"""A server that speaks the OpenAI protocol, as far as it gives ids and log-probabilities: llama.cpp's, vLLM, SGLang, others.

One request a forward: POST /v1/completions with the whole prompt, one token to make, and the log-probabilities of the most
likely ones. The server finds the prefix that it holds by itself, so a rewind is a shorter prompt. What is asked beyond the
protocol, and ignored by who does not know it: `cache_prompt` and `id_slot` (llama.cpp), `cache_salt` and
`return_tokens_as_token_ids` (vLLM). Logits of what the server does not name are minus infinity. Tokens that come as text
only, and whose text is that of several ids, are left out. `OPENAI_API_KEY` is sent where it is set.
"""
from __future__ import annotations

import functools
import http.client
import itertools
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from refengine.backends import Backend, BackendError, Precision
from refengine.tokenizer import Tokenizer

TIMEOUT = 120.0       # seconds for one answer
MOST = 256 * 2**20    # bytes of one answer
TOPS = (1000, 20, 5)  # log-probabilities asked for, until the server agrees


class ServerError(BackendError):
    """A server cannot be reached, hangs, refuses, or answers what the protocol does not know."""


class ServerBackend(Backend):
    """One conversation with a server. cache: whether it may reuse what it holds; without, each prompt is to run from nothing.

    Attributes:
        takes_ids: prompts go as ids; else as text, which must encode to the same ids.
        top: so many log-probabilities come with each token.
        reused: prompt tokens that it says it took from its cache, of all requests; None when it does not say.

    Raises ServerError, BackendError.
    """

    scores = "log-probabilities"

    def __init__(self, url: str, tokenizer: Tokenizer | None, vocab: int, *, top: int | None = None, model: str | None = None,
                 capacity: int = 1024, precision: Precision = Precision(), cache: bool = True, timeout: float = TIMEOUT):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BackendError(f"openai: {url!r} is not the address of a server, as http://127.0.0.1:8080")
        self._connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._path = parts.netloc.rpartition("@")[2], parts.path.rstrip("/").removesuffix("/v1")
        self.url, self.timeout, self.precision, self.cache = url, timeout, precision, cache
        self._tokenizer, self.reused = tokenizer, None
        about = self._about()
        self.name = model or str(about.get("id", ""))
        self.version = f"{about.get('owned_by', '')} {self.name}".strip()
        meta = about.get("meta") if isinstance(about.get("meta"), dict) else {}
        limits = [n for n in (about.get("max_model_len"), meta.get("n_ctx"), self._slot_context()) if type(n) is int and n > 1]
        known = meta.get("n_vocab")
        # one place is for the token that is made
        super().__init__(known if type(known) is int and known > 0 else vocab, min([capacity, *(n - 1 for n in limits)]))
        self.takes_ids, self.takes_more, self.top = self._form([top] if top else sorted({min(n, vocab) for n in TOPS}, reverse=True))

    # What is asked, and how

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        """(status, the JSON of an answer). Raises ServerError."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        connection = self._connect(self._host, timeout=self.timeout)
        try:
            connection.request("GET" if body is None else "POST", self._path + path, body and json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read(MOST + 1)
        except TimeoutError:
            raise ServerError(f"openai: {self.url}{path}: no answer in {self.timeout:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"openai: {self.url}{path}: {type(error).__name__}: {error}".rstrip(": ")) from None
        finally:
            connection.close()
        if len(text) > MOST:
            raise ServerError(f"openai: {path}: an answer of more than {MOST:,} bytes")
        try:
            return answer.status, json.loads(text)
        except (ValueError, RecursionError):
            if answer.status != 200:
                return answer.status, None
            raise ServerError(f"openai: {path}: the answer is not JSON: {text[:80]!r}") from None

    def _about(self) -> dict[str, Any]:
        status, answer = self._ask("/v1/models")
        models = answer.get("data") if isinstance(answer, dict) else None
        if status != 200 or not isinstance(models, list) or not models or not isinstance(models[0], dict):
            raise ServerError(f"openai: {self.url}/v1/models: status {status}, and no list of models: {str(answer)[:80]}")
        return models[0]

    def _slot_context(self) -> int | None:
        """Of llama.cpp, which shares its context out to slots."""
        status, answer = self._ask("/props")
        settings = answer.get("default_generation_settings") if status == 200 and isinstance(answer, dict) else None
        return settings.get("n_ctx") if isinstance(settings, dict) else None

    def _form(self, tops: Sequence[int]) -> tuple[bool, bool, int]:
        """The richest form of a request that the server takes: (ids, more than the protocol has, log-probabilities)."""
        said = ""
        for takes_ids, takes_more, top in itertools.product((True, False), (True, False), tops):
            self.takes_ids, self.takes_more, self.top = takes_ids, takes_more, top
            if not takes_ids and self._tokenizer is None:
                continue
            prompt = [1, 2] if takes_ids else "Hello"
            status, answer = self._ask("/v1/completions", self._body(prompt))
            if status == 200:
                return takes_ids, takes_more, top
            said = f"status {status}: {_said(answer)}"
            if status not in (400, 422):        # not for the form
                break
        raise ServerError(f"openai: it refuses to complete two ids with log-probabilities: {said}")

    def _body(self, prompt: list[int] | str, **more: Any) -> dict[str, Any]:
        body = {"model": self.name, "prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": self.top, **more}
        if self.takes_more:
            body |= {"return_tokens_as_token_ids": True, "cache_prompt": self.cache, "id_slot": 0 if self.cache else 1}
            if not self.cache:
                body["cache_salt"] = uuid.uuid4().hex  # what is under another salt is not shared
        return body

    def _complete(self, ids: list[int], **more: Any) -> dict[str, Any]:
        """The log-probabilities of an answer, by the protocol's two forms."""
        prompt: list[int] | str = ids
        if not self.takes_ids:
            prompt = self._tokenizer.decode(ids, skip_special_tokens=False)
            if self._tokenizer.encode(prompt) != ids:
                raise BackendError(f"openai: this server takes text, and {len(ids)} ids are not those of their own text")
        status, answer = self._ask("/v1/completions", self._body(prompt, **more))
        if status != 200:
            raise ServerError(f"openai: status {status}: {_said(answer)}")
        try:
            found = answer["choices"][0]["logprobs"]
            usage = answer.get("usage") or {}
            counted, details = usage.get("prompt_tokens"), usage.get("prompt_tokens_details") or {}
            reused = details.get("cached_tokens")
        except (TypeError, KeyError, IndexError, AttributeError):
            raise ServerError(f"openai: the answer is not a completion: {str(answer)[:80]}") from None
        if type(counted) is int and counted != len(ids):
            raise ServerError(f"openai: it counts {counted} tokens in a prompt of {len(ids)}")
        if type(reused) is int:
            self.reused = (self.reused or 0) + reused
        if not isinstance(found, dict):
            raise ServerError("openai: no log-probabilities in the answer (a llama-cpp-python server needs --logits_all true)")
        return found

    # What is answered

    @functools.cached_property
    def _pieces(self) -> dict[str, int]:
        """Text -> id, of the ids whose text no other has."""
        found: dict[str, list[int]] = {}
        for id in range(self.vocab if self._tokenizer is not None else 0):
            found.setdefault(self._tokenizer.decode([id], skip_special_tokens=False), []).append(id)
        return {text: ids[0] for text, ids in found.items() if len(ids) == 1 and text and "\ufffd" not in text}

    def _row(self, entries: Any) -> np.ndarray:
        """(V,) float32 of [{"id": 5, "logprob": -1.0}, ...] or {"text": -1.0, ...}; minus infinity for what is not there."""
        if isinstance(entries, dict):
            entries = [{"token": text, "logprob": value} for text, value in entries.items()]
        if not isinstance(entries, list) or not entries:
            raise ServerError(f"openai: log-probabilities of a position are {str(entries)[:80]}")
        row = np.full(self.vocab, -np.inf, np.float32)
        for entry in entries:
            value = entry.get("logprob") if isinstance(entry, dict) else None
            if type(value) not in (int, float) or not value <= 1e-3:
                raise ServerError(f"openai: {str(entry)[:80]} has no log-probability, which is a number that is not above 0")
            id = self._id(entry)
            if id is not None and value > -1e30:
                row[id] = value
        total = float(np.exp(row.astype(np.float64)).sum())
        if total > 1.001:
            raise ServerError(f"openai: probabilities of one position sum to {total:.4f}")
        return row

    def _id(self, entry: dict[str, Any]) -> int | None:
        id, text = entry.get("id"), entry.get("token")
        if type(id) is not int:
            number = text.removeprefix("token_id:") if isinstance(text, str) else ""
            id = int(number) if number.isdecimal() and number != text else self._pieces.get(text)
        if id is not None and not 0 <= id < self.vocab:
            raise ServerError(f"openai: id {id} is not in the vocabulary of {self.vocab}")
        return id

    def _forward(self, ids: list[int]) -> np.ndarray:
        found = self._complete(self._ids + ids)
        entries = found.get("content", found.get("top_logprobs"))
        if not isinstance(entries, list) or not entries:
            raise ServerError(f"openai: log-probabilities of the token that it made are {str(entries)[:80]}")
        return self._row(entries[0].get("top_logprobs") if "content" in found and isinstance(entries[0], dict) else entries[0])

    def rows(self, ids: Sequence[int]) -> np.ndarray:
        """(T, V). Of a server that takes text, from one request, whose answer repeats the prompt: part of a text may not
        encode to part of its ids."""
        if self.takes_ids:
            return super().rows(ids)
        found = self._complete(list(ids), echo=True).get("top_logprobs")
        if not isinstance(found, list) or len(found) != len(ids) + 1:
            raise ServerError(f"openai: a prompt of {len(ids)} ids and one more is repeated as "
                              f"{len(found) if isinstance(found, list) else 'no'} rows of log-probabilities")
        return np.stack([self._row(entries) for entries in found[1:]])

    def _rewind(self, length: int) -> None:
        """Nothing is sent: the next prompt begins with what is kept."""

    def takes(self, ids: Sequence[int]) -> bool:
        """Can these ids be sent? Where text is taken, the ids must be those of their text."""
        return self.takes_ids or self._tokenizer.encode(self._tokenizer.decode(list(ids), skip_special_tokens=False)) == list(ids)


def _said(answer: Any) -> str:
    """The message of an error, as servers of this protocol write it."""
    found = answer.get("error", answer.get("detail", answer)) if isinstance(answer, dict) else answer
    return str(found.get("message", found) if isinstance(found, dict) else found)[:200]


def whether_it_caches(warm: ServerBackend, cold: ServerBackend, prompt: Sequence[int]) -> str:
    """Why its cache cannot be judged; "" when it can: it says that it reuses a prompt which was sent, and that it does not
    when it is told so."""
    if not warm.takes_ids:
        return "this server takes text, not ids: random histories cannot be sent"
    for backend in (warm, warm, cold):
        before = backend.reused
        backend.reset()
        backend.prefill(prompt)
        count = None if backend.reused is None else backend.reused - (before or 0)
        if count is None:
            return "it does not say how much of a prompt it reused (usage.prompt_tokens_details.cached_tokens)"
    if warm.reused == 0:
        return f"it reused nothing of {len(prompt)} tokens that were sent twice"
    if cold.reused != 0:
        return f"it reused {cold.reused} tokens when it was told not to (cache_prompt, cache_salt)"
    return ""
