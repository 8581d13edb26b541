"""Answers of `Plan.why` about the rows of an instrument: found in small pieces of work, in parts, and kept as long as the plan.

    facts       all that is known of a row without the prices of its other layouts: milliseconds
    estimates   of those prices: a tenth of a second in a step of 10,000 ops
    scheduled   the seconds of the scheduled steps: seconds

Only rows that somebody opened are `shown`; others are found ahead, so that they are there when they are opened.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardplan.plan import Plan
from shardplan.plan.why import Why, answered, growing
from shardplan.view.instrument import Instrument, What
from shardplan.view.values import answer_values

Found = dict[str, dict[str, Any]]
"""Id of a row -> its answer as JSON values."""


@dataclass(frozen=True)
class Known:
    """What was found of a plan, whoever looks at it.

    Attributes:
        asked: answers that were asked for, with prices; pages show them, too.
        estimates: of rows that nobody asked for yet.
        facts: of rows without their prices.
    """

    asked: Found = field(default_factory=dict)
    estimates: Found = field(default_factory=dict)
    facts: Found = field(default_factory=dict)


def known(plan: Plan) -> Known:
    """What was found of a plan; kept with the plan's own cached values."""
    return vars(plan).setdefault("_known", Known())


class Answers:
    """The answers about one plan's rows, and which of them are shown.

    Attributes:
        opened: facts of the rows that were opened here.
    """

    def __init__(self, plan: Plan, instrument: Instrument):
        self._plan, self._instrument, self._known = plan, instrument, known(plan)
        self.opened: Found = {}
        self._last = ""
        self._begun: dict[str, Iterator[None]] = {}
        self._partial: dict[str, Why] = {}

    @property
    def asked(self) -> Found:
        """The answers with prices that were asked for."""
        return self._known.asked

    @property
    def shown(self) -> Found:
        """All that is known of the rows that were opened."""
        return {**self.opened, **self.asked}

    def answer(self, id_: str, estimate: bool = False) -> dict[str, Any]:
        """What the row's other layouts would cost, and why it lies so; an estimate is kept until more is asked for."""
        for _ in self.answering(id_, estimate):
            pass
        return self.asked[id_]

    def answering(self, id_: str, estimate: bool = False) -> Iterator[None]:
        """The same in small pieces of work."""
        found = self.asked.get(id_)
        if found is None and estimate:
            yield from self._estimating(id_)
            self.asked.setdefault(id_, self._known.estimates[id_])
        elif found is None or (found.get("estimated") and not estimate):
            yield from self._finding(id_, self.asked, estimate)

    def open(self, id_: str) -> None:
        """Shows what can be said of a row at once: its answer if it is known, else all but the prices of its other layouts."""
        self._last = id_
        if id_ not in self.asked and id_ in self._known.estimates:
            self.asked[id_] = self._known.estimates[id_]
        elif id_ not in self.asked:
            self._find_facts(id_)
            self.opened[id_] = self._known.facts[id_]

    def on_page(self) -> Found:
        """Of all rows what was asked for, here or by `Plan.why`, else what is known without prices."""
        found = {}
        for id_, what in self._instrument.targets.items():
            if (why := answered(self._plan).get(what)) is not None:
                self.asked[id_] = answer_values(why)
            if id_ not in self.asked:
                self._find_facts(id_)
            found[id_] = self.asked.get(id_) or self._known.facts[id_]
        return found

    def shows_more(self, id_: str) -> bool:
        """Shows the estimates of an opened row that came since it was last asked; whether there are any."""
        if (found := self._partial.pop(id_, None)) is None:
            return False
        self.opened[id_] = answer_values(found)
        return True

    def ahead(self) -> Iterator[None]:
        """Finds answers before rows are opened, in small pieces of work: all facts, then estimates.

        Rows of the line of the row that was opened last come first, then those that weigh most.
        """
        rows = self._by_weight()
        for n, id_ in enumerate(rows):
            if id_ not in self._known.facts:
                self._find_facts(id_)
                yield
            if n == 0:
                for _ in self._plan.context.prices.preparing():
                    yield
        left = dict.fromkeys(rows)
        lines = {row["id"]: row.get("line") for row in (*self._instrument.arrays, *self._instrument.collectives)}
        while left:
            line = lines.get(self._last)
            near = (id_ for id_ in left if line and lines[id_] == line)
            id_ = next(near, next(iter(left)))
            del left[id_]
            if id_ not in self.asked:
                yield from self._estimating(id_)

    def _by_weight(self) -> list[str]:
        """The largest arrays and the costliest collectives in turns."""
        arrays = sorted(self._instrument.arrays, key=lambda x: -x["bytes"])
        moves = sorted(self._instrument.collectives, key=lambda x: -x["seconds"])
        rows = itertools.chain.from_iterable(itertools.zip_longest(arrays, moves))
        return [row["id"] for row in rows if row and row["id"] in self._instrument.targets]

    def _find_facts(self, id_: str) -> None:
        if id_ not in self._known.facts:
            for _ in self._finding(id_, self._known.facts, pieces=1):
                pass

    def _estimating(self, id_: str) -> Iterator[None]:
        """Pieces of work until a row is estimated, those that were done before left out."""
        if id_ not in self._known.estimates:
            for _ in self._begun.setdefault(id_, self._finding(id_, self._known.estimates)):  # stays open when this is closed
                yield
            self._begun.pop(id_, None)
            self._partial.pop(id_, None)

    def _finding(self, id_: str, found: Found, estimate: bool = True, pieces: int | None = None) -> Iterator[None]:
        """Pieces of work until `found` has the answer for a row; after one piece that is what is known without prices."""
        what, why = argument(self._instrument.targets[id_]), None
        try:
            for why in itertools.islice(growing(self._plan, what, estimate, lambda: id_ in self.opened), pieces):
                if why.choices and why.pending:
                    self._partial[id_] = why
                yield
            assert why is not None
            found[id_] = answer_values(why)
        except Exception as error:
            found[id_] = {"error": str(error)}


def argument(what: What) -> str | Sequence[str]:
    """What `Plan.why` takes for a row."""
    return what if isinstance(what, str) else list(what)
