"""Pages as parts, so that only changed parts are sent to a browser again.

Rule: a part contains times, never ages, or it would change every second; the browser turns the
times into ages. A browser without JavaScript shows the times.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from elastic.coord.web.html import Html, element, joined

BYTES_PER_S = 64_000
"""Rate limit of one page's changes; those over it are sent later."""


NOTHING = Html("")


@dataclass(frozen=True)
class Part:
    """An element of a page that may change.

    Attributes:
        key: its id.
        html: the whole element with that id; unused for a list.
        items: of a list, its elements by id; None if it is not a list.
        tag: of a list's own element.
        css: class of a list's own element.
    """

    key: str
    html: Html = NOTHING
    items: Mapping[str, Html] | None = None
    tag: str = "div"
    css: str | None = None

    def whole(self) -> Html:
        if self.items is None:
            return self.html
        return element(self.tag, *self.items.values(), id=self.key, class_=self.css)


@dataclass(frozen=True)
class Page:
    """A page: its markup, and which parts of it may change.

    Attributes:
        title: in plain text.
        body: markup and parts, in order.
        charts: path of the series that it draws, "" for none.
        log: path of the output that it shows, "" for none.
    """

    title: str
    body: Sequence[Html | Part]
    charts: str = ""
    log: str = ""

    def parts(self) -> list[Part]:
        """Return the parts that may change."""
        return [piece for piece in self.body if isinstance(piece, Part)]

    def html(self) -> Html:
        return joined(*(p.whole() if isinstance(p, Part) else p for p in self.body))


@dataclass
class Changes:
    """The changes that one browser has not received yet.

    Attributes:
        budget: bytes that may be sent now; negative after exceeding it.
    """

    budget: float = BYTES_PER_S
    _sent: dict[str, Html] = field(default_factory=dict)
    _order: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def earn(self, seconds: float) -> None:
        """Refill the budget for the time passed."""
        self.budget = min(BYTES_PER_S, self.budget + seconds * BYTES_PER_S)

    def take(self, parts: Sequence[Part]) -> Iterator[str]:
        """Yield messages for changed parts, while the budget lasts."""
        for key, order, item in _pieces(parts):
            if self.budget <= 0:
                return
            if order is not None:
                if self._order.get(key) == order:
                    continue
                gone = set(self._order.get(key, ())) - set(order)
                self._order[key] = order
                for item_key in gone:
                    self._sent.pop(item_key, None)
                message = json.dumps({"list": key, "items": order})
            elif self._sent.get(key) == item:
                continue
            else:
                self._sent[key] = item
                message = json.dumps({"set": key, "html": item})
            self.budget -= len(message)
            yield message


def _pieces(parts: Sequence[Part]) -> Iterator[tuple[str, tuple[str, ...] | None, Html]]:
    for part in parts:
        if part.items is None:
            yield part.key, None, part.html
            continue
        yield part.key, tuple(part.items), Html("")
        for key, item in part.items.items():
            yield key, None, item


def table(part: Part, *heads: str, label: str) -> list[Html | Part]:
    """Return a table whose rows are the items of `part`, in a box that scrolls by itself."""
    head = element("thead", element("tr", *(element("th", text, scope="col") for text in heads)))
    opening = f'<div class="wide" tabindex="0" role="region" aria-label="{label}"><table>{head}'
    return [Html(opening), part, Html("</table></div>")]


def row(key: str, *cells: object, css: str | None = None) -> Html:
    return element("tr", *(element("td", cell) for cell in cells), id=key, class_=css)


def moment(unix_ns: int) -> Html:
    """Return a time, which the browser turns into an age."""
    if not unix_ns:
        return Html("–")
    seconds = unix_ns / 1e9
    at = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    text = at.strftime("%Y-%m-%d %H:%M:%S UTC")
    return element("time", text, datetime=at.isoformat(timespec="milliseconds"), class_="age")


def pill(state: str) -> Html:
    """Return a state as a coloured label with its name."""
    return element("span", state, class_=f"pill s-{state}")


def number(value: float | None, digits: int = 4) -> str:
    """Return a number with so many significant digits, a dash for None."""
    return "–" if value is None else f"{value:.{digits}g}"
