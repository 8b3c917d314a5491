"""The page's script, run by Node in a browser that is played: it has what these tests look at."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.resources import files
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="no Node to run scripts with")

BROWSER = """
const streams = [], pauses = [], statuses = [];
const seen = {};
let due = [], reloads = 0;
class EventSource {
  static CLOSED = 2;
  constructor(url) { Object.assign(this, { url, readyState: 1, heard: [] }); streams.push(this); }
  addEventListener(name, hear) { this.heard.push(hear); }
  close() { this.readyState = EventSource.CLOSED; }
  fail(readyState) {
    this.readyState = readyState;
    for (const hear of [this.onerror, ...this.heard]) hear?.();
  }
  tell(told) { this.onmessage({ data: JSON.stringify(told) }); }
}
const element = new Proxy(function () {}, { get: (_, name) => name === "children" ? [] : element,
  set: () => true, apply: () => undefined });
const document = { body: { dataset: { stream: "/jobs/j/stream", log: "/jobs/j/log" } },
  getElementById: () => element, querySelectorAll: () => [], createDocumentFragment: () => element,
  createElement: () => element };
const window = { addEventListener() {} };
const matchMedia = () => window, setInterval = () => 0, location = { reload() { reloads += 1; } };
const setTimeout = (run, pause) => { due.push(run); pauses.push(pause); };
const fetch = async () => {
  const status = statuses.shift();
  if (!status) throw new TypeError("no connection");
  return { status };
};
async function pass() {
  while (due.length) {
    due.splice(0).forEach((run) => run());
    await new Promise((resolve) => setImmediate(resolve));
  }
}
"""


SHOWN = """{
  ...seen, pauses, reloads, streams: streams.map((one) => [one.url, one.readyState === 2]),
}"""


def seen_after(action: str) -> dict[str, Any]:
    """Return which streams the script has opened and whether it has closed them, and the rest."""
    script = (files("elastic.coord.web") / "assets" / "page.js").read_text()
    after = f"pass().then(() => console.log(JSON.stringify({SHOWN})));"
    source = "\n".join((BROWSER, script, action, after))
    done = subprocess.run(["node"], input=source, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return dict(json.loads(done.stdout))


def streams_after(action: str) -> list[tuple[str, bool]]:
    return [(url, is_closed) for url, is_closed in seen_after(action)["streams"]]


LOG, PARTS = "/jobs/j/log/stream?", "/jobs/j/stream?seq=0"


def test_a_stream_that_is_refused_begins_again_after_a_pause() -> None:
    """A browser ends it for good at an error status, as from a coordinator that does not lead."""
    found = streams_after("statuses.push(200, 200); [...streams].forEach((one) => one.fail(2));")
    assert found == [(LOG, True), (PARTS, True), (LOG, False), (PARTS, False)]


def test_a_stream_that_stays_refused_is_asked_for_less_and_less_often() -> None:
    seen = seen_after("statuses.push(503, 0, 429, 503, 503, 200); streams[0].fail(2);")
    assert seen["pauses"] == [2000, 4000, 8000, 16000, 30000, 30000]
    assert seen["streams"][2:] == [[LOG, False]]


@pytest.mark.parametrize(("status", "reloads"), [(401, 1), (403, 0), (404, 0)])
def test_a_stream_that_stays_refused_for_good_is_not_asked_for_again(
    status: int, reloads: int
) -> None:
    """Such as by the next coordinator, which knows no login: the page then offers it."""
    seen = seen_after(f"statuses.push(503, {status}); streams[0].fail(2);")
    assert seen["pauses"] == [2000, 4000]
    assert seen["reloads"] == reloads
    assert seen["streams"][2:] == []


def test_a_stream_that_broke_is_left_to_the_browser() -> None:
    found = streams_after("[...streams].forEach((one) => one.fail(0));")
    assert found == [(LOG, False), (PARTS, False)]


def test_output_is_followed_until_its_job_has_ended() -> None:
    over = "streams[0].tell({ over: 'this coordinator does not lead' });"
    assert streams_after(over)[0] == (LOG, False)
    assert streams_after(over + "streams[0].tell({ end: true });")[0] == (LOG, True)


def test_output_stays_until_its_newest_lines_come_again() -> None:
    """They do not from a coordinator that leads no longer: it says so at each connection."""
    shown = """
      class Part {
        children = [];
        text = "";
        get lastChild() { return this.children.at(-1); }
        get textContent() {
          return this.text + this.children.map((one) => one.textContent).join("");
        }
        set textContent(text) { this.text = text; }
        append(...more) {
          const parts = more.map((one) => one.split ? { textContent: one } : one);
          this.children.push(...parts.flatMap((one) => one.isFragment ? one.children : [one]));
        }
        replaceChildren() { this.children = []; }
      }
      const log = new Part();
      Object.assign(document, { getElementById: () => log, createElement: () => new Part() });
      document.createDocumentFragment = () => Object.assign(new Part(), { isFragment: true });
      const lines = (text) => ({ lines: [[0, 1, 0, "n1", text]], skipped: 0 });
      followOutput("");
      const told = [lines("old"), { over: "leads no longer" }, { over: "leads no longer" }];
      seen.texts = [...told, lines("new")].map((one) => {
        output.onopen();
        output.tell(one);
        return log.children.map((line) => line.textContent);
      });
    """
    old, new, over = "[g1 r0 n1] old", "[g1 r0 n1] new", "leads no longer"
    assert seen_after(shown)["texts"] == [[old], [old, over], [old, over], [new]]
