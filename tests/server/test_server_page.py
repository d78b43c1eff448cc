"""The page at `/`: what it is made of, and what a browser makes of it while requests run, fail, and servers end."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from page_bed import Stub, asking, row, sees, status_of
from server_bed import BASE, Running, assert_error, engine, named, tokenizer, until, write

from hf_multilora import enable_multilora
from hf_multilora.server import Engine, Settings

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
ROWS = 100


# -- without a browser


def test_one_file_that_fetches_nothing_else(server):
    made = server.get("/")
    text = made.text
    assert made.status_code == 200 and made.headers["content-type"] == "text/html; charset=utf-8"
    assert len(made.content) < 20_000
    assert made.headers["cache-control"] == "no-store"
    assert made.headers["x-content-type-options"] == "nosniff"
    assert made.headers["referrer-policy"] == "no-referrer"
    assert "//" not in re.sub(r"http://www\.w3\.org/2000/svg|// .*", "", text), "something from elsewhere"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|\bimport\b|localStorage", text)
    assert not re.search(r"<[^>]*\s(on\w+|style)=", text), "the policy would refuse it"


def test_the_policy_admits_the_pages_own_parts_alone(server):
    made = server.get("/")
    policy = dict(part.strip().split(" ", 1) for part in made.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'" and policy["img-src"] == "data:"
    for nothing in ("base-uri", "form-action", "frame-ancestors"):
        assert policy[nothing] == "'none'"
    for kind in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[\w+/]{43}='", policy[kind])


def test_it_needs_no_key_and_says_nothing(serve, folder):
    server = serve(adapters=folder, api_keys=["sesame"], served_name="the-base")
    made = server.get("/")
    assert made.status_code == 200 and "the-base" not in made.text
    for path in ("/v1/status", "/page.html", "/index.html"):
        assert_error(server.get(path), 401, "invalid_api_key")
    assert server.post("/", {}).status_code == 405
    assert server.get("/v1/status", headers={"Authorization": "Bearer sesame"}).json()["base"] == "the-base"


def test_it_is_no_part_of_the_description(server):
    described = server.get("/openapi.json").json()["paths"]
    assert "/" not in described
    assert {item["name"] for item in described["/v1/status"]["get"]["parameters"]} == {"limit", "match"}


def test_it_travels_with_the_wheel():
    hatchling = pytest.importorskip("hatchling.builders.wheel")
    files = hatchling.WheelBuilder(str(Path(__file__).parents[2])).recurse_included_files()
    assert "hf_multilora/server/page.html" in {Path(file.distribution_path).as_posix() for file in files}


def test_status_of_the_busiest_and_of_names_that_match(serve, tmp_path):
    for number in range(1, 7):
        write(tmp_path / f"name-{number}", number)
    server = serve(adapters=tmp_path)
    for number in (4, 5, 5, 6, 6, 6):
        server.ask(f"name-{number}", "Who?", 2)
    everything, two = status_of(server), status_of(server, limit=2, match="NAME-")
    assert len(everything["adapters"]) == 6 and everything["counts"] == {"registered": 6, "matching": 7}
    slots = set(everything["slots"])
    assert {adapter["name"] for adapter in two["adapters"]} == {"name-5", "name-6"} | slots
    assert two["counts"] == {"registered": 6, "matching": 6} and two["sums"] == everything["sums"]
    three = status_of(server, match="e-3")
    assert {adapter["name"] for adapter in three["adapters"]} == {"name-3"} | slots
    assert status_of(server, match=BASE)["counts"]["matching"] == 1
    assert {adapter["name"] for adapter in status_of(server, limit=0)["adapters"]} == slots
    assert_error(server.get("/v1/status?limit=-1"), 400, "invalid_value", "limit")


def test_sums_count_what_has_not_ended(serve, folder):
    server = serve(adapters=folder)
    with asking(server, 9):
        until(lambda: status_of(server)["sums"]["new_tokens"] == 9)
        found = status_of(server)
        assert found["sums"]["finished"] == 0 and found["queue"]["running"] == 1
        assert found["batching"]["adapters"]["a"]["new_tokens"] == 0
    assert status_of(server)["sums"]["new_tokens"] == 60 == server.traffic()["a"].new_tokens


# -- in a browser


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install '.[test]'")
    if CHROMIUM is None:
        pytest.skip("needs Chromium on the path")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser):
    """Opens pages; whatever a script or the policy complains of in a watched one fails the test."""
    contexts, wrong = [], []

    def said(message) -> None:
        # That a request failed is told by the browser itself, and is what some tests are about.
        if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
            wrong.append(message.text)

    def start(root: str | None = None, watched: bool = True, **options):
        contexts.append(browser.new_context(**options))
        contexts[-1].set_default_timeout(20_000)
        page = contexts[-1].new_page()
        if watched:
            page.on("console", said)
            page.on("pageerror", lambda error: wrong.append(str(error)))
        if root is not None:
            page.goto(f"{root}/")
        return page

    yield start
    for context in contexts:
        context.close()
    assert not wrong


def test_it_is_live(server, open_page):
    page = open_page(server.root)
    sees(page, "#state", "Ready")
    sees(page, "#base", BASE)
    before = status_of(server)
    with asking(server, 20, model="b"):
        sees(page, "#running", "1")
        sees(page, "#tokens-sum", re.compile(f"^{before['sums']['new_tokens'] + 20:,} in all"))
        slot = status_of(server)["slots"].index("b")
        cell = page.locator("#slots li").nth(slot)
        assert cell.inner_text().split("\n") == [str(slot), "b", "1 running"]
        assert "busy" in cell.get_attribute("class")
        assert row(page, "b")[1:5] == [f"slot {slot}", "4", "1", "0"]
        assert page.locator("#adapters tr").first.locator("th").inner_text() == "b", "the busiest comes first"
        sees(page, "#queue-sum", "1 in work, of 1,024 at most")
    sees(page, "#running", "0")
    sees(page, "#tokens-sum", re.compile(f"^{before['sums']['new_tokens'] + 60:,} in all"))
    sees(page, "#answers-sum", re.compile(f"^{before['sums']['finished'] + 1:,} finished"))
    assert re.fullmatch(r"[\d.]+", page.locator("#tokens").inner_text())
    assert page.locator("#tokens-line path").last.get_attribute("d").startswith("M")
    assert page.locator("#slots li").nth(slot).inner_text().split("\n")[2] == "idle"


def test_where_adapters_are(folder, open_page):
    small = enable_multilora(named(), max_loras=2, max_lora_rank=16, max_cpu_loras=2, on_demand=False)
    server = Running(
        Engine(small, tokenizer(), page_size=16, num_blocks=64), Settings(adapters=folder, allow_runtime_updates=True)
    )
    try:
        page = open_page(server.root)
        sees(page, "#used", "0 of 2")
        assert page.locator("#slots .name").all_inner_texts() == ["free", "free"]
        server.post("/v1/pin_lora_adapter", {"lora_name": "c", "pinned": True})
        server.ask("a", "Who?", 2)
        server.ask(BASE, "Who?", 2)
        server.post("/v1/unload_lora_adapter", {"lora_name": "a"})
        where = {"a": "unloaded", "b": "registered", "c": "slot 0", BASE: "base model"}
        until(lambda: {name: (row(page, name) or ["", ""])[1] for name in where} == where)
        sees(page, "#used", "1 of 2")
        assert page.locator("#slots li").first.inner_text().startswith("0 · pinned")
    finally:
        server.stop()


def test_the_filter(server, open_page):
    page = open_page(server.root)
    sees(page, "#state", "Ready")
    page.fill("#filter", "B")
    sees(page, "#adapters th", "b")
    page.fill("#filter", BASE[:3])
    sees(page, "#adapters th", BASE)
    page.fill("#filter", "nobody has this name")
    until(lambda: page.locator("#adapters tr").count() == 0)
    page.fill("#filter", "")
    until(lambda: page.locator("#adapters tr").count() >= 4)


def test_keys(serve, folder, open_page):
    server = serve(adapters=folder, api_keys=["sesame"])
    page = open_page(server.root)
    sees(page, "#state", "Locked")
    assert not page.locator("#all").is_visible() and "tiny" not in page.inner_text("body")
    for wrong, why in (("sésame", "That is no API key."), ("sesam", "The server does not take this key.")):
        page.fill("#key", wrong)
        page.press("#key", "Enter")
        sees(page, "#wrong", why)
        assert page.evaluate("sessionStorage.length") == 0
    page.fill("#key", " sesame ")
    page.press("#key", "Enter")
    sees(page, "#state", "Ready")
    assert not page.locator("#ask").is_visible() and page.input_value("#key") == ""
    assert page.evaluate("Object.values(sessionStorage)") == ["sesame"]
    assert page.evaluate("localStorage.length") == 0 and not page.context.cookies() and "sesame" not in page.url
    page.reload()
    sees(page, "#state", "Ready")
    page.click("#forget")
    sees(page, "#state", "Locked")
    assert page.evaluate("sessionStorage.length") == 0 and not page.locator("#all").is_visible()


def test_a_server_that_stops_and_comes_back(folder, open_page):
    settings = Settings(adapters=folder)
    server = Running(engine(), settings)
    try:
        server.ask("a", "Who?", 8)
        page = open_page(server.root)
        sees(page, "#tokens", re.compile(r"^\d"))
        sums = page.inner_text("#tokens-sum")
    finally:
        server.stop()
    sees(page, "#state", re.compile(r"^No connection: trying again; what is shown is of \d\d:\d\d:\d\d$"))
    assert "stale" in page.get_attribute("#all", "class") and page.inner_text("#tokens-sum") == sums
    server = Running(engine(), settings, int(server.root.rpartition(":")[2]))
    try:
        sees(page, "#state", "Ready")
        sees(page, "#tokens-sum", "0 in all, 0 steps")
        sees(page, "#tokens", "0")
        assert "stale" not in page.get_attribute("#all", "class")
        assert not re.search("NaN|Infinity|undefined|null", page.inner_text("body"))
    finally:
        server.stop()


def test_rates_follow_the_servers_clock(server, open_page):
    page = open_page()
    stub = Stub(page, server)
    sees(page, "#tokens", "–")
    for _ in range(6):
        stub.turn(tokens=150, answers=2)
    sees(page, "#tokens", "150")
    sees(page, "#answers", "2.0")
    stub.turn(seconds=2.0, tokens=300, answers=4)  # a slow answer is no dip
    sees(page, "#tokens", "150")
    stub.turn(tokens=-40)  # of a request that ended while sums were made
    sees(page, "#tokens", "120")
    stub.turn(tokens=340)
    for _ in range(6):
        stub.turn()
    sees(page, "#tokens", "0")
    stub.status["started"] += 1000  # another server
    stub.turn(tokens=-stub.status["sums"]["new_tokens"], seconds=-stub.status["uptime_s"])
    sees(page, "#tokens", "–")
    stub.turn(tokens=7)
    sees(page, "#tokens", "7.0")
    stub.status = None
    stub.turn()
    sees(page, "#state", re.compile("^No connection"))
    sees(page, "#tokens", "7.0")
    stub.status = {**status_of(server), "not_ready": "the generation thread died.", "batching": None, "sums": None}
    page.clock.run_for(1000)
    sees(page, "#state", "Not ready: the generation thread died.")
    sees(page, "#tokens", "–")
    assert not re.search("NaN|Infinity|undefined|null", page.inner_text("body"))


def test_a_hidden_tab_asks_nothing(server, open_page):
    page = open_page()
    stub = Stub(page, server)
    sees(page, "#state", "Ready")
    stub.turn()
    hide = "Object.defineProperty(document, 'hidden', {{configurable: true, value: {}}});"
    page.evaluate(hide.format("true") + "document.dispatchEvent(new Event('visibilitychange'))")
    asked = len(stub.queries)
    page.clock.run_for(30_000)
    assert len(stub.queries) == asked
    page.evaluate(hide.format("false") + "document.dispatchEvent(new Event('visibilitychange'))")
    until(lambda: page.evaluate("0") or len(stub.queries) > asked)


def test_names_are_text(serve, folder, open_page):
    server = serve(adapters=folder, allow_runtime_updates=True, served_name="<b>base</b>")
    for name in (HOSTILE, "</script><script>document.title='owned'</script>", "javascript:alert(1)", "__proto__"):
        assert server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": "a"}).status_code == 200
    server.ask(HOSTILE, "Who?", 2)
    page = open_page(server.root)
    page.on("dialog", lambda dialog: pytest.fail("a script ran"))
    sees(page, "#slots li:first-child .name", HOSTILE)
    sees(page, "#adapters tr:first-child th", HOSTILE)
    sees(page, "#base", "<b>base</b>")
    assert row(page, "__proto__")[1:5] == ["memory", "3", "0", "0"]
    assert page.title() == "<b>base</b> – hf_multilora"
    assert page.locator("main img, h1 b, main script").count() == 0


def test_the_policy_holds(server, open_page):
    page = open_page(server.root, watched=False)
    sees(page, "#state", "Ready")
    for sink in ("document.body.innerHTML = '<i>'", "document.write('<i>')", "setTimeout('0')"):
        tried = f"(() => {{ try {{ {sink}; return 'done' }} catch (error) {{ return error.name }} }})()"
        assert page.evaluate(tried) != "done"
    refused = """new Promise(done => {
        document.addEventListener("securitypolicyviolation", event => done(event.effectiveDirective), {once: true});
        %s
    })"""
    assert page.evaluate(refused % "fetch('http://127.0.0.2:9').catch(() => 0)") == "connect-src"
    image = "document.body.append(Object.assign(new Image(), {src: '/health'}))"
    assert page.evaluate(refused % image) == "img-src"
    style = "document.body.append(Object.assign(document.createElement('style'), {textContent: '* {color: red}'}))"
    assert page.evaluate(refused % style) == "style-src-elem"


def test_two_thousand_adapters(server, open_page):
    page = open_page()
    stub = Stub(page, server)
    sees(page, "#state", "Ready")
    assert stub.queries[0] == {"limit": [str(ROWS)]}
    one, traffic = stub.status["adapters"][0], {"requests": 1, "running": 0, "waiting": 0, "new_tokens": 1}
    names = [f"org/customer-{i:04}" for i in range(2000)]
    stub.status["adapters"] = [{**one, "name": name, "slot": None, "in_use": 0} for name in names]
    stub.status["batching"]["adapters"] = {name: {**traffic, "requests": i} for i, name in enumerate(names)}
    stub.status["batching"]["adapters"][names[7]]["running"] = 1
    stub.status["counts"] = {"registered": 2000, "matching": 2001}
    stub.turn()
    sees(page, "#shown", f"2,000 adapters registered; the busiest {ROWS} of 2,001 are shown")
    assert page.locator("#adapters tr").count() == ROWS
    assert page.locator("#adapters th").all_inner_texts()[:3] == [names[7], names[-1], names[-2]]
    page.fill("#filter", "mer-0007")
    sees(page, "#adapters th", "org/customer-0007")
    asked = len(stub.queries)
    stub.turn()
    assert stub.queries[asked]["match"] == ["mer-0007"]
    assert page.evaluate("document.querySelectorAll('*').length") < 1500


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_and_dark(server, open_page, scheme):
    page = open_page(server.root, viewport={"width": 400, "height": 800}, color_scheme=scheme)
    sees(page, "#state", "Ready")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", back))) < 200) == (scheme == "dark")
