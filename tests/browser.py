"""A real browser, without a window and without a network, that measures how a page lies."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    # Every name resolves to nothing: a page that needs the network would fail here.
    "--host-resolver-rules=MAP * ~NOTFOUND",
)
SCHEMES = {"dark": 0, "light": 1}

# Runs in a page that holds the page under test in one frame per width.
MEASURE = """
const box = e => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
const shown = e => e.getClientRects().length > 0;
const measure = frame => {
  const doc = frame.contentDocument, win = frame.contentWindow, root = doc.documentElement;
  const outside = [...doc.body.querySelectorAll("*")].filter(shown)
    .filter(e => { const [l, , r] = box(e); return l < -0.5 || r > root.clientWidth + 0.5; })
    .map(e => e.tagName + " " + e.id + " " + e.textContent.slice(0, 40));
  const wrapped = [...doc.querySelectorAll("td, th, dd, h1, h2, li")].filter(shown)
    .filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent);
  const figures = {};
  for (const figure of doc.querySelectorAll("figure")) {
    const svg = [...figure.querySelectorAll("svg")].filter(shown);
    figures[figure.id] = svg.map(s => ({
      box: box(s),
      texts: [...s.querySelectorAll("text")].map(t => ({text: t.textContent, box: box(t)})),
      size: s.getBoundingClientRect().width / s.viewBox.baseVal.width *
        Math.min(...[...s.querySelectorAll("text")].map(t => parseFloat(win.getComputedStyle(t).fontSize))),
    }));
  }
  const data = {};
  for (const script of doc.querySelectorAll("script[type='application/json']"))
    data[script.id] = JSON.parse(script.textContent);
  return {
    width: win.innerWidth, clientWidth: root.clientWidth, scrollWidth: root.scrollWidth,
    outside, wrapped, figures, data,
    background: win.getComputedStyle(doc.body).backgroundColor,
    ink: win.getComputedStyle(doc.body).color,
    fetched: win.performance.getEntriesByType("resource").map(e => e.name),
    open: [...doc.querySelectorAll("details")].length,
  };
};
window.onload = () => {
  const frames = [...document.querySelectorAll("iframe")];
  for (const frame of frames)
    for (const details of frame.contentDocument.querySelectorAll("details")) details.open = true;
  document.getElementById("result").textContent = JSON.stringify(frames.map(measure));
};
"""


def find_browser() -> str:
    """Path of Chromium; the test fails where there is none, it does not skip."""
    for name in NAMES:
        if found := shutil.which(name):
            return found
    pytest.fail("no Chromium to look at the page with: on Debian, apt-get install chromium", pytrace=False)


def measure(page: str, folder: Path, widths: tuple[int, ...], scheme: str) -> list[dict[str, Any]]:
    """Lay a page out at some widths, in a light or dark scheme, and say where everything lies."""
    frames = "".join(
        f'<iframe srcdoc="{html.escape(page)}" style="width:{width}px;height:900px;border:0"></iframe>'
        for width in widths
    )
    outer = folder / f"outer-{scheme}.html"
    outer.write_text(
        '<!doctype html><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        f'{frames}<pre id="result"></pre><script>{MEASURE}</script>',
        encoding="utf-8",
    )
    profile = folder / f"profile-{scheme}"
    finished = subprocess.run(
        [
            find_browser(),
            *FLAGS,
            f"--user-data-dir={profile}",
            f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
            "--window-size=1400,900",
            "--virtual-time-budget=10000",
            "--dump-dom",
            outer.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    found = re.search(r'<pre id="result">(.*?)</pre>', finished.stdout, re.DOTALL)
    assert found and found[1], f"the browser measured nothing:\n{finished.stderr[-2000:]}"
    result: list[dict[str, Any]] = json.loads(html.unescape(found[1]))
    return result
