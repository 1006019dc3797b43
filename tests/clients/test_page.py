"""The page at GET /, in a real browser: Debian's Chromium without a window, driven by Playwright."""

import json
import math
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="`make test-clients` installs it")

from playwright.sync_api import Browser, Locator, Page, expect  # noqa: E402

from tests.entrypoints.openai.client import Client, serve  # noqa: E402
from tests.tiny_models import write_tiny_model  # noqa: E402

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
PROMPT = "the way <img src=x onerror=alert(1)>\nhome é"
SURPRISE = 0.01  # the page's legend says so
TIMEOUT_MS = 30_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert CHROMIUM, "these tests need Chromium: apt-get install chromium, or its path in CHROMIUM"
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # containers run as root
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, tiny_server: Client) -> Iterator[Page]:
    """The page, loaded and ready; it must not have asked anybody else for anything, or complained."""
    home = f"http://{tiny_server.host}:{tiny_server.port}/"
    context = browser.new_context(color_scheme="light", viewport={"width": 1100, "height": 900})
    context.set_default_timeout(TIMEOUT_MS)
    context.grant_permissions(["clipboard-read", "clipboard-write"], origin=home)
    page = context.new_page()
    complaints: list[str] = []
    asked: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: asked.append(request.url))
    page.goto(home)
    page.locator("#model option").first.wait_for(state="attached")
    yield page
    context.close()
    assert [url for url in asked if not url.startswith((home, "data:"))] == []
    assert [text for text in complaints if "400 (Bad Request)" not in text] == []


def fill(page: Page, **fields: Any) -> None:
    for name, value in fields.items():
        page.fill(f"#{name}", str(value))


def wait_until_done(page: Page) -> None:
    expect(page.locator("#stop")).to_be_disabled(timeout=TIMEOUT_MS)
    expect(page.locator("#status")).not_to_have_text("running…")


def run(page: Page, **fields: Any) -> None:
    fill(page, **fields)
    page.locator("#prompt").focus()
    page.keyboard.press("Control+Enter")
    wait_until_done(page)


def read_texts(tokens: Locator) -> str:
    return "".join(tokens.all_text_contents())


def read_copy(page: Page) -> dict[str, Any]:
    page.click("#copy")
    expect(page.locator("#status")).to_have_text("copied")
    copied: dict[str, Any] = json.loads(page.evaluate("navigator.clipboard.readText()"))
    return copied


def test_the_page_shows_the_tokens_and_values_that_the_api_answers(page: Page, tiny_server: Client) -> None:
    run(page, prompt=PROMPT, n=3, max_tokens=12, seed=5, top=4)
    answer = tiny_server.complete(
        model="tiny", prompt=PROMPT, n=3, max_tokens=12, seed=5, temperature=1, logprobs=4, prompt_logprobs=4
    ).json
    copied = read_copy(page)
    assert len(copied["choices"]) == 3
    for choice, shown in zip(answer["choices"], copied["choices"], strict=True):
        assert [token["text"] for token in shown["tokens"]] == choice["logprobs"]["tokens"]
        values = choice["logprobs"]["token_logprobs"]
        assert [token["logprob"] for token in shown["tokens"]] == pytest.approx(values, abs=1e-4)
        assert shown["cumulative_logprob"] == pytest.approx(sum(values), abs=1e-3)
        card = page.locator(".choice").nth(choice["index"])
        expect(card.locator("h2")).to_contain_text(f"Σ logprob {shown['cumulative_logprob']:.3f}")
    for token, entries in zip(copied["prompt"][1:], answer["choices"][0]["prompt_logprobs"][1:], strict=True):
        entry = entries[str(token["id"])]
        assert (token["text"], token["rank"]) == (entry["decoded_token"], entry["rank"])
        assert token["logprob"] == pytest.approx(entry["logprob"], abs=1e-4)
    assert copied["prompt"][0]["logprob"] is None


def test_a_prompt_stays_text_whatever_it_holds(page: Page) -> None:
    run(page, prompt=PROMPT, n=1, max_tokens=1)
    assert page.locator("img").count() == 0
    shown = read_texts(page.locator("#prompt_tokens .token")).replace("⏎", "").replace("·", "")
    assert shown == PROMPT


