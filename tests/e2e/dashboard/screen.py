"""A window onto the dashboard, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["PAGES", "Held", "Screen"]

#: Every page, by what follows `#/`; names in braces are ids of the world that fill() makes.
PAGES = {
    "overview": "",
    "topics": "topics",
    "topic": "topic/orders",
    "messages": "messages?topic=orders",
    "message": "message/{original}",
    "traces": "traces?failures_only=true",
    "dead-letters": "letters",
    "dead-letter": "letter/{letter}",
    "schedules": "schedules",
    "groups": "groups",
    "stream-group": "group/audit",
    "queue-group": "queue/orders/billing",
    "publish": "publish",
    "webhooks": "webhooks",
    "mqtt": "mqtt",
    "mqtt-session": "mqtt-session/sensor-7",
    "pipelines": "pipelines",
    "health": "health",
}


#: More often than a page can be drawn while somebody measures one thing on it.
_DRAWN_ANEW_MAX = 20


class Screen:
    """A page of the browser that remembers everything that went wrong in it.  Pictures are taken into the folder."""

    def __init__(self, page: Any, url: str, folder: Path | None = None) -> None:
        self.page = page
        self.url = url
        self._folder = folder
        self._heard: list[str] = []
        self._forgiven: tuple[str, ...] = ()
        page.on("console", lambda said: said.type == "error" and self._heard.append(said.text))
        page.on("pageerror", lambda error: self._heard.append(str(error)))
        page.on("request", lambda asked: self._must_stay(asked.url))

    def _must_stay(self, url: str) -> None:
        if not url.startswith((self.url, "data:", "about:")):
            self._heard.append(f"a request left the host: {url}")

    def forgive(self, *texts: str) -> None:
        """The test itself makes for such troubles: also for one the browser speaks of only later."""
        self._forgiven += texts

    def troubles(self) -> list[str]:
        """What went wrong and should not have."""
        return [one for one in self._heard if not any(text in one for text in self._forgiven)]

    def open(self, path: str = "") -> Screen:
        """Show a page, in full: it has a heading and nothing is loading."""
        wanted = f"{self.url}/#/{path}"
        if self.page.url == wanted:
            self.page.reload()
        elif self.page.url.startswith(self.url):
            self.page.evaluate(_NAVIGATE, f"#/{path}")
        else:
            self.page.goto(wanted)
        self.page.locator("main:not([aria-busy]) h1").wait_for()
        return self

    def see(self, text: str) -> None:
        """Fails if the text does not appear."""
        self.page.locator("main").get_by_text(text).first.wait_for()

    def width(self, element: Any) -> float:
        """Of an element that is on the page; asked again if the page is drawn anew at that moment."""
        for _ in range(_DRAWN_ANEW_MAX):
            element.wait_for()
            box = element.bounding_box()
            if box is not None:
                return float(box["width"])
        raise AssertionError("it never stays on the page")

    def told(self, text: str) -> Any:
        """The note that says what was done."""
        note = self.page.locator(".toast").filter(has_text=text)
        note.wait_for()
        return note

    def press(self, name: str, *, within: Any = None) -> None:
        (within or self.page).get_by_role("button", name=name, exact=True).first.click()

    def dialog(self) -> Any:
        shown = self.page.locator("dialog[open]")
        shown.wait_for()
        return shown

    def look_again(self) -> None:
        """What happens every few seconds, at once."""
        self.page.evaluate("for (let n = 0; n < 2; n += 1) document.getElementById('live').click()")

    def picture(self, name: str, *, whole: bool = False) -> None:
        if self._folder is not None:  # somebody wants to look at them
            self.page.screenshot(path=str(self._folder / f"{name}.png"), full_page=whole)

    def flaws(self) -> list[str]:
        """What somebody with a keyboard, a screen reader or a small screen would stumble over."""
        found: list[str] = self.page.evaluate(_FLAWS)
        return found


class Held:
    """Requests that are let through only when the test says so."""

    def __init__(self, page: Any, address: str, method: str = "GET") -> None:
        self.asked: list[Any] = []
        self._page, self._method, self._open = page, method, False
        page.route(address, self._hold)

    def _hold(self, route: Any) -> None:
        if self._open or route.request.method != self._method:
            route.fallback()
        else:
            self.asked.append(route)

    def wait(self, amount: int = 1) -> None:
        """Until so many have been asked."""
        while len(self.asked) < amount:
            self._page.wait_for_timeout(5)  # lets events of the browser in

    def let_others_pass(self) -> None:
        self._open = True

    def release(self) -> None:
        self.let_others_pass()
        for route in self.asked:
            route.continue_()

    def answered(self) -> None:
        """Let them through; the page has made of the answers what it makes of them."""
        with self._page.expect_event("requestfinished", lambda asked: asked == self.asked[-1].request):
            self.release()
        self._page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


_NAVIGATE = """(hash) => new Promise((done) => {
  addEventListener("hashchange", done, { once: true });
  location.hash = hash;
})"""

_FLAWS = """() => {
  const flaws = [], all = (what) => [...document.querySelectorAll(what)];
  const named = (one) => one.labels?.length || one.getAttribute("aria-label") || one.getAttribute("aria-labelledby");
  for (const one of all("input, select, textarea")) if (!named(one)) flaws.push(`no label: ${one.outerHTML}`);
  for (const one of all("button, a[href]")) {
    if (!one.textContent.trim() && !one.getAttribute("aria-label")) flaws.push(`no name: ${one.outerHTML}`);
  }
  for (const one of all("table")) if (!one.caption?.textContent) flaws.push("a table without a caption");
  for (const one of all("th")) if (!one.textContent.trim()) flaws.push("a column without a name");
  for (const one of all("svg[role=img]")) if (!one.querySelector("title")) flaws.push("a drawing without words");
  for (const one of all("img")) if (!one.hasAttribute("alt")) flaws.push("an image without alt");
  if (all("h1").length !== 1) flaws.push(`${all("h1").length} main headings`);
  for (const name of ["header", "main", "nav"]) if (!all(name).length) flaws.push(`no ${name}`);
  const names = all("[id]").map((one) => one.id);
  if (new Set(names).size !== names.length) flaws.push("an id that is there twice");
  const wide = document.documentElement.scrollWidth - innerWidth;
  const out = (one) => one.getBoundingClientRect().right > innerWidth + 1 && !one.closest(".table");
  if (wide > 0) flaws.push(`wider than the window by ${wide}: ${all("main *").find(out)?.outerHTML.slice(0, 200)}`);
  return flaws;
}"""
