"""Servers of the OpenAI protocol as backends: their forms, and all that may go wrong with them. Floor 9."""
import math
from dataclasses import replace

import numpy as np
import pytest
from server_of_openai import Completions, serving

from refengine.backends import BackendError
from refengine.backends.openai import ServerBackend, ServerError
from refengine.model import load_model, load_tokenizer
from refengine.validate import open_subject, validate
from refengine.validate.metrics import compare, log_softmax

PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tiny")


def behind(tokenizer, form="llama.cpp", fault=None, arithmetic="exact", model=None) -> Completions:
    return Completions(model or load_model("tiny", arithmetic), tokenizer, form, fault)


def judged(completions: Completions, options: str = "", **settings):
    with serving(completions) as url:
        report = validate(open_subject(f"openai:{url}{options}", "tiny"), **{"longest": 40, "histories": 4} | settings)
    return report, {check.name: (check.outcome, check.words) for check in report.checks}


@pytest.mark.parametrize(("form", "top"), [("llama.cpp", 512), ("vllm", 20)])
def test_a_server_of_exact_arithmetic_is_right_and_its_cache_lossless(tokenizer, form, top):
    report, checks = judged(behind(tokenizer, form))
    assert [checks[name][0] for name in ("preflight", "forward", "location", "cache")] == ["pass", "pass", "skip", "pass"]
    assert f"top {top} log-probabilities, prompts as ids" in report.about["version"]
    assert "log-probabilities, those that" in report.about["reference"]
    figures = report.checks[-1].figures
    assert figures["reused"] > 0 and figures["unequal"] == 0 and figures["compared"] > 10
    assert "tokens were reused" in checks["cache"][1]


def test_what_a_server_tells_are_the_log_probabilities_of_the_engine_behind_it(tokenizer):
    want = log_softmax(load_model("tiny").logits(PROMPT).astype(np.float64))
    for form, known in (("llama.cpp", 512), ("vllm", 20)):
        with serving(behind(tokenizer, form)) as url:
            backend = ServerBackend(url, tokenizer, 512)
            rows = backend.rows(PROMPT)
        told = np.isfinite(rows)
        assert (told.sum(axis=1) == known).all() and np.abs(rows - want)[told].max() < 1e-6
        assert (rows.argmax(axis=1) == want.argmax(axis=1)).all()


def test_a_rewind_is_a_shorter_prompt_and_the_server_finds_the_prefix(tokenizer):
    completions = behind(tokenizer)
    with serving(completions) as url:
        backend = ServerBackend(url, tokenizer, 512)
        backend.prefill(PROMPT)
        reused = backend.reused
        assert backend.trim_kv_cache(12) == 12 and backend.logits is None
        backend.prefill([7, 8])
        assert completions.bodies[-1]["prompt"] == PROMPT[:12] + [7, 8] and backend.reused - reused == 12
        assert completions.bodies[-1] | {"prompt": 0, "model": ""} == {
            "model": "", "prompt": 0, "max_tokens": 1, "temperature": 0, "logprobs": 512, "return_tokens_as_token_ids": True,
            "cache_prompt": True, "id_slot": 0}
        ids = list(backend.generate([9], max_tokens=3))
    assert ids == [completions.model.logits(PROMPT[:12] + [7, 8, 9] + ids[:n])[-1].argmax() for n in range(3)]


def test_a_server_that_takes_text_is_judged_by_what_its_text_can_say(tokenizer):
    report, checks = judged(behind(tokenizer, "text"), longest=70)
    assert checks["forward"][0] == "pass" and "within rounding" in checks["forward"][1]
    assert checks["cache"] == ("skip", "this server takes text, not ids: random histories cannot be sent")
    assert "prompts go as text, and come to the same ids; left out, as their text has other ids: " in checks["preflight"][1]
    assert "random tokens" in checks["preflight"][1] and "English" in report.checks[1].figures["prompts"]