def test_colours_and_the_mark_of_a_surprise_follow_the_probability(page: Page) -> None:
    run(page, n=2, max_tokens=30, temperature=1.5, seed=3)
    limits = [0.5, 0.2, 0.05, 0.01]
    tokens = [token for choice in read_copy(page)["choices"] for token in choice["tokens"]]
    spans = page.locator(".choice .token")
    assert spans.count() == len(tokens)
    classes = spans.evaluate_all("spans => spans.map(span => span.className)")
    for token, names in zip(tokens, classes, strict=True):
        p = math.exp(token["logprob"])
        step = next((i for i, limit in enumerate(limits) if p >= limit), len(limits))
        assert f"p{step}" in names.split()
        assert ("surprising" in names.split()) == (p < SURPRISE)
    assert any("surprising" in names for names in classes), "a test of marks needs one"


def test_details_open_by_mouse_and_by_keyboard_alone(page: Page) -> None:
    run(page, prompt="the way", n=1, max_tokens=6, top=3, temperature=0)
    tokens, details = page.locator(".choice .token"), page.locator("#details")
    tokens.nth(2).hover()
    expect(details).to_be_visible()
    assert details.locator("tr").count() == 1 + 3
    expect(details.locator("tr.chosen td").first).to_have_text("1")  # greedy
    page.locator("h1").hover()
    expect(details).to_be_hidden()

    page.locator("#copy").focus()
    page.keyboard.press("Tab")  # the prompt's text
    expect(page.locator("#prompt_tokens .token").first).to_be_focused()
    page.keyboard.press("Tab")  # the first choice's
    expect(tokens.first).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    expect(details).to_be_visible()
    page.keyboard.press("End")
    expect(tokens.last).to_be_focused()
    page.keyboard.press("Escape")
    expect(details).to_be_hidden()


def test_a_token_below_the_alternatives_is_listed_after_them(page: Page) -> None:
    run(page, prompt="the way", n=4, max_tokens=30, top=1, temperature=2, seed=1)
    tokens = [token for choice in read_copy(page)["choices"] for token in choice["tokens"]]
    at = next(i for i, token in enumerate(tokens) if len(token["top"]) == 2)
    page.locator(".choice .token").nth(at).hover()
    rows = page.locator("#details tr")
    assert rows.count() == 1 + 2
    assert tokens[at]["rank"] != 1
    expect(rows.last).to_have_class("chosen")


def test_score_only_samples_nothing(page: Page) -> None:
    page.select_option("#mode", "score")
    run(page, prompt="the way home")
    copied = read_copy(page)
    assert copied["choices"] == [] and copied["usage"]["completion_tokens"] == 0
    assert len(copied["prompt"]) == copied["usage"]["prompt_tokens"]
    expect(page.locator("#prompt_sum")).to_contain_text("perplexity")


def test_a_chat_is_answered(page: Page) -> None:
    page.select_option("#mode", "chat")
    run(page, prompt="the way home", n=2, max_tokens=5, seed=2, top=2)
    copied = read_copy(page)
    assert [len(choice["tokens"]) for choice in copied["choices"]] == [5, 5]
    assert len(copied["prompt"]) > 3 and all(len(token["top"]) in (2, 3) for token in copied["prompt"][1:])


def test_a_refusal_is_shown_in_the_servers_words(page: Page) -> None:
    run(page, prompt="the way " * 300, n=1)
    expect(page.locator("#status")).to_have_class("error")
    expect(page.locator("#status")).to_contain_text("maximum context length")
    run(page, prompt="the way", max_tokens=2)  # and the page goes on
    expect(page.locator("#status")).not_to_have_class("error")


def test_dark_and_light_differ_in_ground_and_text(page: Page) -> None:
    read = "getComputedStyle(document.body).backgroundColor + getComputedStyle(document.body).color"
    light = page.evaluate(read)
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(read) != light


def test_tokens_appear_while_they_are_made_and_stop_ends_the_request(
    browser: Browser, smollm2_folder: pathlib.Path, model_server: Client
) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"http://{model_server.host}:{model_server.port}/")
    page.locator("#model option").first.wait_for(state="attached")
    fill(page, prompt="Once upon a time", n=2, max_tokens=900, temperature=1, seed=1)
    page.keyboard.press("Control+Enter")
    page.locator(".choice .token").nth(5).wait_for(timeout=TIMEOUT_MS)
    expect(page.locator("#status")).to_have_text("running…")  # live: some are there and more will come
    page.keyboard.press("Escape")
    expect(page.locator("#status")).to_have_text("stopped")
    model_server.wait_until_idle()
    context.close()


def test_no_playground_turns_it_off(tmp_path: pathlib.Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    with serve(folder, "--no-playground") as server:
        assert server.get("/").status == 404 and server.get("/playground/page.js").status == 404
