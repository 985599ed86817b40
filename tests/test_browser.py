"""The page of `refengine inspect` in a real Chromium: python -m pytest -m browser (needs selenium, chromium, chromedriver). Floor 9."""
import shutil

import pytest

from helpers import make_engine
from refengine.chat import Chat
from refengine.inspect import Recorder, Replay, page, read_record
from refengine.loading import load
from refengine.model import load_tokenizer

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser():
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("chromium and chromedriver are not installed")
    options = selenium.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1100,1400"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = selenium.Chrome(options=options, service=selenium.ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def shown(browser, tmp_path_factory):
    """A chat of three turns with hostile text in it, replayed and opened."""
    folder = tmp_path_factory.mktemp("page")
    chat = Chat(load("tiny", engine="pipelined", capacity=512, page_size=16, chunk_size=8), load_tokenizer("tiny"), max_tokens=6,
                stats_log=None)
    recorder = Recorder(chat, folder / "chat.json")
    for text in ("What is a cache?", "And</script><img src=x onerror=alert(1)>?", "A prefix."):
        list(chat.send(text))
    list(chat.regenerate())
    recorder.save()
    again = Replay(read_record(folder / "chat.json"))
    (folder / "kv.html").write_text(page(again.data), encoding="utf-8")
    browser.get((folder / "kv.html").as_uri())
    return browser, again


def state(browser):
    return browser.execute_script("return kvpage.state()")


def test_every_step_shows_what_the_engine_held(shown):
    """Operations are played on an engine beside the page: offset, ids, and what is stale."""
    browser, again = shown
    engine = make_engine("pipelined", again.model, capacity=512)
    browser.execute_script("kvpage.go(-1)")
    assert state(browser)["offset"] == 0 and set(state(browser)["kinds"]) == {"free"}
    longest = []
    for at, event in enumerate(again.events):
        engine.trim_kv_cache(event["from"])
        if event["op"] in ("prefill", "decode"):
            engine.prefill(event["ids"])
        else:
            engine.trim_kv_cache(event["to"])
        browser.execute_script("kvpage.go(arguments[0])", at)
        now, held = state(browser), engine.tokens
        longest = [*held, *longest[len(held):]]
        assert now["offset"] == len(held) and now["tokens"][:len(longest)] == longest
        assert [kind for kind in now["kinds"][:len(held)] if kind in ("stale", "free")] == []
        assert set(now["kinds"][len(held):len(longest)]) <= {"stale"} and set(now["kinds"][len(longest):]) <= {"free"}


def test_the_slider_and_the_keys_move_through_time(shown):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    browser, again = shown
    slider, body = browser.find_element(By.ID, "time"), browser.find_element(By.TAG_NAME, "body")
    browser.execute_script("kvpage.go(-1)")
    slider.send_keys(Keys.ARROW_RIGHT)
    assert state(browser)["now"] == 0 and slider.get_attribute("value") == "1"
    slider.send_keys(Keys.END)
    assert state(browser)["now"] == len(again.events) - 1
    body.send_keys(Keys.ARROW_LEFT)
    assert state(browser)["now"] == len(again.events) - 2
    body.send_keys(Keys.PAGE_UP)
    turn = again.events[state(browser)["now"]]["turn"]
    assert turn == again.events[-1]["turn"] - 1
    trim = next(i for i, event in enumerate(again.events) if event["op"] == "trim")
    browser.execute_script("kvpage.go(arguments[0])", trim)
    what = browser.find_element(By.ID, "what").text
    assert f"Rewind from {again.events[trim]['from']} to {again.events[trim]['to']}" in what and "stale" in what


def test_the_figures_of_the_turns_are_the_engines(shown):
    from selenium.webdriver.common.by import By

    browser, again = shown
    rows = [[cell.text for cell in row.find_elements(By.TAG_NAME, "td")] for row in browser.find_elements(By.CSS_SELECTOR, "#turns tr")]
    assert [row[1:5] for row in rows] == [[str(turn[name]) for name in ("prompt", "reused", "forwarded", "generated")]
                                          for turn in again.data["turns"]]
    assert all(row[8] == f"0 of {turn['logits_bytes']:,} bytes" for row, turn in zip(rows, again.data["turns"]))
    assert [row[9] for row in rows] == [turn["cause"] for turn in again.data["turns"]]


def test_a_click_on_a_cell_and_on_a_token_shows_the_position(shown):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    browser, again = shown
    browser.execute_script("kvpage.go(9999)")
    canvas = browser.find_element(By.ID, "cells")
    ActionChains(browser).move_to_element_with_offset(canvas, -canvas.size["width"] // 2 + 76, -canvas.size["height"] // 2 + 8).click().perform()
    assert state(browser)["chosen"] == 0
    browser.find_element(By.CSS_SELECTOR, "#text span[data-p='5']").click()
    assert state(browser)["chosen"] == 5
    text, turn = browser.find_element(By.ID, "position").text, again.data["turns"][-1]
    assert f"id {again.engine.tokens[5]}" in text and f"{turn['k'][5]}, {turn['v'][5]}" in text and "the last attends to" in text
    browser.execute_script("kvpage.choose(arguments[0])", turn["lens_from"])
    assert f"after layer {turn['lens_layers'][-1]}" in browser.find_element(By.ID, "position").text


def test_nothing_in_the_conversation_becomes_part_of_the_page(shown):
    from selenium.webdriver.common.by import By

    browser, _ = shown
    browser.execute_script("kvpage.go(9999)")
    assert browser.find_elements(By.TAG_NAME, "img") == [] and "onerror" in browser.find_element(By.ID, "text").text.replace("\n", "")
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