def test_a_server_that_knows_the_protocol_and_no_more_can_be_asked(tokenizer):
    completions = behind(tokenizer, fault="strict")
    with serving(completions) as url:
        backend = ServerBackend(url, tokenizer, 512)
        backend.prefill(PROMPT)
    assert not backend.takes_more and set(completions.bodies[-1]) == {"model", "prompt", "max_tokens", "temperature", "logprobs"}


@pytest.mark.parametrize("form", ["llama.cpp", "vllm"])
def test_a_wrong_forward_is_wrong(tokenizer, form):
    model = load_model("tiny", "native")
    config = replace(model.config, rope=replace(model.config.rope, theta=model.config.rope.theta * 1.02))
    wrong = type(model)(config, model.weights, model.op, model.checkpoint)
    _, checks = judged(behind(tokenizer, form, model=wrong), histories=0)
    assert checks["forward"][0] == "fail" and checks["forward"][1].startswith("wrong: ")


def test_a_cache_reused_by_length_alone_is_a_violation_and_not_rounding(tokenizer):
    _, checks = judged(behind(tokenizer, fault="by length"), histories=30)
    # rows of the forward come one token at a time and in order, so only the cache can show it
    assert checks["cache"][0] == "fail" and "not by rounding" in checks["cache"][1]


@pytest.mark.parametrize(("fault", "says"), [
    ("never cold", "tokens when it was told not to"),
    ("never warm", "it reused nothing of 64 tokens that were sent twice"),
    ("silent", "it does not say how much of a prompt it reused")])
def test_a_cache_that_cannot_be_seen_is_skipped_and_never_passed(tokenizer, fault, says):
    _, checks = judged(behind(tokenizer, fault=fault))
    assert checks["forward"][0] == "pass" and checks["cache"][0] == "skip" and says in checks["cache"][1]


def first(answer, **changes):
    """The answer, with another first log-probability."""
    answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"][0] |= changes
    return answer


@pytest.mark.parametrize(("fault", "says"), [
    (lambda answer: b"<html>", "the answer is not JSON: b'<html>'"),
    (lambda answer: [], "the answer is not a completion"),
    (lambda answer: {"choices": []}, "the answer is not a completion"),
    (lambda answer: answer | {"usage": [1]}, "the answer is not a completion"),
    (lambda answer: answer | {"usage": {"prompt_tokens": 99}}, "it counts 99 tokens in a prompt of 20"),
    (lambda answer: {"choices": [{"text": "x", "logprobs": None}]}, "no log-probabilities in the answer"),
    (lambda answer: {"choices": [{"logprobs": {"content": []}}]}, "log-probabilities of the token that it made are []"),
    (lambda answer: {"choices": [{"logprobs": {"content": [3]}}]}, "log-probabilities of a position are 3"),
    (lambda answer: {"choices": [{"logprobs": {"top_logprobs": [{}]}}]}, "log-probabilities of a position are []"),
    (lambda answer: first(answer, logprob=0.5), "a number that is not above 0"),
    (lambda answer: first(answer, logprob=math.nan), "a number that is not above 0"),
    (lambda answer: first(answer, logprob="-1"), "a number that is not above 0"),
    (lambda answer: first(answer, logprob=-0.0001), "probabilities of one position sum to 1."),
    (lambda answer: first(answer, id=512), "id 512 is not in the vocabulary of 512"),
    ("drops", "RemoteDisconnected"),
    ("hangs", "no answer in 1 s"),
], ids=str)
def test_what_a_server_may_do_wrong_is_an_error_that_says_what(tokenizer, fault, says):
    completions = behind(tokenizer)
    with serving(completions) as url:
        backend = ServerBackend(url, tokenizer, 512, timeout=1.0)
        completions.fault = fault
        with pytest.raises(ServerError) as caught:
            backend.prefill(PROMPT)
        assert says in str(caught.value) and backend.tokens == []
        completions.fault = None
        backend.timeout = 20.0
        backend.prefill(PROMPT)
    assert backend.tokens == PROMPT


