"""`Plan.explore`: the instrument as an anywidget; prices, schedules and plans in threads, so that the kernel stays free.

A row that is opened shows at once what is known without prices, then estimates of its other layouts, then the seconds of their
scheduled steps. While no row is being estimated and nothing planned, answers for rows that nobody has opened are found ahead, for a
page that has this kernel.

The state is in traits: a saved notebook shows it without a kernel. Messages from the page are those of `_DO`.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardplan.errors import ShardingError
from shardplan.plan import Plan
from shardplan.plan.baselines import known_saving
from shardplan.view.html import to_html
from shardplan.view.instrument import module, style
from shardplan.view.pieces import Pieces, giving_way
from shardplan.view.progress import Cancelled, State, watched
from shardplan.view.session import Curve, Entry, pickers
from shardplan.view.values import rounded

if TYPE_CHECKING or importlib.util.find_spec("anywidget"):
    from anywidget import AnyWidget
    from traitlets import Dict, Int, List, Unicode
else:
    AnyWidget = None

SHOW_EVERY_S = 0.05
"""While a row is estimated, what was found so far is shown so often."""


def explore(plan: Plan) -> Any:
    """The widget of a plan."""
    if AnyWidget is None:
        raise ShardingError('explore() needs anywidget.\n  ways out: pip install "shardplan[view]", or plan.html() for a page')
    return Explorer(plan)


def mimebundle(plan: Plan) -> dict[str, Any]:
    """What a notebook shows of a plan: the widget where there is a kernel for it, and HTML where no widget can be shown.

    The HTML of a large plan that comes with a widget states what it saves only if that is known: to plan what it is compared with
    takes seconds.
    """
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    has_widget = AnyWidget is not None and hasattr(shell, "kernel")
    saving = known_saving(plan) if has_widget and not plan.answers_quickly else None
    found = {"text/plain": repr(plan), "text/html": to_html(plan, page=False, saving=saving)}
    shown = Explorer(plan)._repr_mimebundle_() if has_widget else {}
    return {**(shown[0] if isinstance(shown, tuple) else shown or {}), **found}


def displayed(plan: Plan) -> Any:
    """What marimo shows of a plan: the widget, or HTML without anywidget."""
    return _Report(to_html(plan, page=False)) if AnyWidget is None else Explorer(plan)


def _prepared(plan: Plan) -> Iterator[object]:
    """Finds what all estimates need while the widget is being displayed."""
    yield from plan.context.prices.preparing()
    yield gc.collect()  # with a large plan Python stands still for half a second: now rather than at some click


def _collected(entry: Entry) -> Entry:
    """A plan that was waited for, and Python's garbage collection that it makes due."""
    gc.collect()
    return entry


class _Report(str):
    """HTML that notebooks show as such."""

    def _repr_html_(self) -> str:
        return str(self)


