"""An engine behind the worker protocol, to copy from: python tests/worker_example.py FOLDER. Yours has a real cache instead.

    refengine validate --backend "worker:python tests/worker_example.py tiny" --model tiny
"""
import base64
import json
import sys

import refengine


class Engine:
    """Ids and a forward pass; replace both by your engine's."""

    def __init__(self, source):
        self.engine = refengine.load(source, engine="pipelined", arithmetic="native", capacity=512)

    def hello(self, request):
        return {"name": "example", "version": "1", "vocab": self.engine.vocab, "capacity": self.engine.capacity,
                "precision": {"activations": "f32", "kv": "f32"}}

    def prefill(self, request):
        self.engine.prefill(request["tokens"])
        return {"logits": base64.b64encode(self.engine.logits.astype("<f4").tobytes()).decode()}

    def trim(self, request):
        return {"retained": self.engine.trim_kv_cache(request["length"])}

    def reset(self, request):
        self.engine.reset()
        return {}


def main():
    engine = Engine(sys.argv[1])
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(engine, request["op"])(request)
        except Exception as error:  # say it, and stay
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