def test_an_error_in_the_middle_is_an_error_of_that_check(tokenizer):
    for fault in ("drops", lambda answer: b"?"):
        completions = behind(tokenizer)
        with serving(completions) as url:
            subject = open_subject(f"openai:{url}", "tiny")
            completions.fault = fault
            report = validate(subject, longest=20, histories=2)
        assert report.outcome == "error" and [check.outcome for check in report.checks] == ["pass", "error", "skip", "error"]


def test_what_cannot_be_opened_says_why(tokenizer):
    with pytest.raises(ServerError, match="ConnectionRefusedError"):
        open_subject("openai:http://127.0.0.1:9", "tiny")
    for url in ("", "127.0.0.1:80", "ftp://x"):
        with pytest.raises(BackendError, match="not the address of a server"):
            open_subject(f"openai:{url}", "tiny")
    with serving(behind(tokenizer)) as url:
        for option in ("top=x", "top=0", "kv=int2", "speed=1"):
            with pytest.raises(BackendError, match="backend openai has no option"):
                open_subject(f"openai:{url},{option}", "tiny")
        with pytest.raises(ServerError, match="status 404, and no list of models"):
            open_subject(f"openai:{url}/nowhere", "tiny")
        assert open_subject(f"openai:{url}/v1/,top=7,kv=f16", "tiny").precision.kv == "f16"
    completions = behind(tokenizer, form="vllm")
    completions.completion = lambda body: (500, {"error": {"message": "no memory"}})
    with serving(completions) as url, pytest.raises(ServerError, match="status 500: no memory"):
        open_subject(f"openai:{url}", "tiny")


def test_a_prompt_beyond_the_context_of_the_server_is_refused_before_it_is_sent(tokenizer):
    completions = behind(tokenizer)
    with serving(completions) as url:
        backend = ServerBackend(url, tokenizer, 512)
        assert backend.capacity == 255, "one place is for the token that is made"
        sent = len(completions.bodies)
        with pytest.raises(Exception, match="255"):
            backend.prefill([1] * 256)
        assert len(completions.bodies) == sent


def test_a_key_goes_where_it_is_set(tokenizer, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "a key")
    seen = []
    completions = behind(tokenizer)
    with serving(completions) as url:
        backend = ServerBackend(url, tokenizer, 512)
        class Connection(backend._connect):
            def request(self, method, path, body, headers):
                seen.append(headers["Authorization"])
                super().request(method, path, body, headers)
        backend._connect = Connection
        backend.prefill(PROMPT)
    assert seen == ["Bearer a key"]


def test_kl_of_a_part_is_that_of_the_part_with_the_rest_as_one():
    rng = np.random.default_rng(0)
    p, q = (log_softmax(rng.normal(size=(6, 50)) * 3) for _ in range(2))
    known = np.zeros(p.shape, bool)
    np.put_along_axis(known, np.argsort(-q, axis=1)[:, :7], True, axis=1)
    figures = compare(p, np.where(known, q, -np.inf), known)

    def merged(x):
        return np.stack([[*np.exp(row[k]), 1 - np.exp(row[k]).sum()] for row, k in zip(x, known)])
    a, b = merged(p), merged(q)
    assert figures["kl_forward"] == pytest.approx((a * np.log(a / b)).sum(axis=1).mean(), rel=1e-9)
    assert figures["kl_backward"] == pytest.approx((b * np.log(b / a)).sum(axis=1).mean(), rel=1e-9)
    assert figures["kl_forward"] < compare(p, q)["kl_forward"]
    assert figures["nmse"] == pytest.approx(((p - q)[known]**2).sum() / (p[known]**2).sum(), rel=1e-9)
    every = compare(p, q, np.ones(p.shape, bool))
    for name, value in compare(p, q).items():
        assert every[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