if AnyWidget is not None:

    class Explorer(AnyWidget):
        """A plan, and what-ifs about it; `plan` is the one that is shown."""

        _esm = module()
        css = Unicode(style()).tag(sync=True)
        data = Dict().tag(sync=True)
        answers = Dict().tag(sync=True)
        history = List().tag(sync=True)
        current = Int(0).tag(sync=True)
        work = Dict(allow_none=True, default_value=None).tag(sync=True)
        pareto = List().tag(sync=True)
        pickers = Dict().tag(sync=True)
        message = Unicode("").tag(sync=True)

        def __init__(self, plan: Plan):
            self._pricing, self._scheduling, self._writing = (Pieces(name) for name in ("price", "schedule", "write"))
            self._planning = ThreadPoolExecutor(1, thread_name_prefix="shardplan-plan")
            self._entries, self._live = [Entry(plan, "as planned")], False
            self._curves: dict[Hashable, Curve] = {}
            self._lock, self._cancelled, self._idle = threading.Lock(), threading.Event(), threading.Event()
            self._idle.set()
            first = self._entries[0]
            super().__init__(data=first.instrument.data(), history=[rounded(first.row())])
            self._has_program = plan.context is not None
            self._offer(first)
            self.on_msg(self._on_message)
            if first.solved:
                next(first.answers.ahead(), None)  # finds what all answers need, now rather than at the first click
                self._pricing.begin(_prepared(plan))

        @property
        def plan(self) -> Plan:
            """The plan that is shown."""
            return self._entries[self.current].plan

        # ---- messages

        def _on_message(self, _, message: Any, __) -> None:
            act = _DO.get(str(message.get("do"))) if isinstance(message, dict) else None
            if act is not None:
                if message["do"] not in ("hello", "ask"):  # what went wrong before this is no longer of interest
                    self.message = ""
                try:
                    act(self, message)
                except (KeyError, IndexError, TypeError, ValueError) as error:
                    self.message = f"{type(error).__name__}: {error}"

        def _hello(self, _) -> None:
            self.send({"hello": self._has_program})
            if self._has_program and not self._live:
                self._live = True
                self._look_ahead()

        def _look_ahead(self) -> None:
            """Finds answers about the plan that is shown in the background."""
            entry = self._entries[self.current]
            if self._live and entry.solved:
                self._pricing.spare(self._ahead(entry))

        def _ahead(self, entry: Entry) -> Iterator[None]:
            return itertools.takewhile(lambda _: not self.work, entry.answers.ahead())

        def _ask(self, message) -> None:
            id_ = str(message["id"])
            entry = self._entries[self.current]
            if not self._has_program or id_ not in entry.instrument.targets:
                return
            if not entry.solved:
                n = self.current
                self._start("planning the step again, which prices what it could be instead", lambda: self._solve(n, id_))
                return
            entry.answers.open(id_)
            self._tell(entry)
            self._pricing.begin(self._estimate(entry, id_))

        def _solve(self, n: int, id_: str) -> None:
            """Solves a plan that was taken over from a file or the cache, and answers then what was asked of it."""
            found = _collected(self._entries[n].solved_again(n))
            if found.parent == n:
                self._add(found)
                self.message = "the step is planned otherwise now than the plan that was taken over"
            else:
                self._entries[n] = found
                self._show(n)
            self._ask({"id": id_})

        def _estimate(self, entry: Entry, id_: str) -> Iterator[None]:
            shown = time.monotonic()
            for _ in entry.answers.answering(id_, estimate=True):
                if time.monotonic() - shown > SHOW_EVERY_S and entry.answers.shows_more(id_):
                    self._tell(entry)
                    shown = time.monotonic()
                yield
            self._tell(entry)
            self._scheduling.begin(self._schedule(entry, id_))

        def _schedule(self, entry: Entry, id_: str) -> Iterator[None]:
            for _ in entry.answers.answering(id_):
                self._idle.wait()  # a plan is waited for more than this
                yield
            self._tell(entry)

        def _tell(self, entry: Entry) -> None:
            with self._lock:
                if entry.plan is self.plan:  # which may have another name by now
                    self.answers = entry.answers.shown

        def _take(self, message) -> None:
            n, id_, choice = self.current, str(message["id"]), str(message["choice"])
            entry = self._entries[n]
            self._start(f"taking {choice}", lambda: self._add(entry.taken(n, id_, choice)))

        def _anew(self, _) -> None:
            n, entry = self.current, self._entries[self.current]
            self._start_anew("planning the step anew", entry, lambda: entry.anew(n))

        def _memory(self, message) -> None:
            limit = float(f"{float(message['bytes']):.4g}")
            n, entry = self.current, self._entries[self.current]
            self._start_anew("planning for this memory", entry, lambda: entry.retargeted(n, memory=limit))

        def _target(self, message) -> None:
            mesh = {name.strip(): int(size) for name, _, size in (x.partition("=") for x in str(message["mesh"]).split(","))}
            n, cluster, first = self.current, str(message["cluster"]), self._entries[0]
            base = self._entries[n]
            if cluster == first.plan.cluster != self.plan.cluster:  # may be one that only the first plan knows, not a preset
                n, base = 0, replace(first, pins=base.pins)
            target: dict[str, Any] = {} if dict(base.plan.mesh) == mesh else {"mesh": mesh}
            if cluster != base.plan.cluster:
                target["cluster"] = cluster
            if not target and not base.pins:
                self._show(n)
            else:
                self._start_anew("planning for this mesh", base, lambda: base.retargeted(n, **target))

        def _curve(self, _) -> None:
            n = self.current
            self._start("seconds against memory", lambda: self._find_curve(n))

        def _find_curve(self, n: int) -> None:
            curve = self._curves.setdefault(self._entries[n].target, Curve(n, self._entries[n]))
            self._offer(self._entries[self.current])
            for point in curve.continued():
                point.instrument.data()  # is drawn here, not when it is clicked
                self._offer(self._entries[self.current])
            self._offer(self._entries[self.current])
            self.message = self._entries[n].loss

        def _point(self, message) -> None:
            found = self._curves[self._entries[self.current].target].entries[int(message["n"])]
            known = next((n for n, x in enumerate(self._entries) if x.plan is found.plan), None)
            if known is None:
                self._put(found)
            else:
                self._show(known)

        def _undo(self, _) -> None:
            parent = self._entries[self.current].parent
            if parent is not None:
                self._show(parent)

        def _show_entry(self, message) -> None:
            self._show(int(message["n"]))

        def _name(self, message) -> None:
            n = int(message["n"])
            self._entries[n] = self._entries[n].renamed(str(message["name"])[:80])
            self.history = [rounded(x.row()) for x in self._entries]

        def _compare(self, message) -> None:
            a, b = (self._entries[int(message[name])] for name in ("a", "b"))
            self.send({"title": f"{a.name} → {b.name}", "text": str(a.plan.diff(b.plan))})

        def _copy(self, message) -> None:
            entry, what = self._entries[self.current], message["what"]
            if what == "json":
                self._writing.begin(self._write(entry))
            else:
                self.send({"copied": what, "text": {"pins": entry.pins_code, "code": entry.code}[what]})

        def _write(self, entry: Entry) -> Iterator[None]:
            """Sends the text of a plan's file, which takes seconds of a large one."""
            yield self.send({"copied": "json", "text": entry.plan.dumps()})

        def _cancel(self, _) -> None:
            self._cancelled.set()
            self.work = {**(self.work or {}), "state": "cancelling …"}

        # ---- planning in the background

        def _start(self, what: str, act: Callable[[], None]) -> None:
            if self.work:
                return
            self._cancelled.clear()
            self._idle.clear()
            self.message, self.work = "", {"what": what, "state": ""}
            self._planning.submit(self._work, what, act)

        def _start_anew(self, what: str, base: Entry, made: Callable[[], Entry]) -> None:
            """Starts to plan anew from an entry, and says then which of its choices are lost."""

            def act() -> None:
                self._add(_collected(made()))
                self.message = base.loss

            self._start(what, act)

        def _work(self, what: str, act: Callable[[], None]) -> None:
            try:
                with giving_way, watched(lambda state: self._watch(what, state)):
                    act()
            except Cancelled:
                self.message = "cancelled"
            except Exception as error:
                self.message = str(error)
            finally:
                self._idle.set()
                self.work = None
                self._look_ahead()

        def _watch(self, what: str, state: State) -> None:
            if self._cancelled.is_set():
                raise Cancelled
            text = f"{state.seconds:.0f} s, {state.found} so far"
            if self.work and self.work.get("state") != text:
                self.work = {"what": what, "state": text}

        def _add(self, entry: Entry) -> None:
            if self._cancelled.is_set():
                raise Cancelled
            self._put(entry)

        def _put(self, entry: Entry) -> None:
            entry.instrument.data()  # is made here, not under the lock
            self._entries.append(entry)
            with self.hold_sync():
                self._show(len(self._entries) - 1)
                self.history = [rounded(x.row()) for x in self._entries]

        def _show(self, n: int) -> None:
            entry = self._entries[n]
            with self._lock, self.hold_sync():
                self.current = n
                self.answers = entry.answers.shown
                self._offer(entry)
                self.data = entry.instrument.data()
            self._look_ahead()

        def close(self) -> None:
            """Ends the widget, and what goes on in the background for it."""
            self._live = False
            self._cancelled.set()
            for each in (self._pricing, self._scheduling, self._writing):
                each.end()
            super().close()

        def _offer(self, entry: Entry) -> None:
            """What else can be chosen for the entry that is shown: its curve, and other targets."""
            curve = self._curves.get(entry.target)
            self.pareto = [rounded(x.point()) for x in curve.entries] if curve else []
            if self._has_program:
                self.pickers = {**rounded(pickers(self._entries, entry)), "more": curve is None or curve.more}

    _DO: dict[str, Callable[[Any, Any], None]] = {
        "hello": Explorer._hello, "ask": Explorer._ask, "take": Explorer._take, "anew": Explorer._anew, "undo": Explorer._undo,
        "show": Explorer._show_entry, "name": Explorer._name, "compare": Explorer._compare, "copy": Explorer._copy,
        "memory": Explorer._memory, "target": Explorer._target, "pareto": Explorer._curve, "point": Explorer._point,
        "cancel": Explorer._cancel,
    }  # fmt: skip
