"""A server of the OpenAI protocol over our own engine, on loopback, in the forms that real ones have; and with faults. Floor 9."""
from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

from refengine.model import Model
from refengine.pipelined import PipelinedEngine
from refengine.prefix import reusable

FORMS = ("llama.cpp", "vllm", "text")


class Completions:
    """What is behind the address: form, fault, and two engines, so that a cold prompt leaves the other's cache alone.

    A fault is a name, or a function from an answer to another.
    """

    def __init__(self, model: Model, tokenizer, form: str, fault=None, capacity: int = 256):
        self.engine, self.other = (PipelinedEngine(model, capacity=capacity, page_size=4, chunk_size=64) for _ in range(2))
        self.model, self.tokenizer, self.form, self.fault, self.capacity = model, tokenizer, form, fault, capacity
        self.lock, self.bodies = threading.Lock(), []

    def get(self, path: str) -> tuple[int, object]:
        if path == "/v1/models":
            meta = {"meta": {"n_vocab": self.model.config.vocab}} if self.form == "llama.cpp" else {}
            return 200, {"object": "list", "data": [{"id": "tiny", "owned_by": self.form, **meta}]}
        if path == "/props" and self.form == "llama.cpp":
            return 200, {"default_generation_settings": {"n_ctx": self.capacity}}
        return 404, {"error": {"message": f"no {path}"}}

    def completion(self, body: dict) -> tuple[int, object]:
        self.bodies.append(body)
        prompt, top = body["prompt"], body["logprobs"]
        if self.form == "text":
            if not isinstance(prompt, str):
                return 422, {"detail": "prompt: Input should be a valid string"}
            prompt = self.tokenizer.encode(prompt)
        if self.form == "vllm" and top > 20:
            return 400, {"error": {"message": f"Requested sample logprobs of {top}, which is greater than max allowed: 20"}}
        if self.fault == "strict" and "cache_prompt" in body:
            return 400, {"error": {"message": "Unrecognized request argument: cache_prompt"}}
        cold = {"llama.cpp": not body.get("cache_prompt", True), "vllm": "cache_salt" in body, "text": False}[self.form]
        cold = cold and self.fault != "never cold"
        engine = self.other if cold else self.engine
        if self.fault == "by length" and not cold:
            kept = engine.trim_kv_cache(min(len(prompt) - 1, len(engine.tokens)))
        else:
            kept = engine.trim_kv_cache(0 if cold or self.fault == "never warm" else reusable(prompt, engine.tokens))
        rows = self.model.logits(prompt) if body.get("echo") else [self._logits(engine, prompt[kept:])]
        rows = [self._log_softmax(row) for row in rows]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": kept}}
        if self.fault == "silent" or self.form == "text":
            del usage["prompt_tokens_details"]
        answer = {"choices": [{"text": "", "logprobs": self._told(rows, top, body)}], "usage": usage}
        return 200, self.fault(answer) if callable(self.fault) else answer

    def _logits(self, engine, new):
        engine.prefill(new)
        return engine.logits

    @staticmethod
    def _log_softmax(row):
        row = row.astype(np.float64) - row.max()
        return (row - np.log(np.exp(row).sum())).astype(np.float32)

    def _told(self, rows, top, body):
        best = [[(int(id), float(row[id])) for id in np.argsort(-row, kind="stable")[:top]] for row in rows]
        if self.form == "llama.cpp":
            return {"content": [{"id": found[0][0], "top_logprobs": [{"id": id, "token": "?", "logprob": value} for id, value in found]}
                                for found in best]}
        named = self.form == "vllm" and body.get("return_tokens_as_token_ids")
        texts = [{f"token_id:{id}" if named else self.tokenizer.decode([id], skip_special_tokens=False): value for id, value in found}
                 for found in best]
        return {"top_logprobs": [None, *texts] if body.get("echo") else texts}


@contextmanager
def serving(completions: Completions):
    """The address of a server that answers until the end of the with."""
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            self.send(*completions.get(self.path))

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with completions.lock:
                if completions.fault == "drops":
                    return
                if completions.fault == "hangs":
                    time.sleep(5)
                self.send(*completions.completion(body))

        def send(self, status, answer):
            text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None                 # a client that goes away in the middle of a fault
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
