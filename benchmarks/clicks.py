"""How soon the widget answers, from a message of its page to the answer's: in a Jupyter kernel of its own, as a front end sees it.

    python benchmarks/clicks.py [--only gpt2] [--clicks 40] [--think 2]

Rows are opened one after the other, the first `--think` seconds after the widget came, each as long after the one before was answered,
in an order that is drawn once: half of the clicks go to the ten largest arrays and the ten most expensive collectives, the others
anywhere. Seconds by the clock; other work on the machine is in them.

    facts       all that is known of the row but the prices of its other layouts
    processor   the same in processor seconds of the kernel, threads in the background included: what it takes on a machine of one's own
    prices      their estimates
    ready       clicks whose first answer has the estimates, in their order: "r", others "."
    scheduled   the seconds of the scheduled steps of the last row

Then a layout is taken, plans are shown in turns and compared, and what can be copied is copied. Needs "shardplan[view,test]".
"""

import argparse
import ast
import queue
import random
import statistics
import sys
import time
from pathlib import Path

import planning
from jupyter_client.manager import KernelManager

PLAN = """
import sys, time, jax
sys.path[:0] = [{benchmarks!r}, {root!r}]
jax.config.update("jax_platforms", "cpu")
import planning, shardplan
case = next(x for x in planning.CASES if x.name == {name!r})
step, state, batch = case.step()
mesh = jax.sharding.AbstractMesh(tuple(case.mesh.values()), tuple(case.mesh), axis_types=(jax.sharding.AxisType.Auto,) * len(case.mesh))
plan = shardplan.auto(mesh, cluster="h100", donate_argnums=0)(step).plan(state, batch)

from shardplan.view.explore import Explorer
handled, on_message = [], Explorer._on_message
def timed(widget, source, message, buffers):
    start = time.process_time()
    on_message(widget, source, message, buffers)
    handled.append((message["do"], time.process_time() - start))
Explorer._on_message = timed
"""
LIKELY = 10


class Page:
    """What a front end is to the widget: it sends messages, and receives its state."""

    def __init__(self, client):
        self.client, self.state, self.replies, self.comm = client, {}, [], None

    def send(self, **content) -> float:
        """The time when a message left."""
        data = {"comm_id": self.comm, "data": {"method": "custom", "content": content}}
        start = time.perf_counter()
        self.client.shell_channel.send(self.client.session.msg("comm_msg", data))
        return start

    def until(self, holds, limit_s: float = 120) -> float:
        """The time at which something holds of what was received."""
        end = time.perf_counter() + limit_s
        while not holds():
            if (left := end - time.perf_counter()) <= 0:
                raise TimeoutError(f"not within {limit_s} s")
            self.receive(min(left, 1.0))
        return time.perf_counter()

    def receive(self, seconds: float) -> None:
        """Takes one message, if one comes."""
        try:
            message = self.client.get_iopub_msg(timeout=seconds)
        except queue.Empty:
            return
        content = message["content"]
        if message["header"]["msg_type"] == "comm_open" and "_esm" in content["data"].get("state", {}):
            self.comm, self.state = content["comm_id"], content["data"]["state"]
        elif message["header"]["msg_type"] == "comm_msg" and content["comm_id"] == self.comm:
            if content["data"]["method"] == "update":
                self.state |= content["data"]["state"]
            elif content["data"]["method"] == "custom":
                self.replies.append(content["data"]["content"])

    def wait(self, seconds: float) -> None:
        """Receives for so long."""
        end = time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            self.receive(left)

    def reply(self, **content) -> float:
        """Seconds until the widget replies to a message."""
        known, start = len(self.replies), self.send(**content)
        return self.until(lambda: len(self.replies) > known) - start

    def shown(self, n: int) -> float:
        """Seconds until another entry of the history is shown."""
        start = self.send(do="show", n=n)
        return self.until(lambda: self.state["current"] == n) - start

    def answer(self, row: str) -> dict:
        """What the widget has answered of a row."""
        return self.state["answers"].get(row) or {}

    def click(self, row: str) -> tuple[float, float, bool]:
        """(seconds until the first answer, until the first with prices, whether that is the same)."""
        if row in self.state["answers"]:
            raise ValueError(f"{row} was opened before")
        start = self.send(do="ask", id=row)
        facts = self.until(lambda: self.answer(row))
        ready = not self.answer(row).get("pending")
        return facts - start, self.until(lambda: not self.answer(row).get("pending")) - start, ready


def drawn(data: dict, n: int) -> list[str]:
    """Rows that are opened."""
    draw = random.Random(0)
    rows = [*data["arrays"], *data["collectives"]]
    arrays, collectives = (sorted(data[k], key=lambda x: -x[of]) for k, of in (("arrays", "bytes"), ("collectives", "seconds")))
    likely = [x["id"] for x in (*arrays[:LIKELY], *collectives[:LIKELY])]
    others = [x["id"] for x in rows if x["id"] not in likely]
    found = draw.sample(likely, min(n // 2, len(likely)))
    found += draw.sample(others, min(n - len(found), len(others)))
    draw.shuffle(found)
    return found


def measured(page: Page, clicks: int, think_s: float) -> dict:
    """Seconds of everything."""
    page.until(lambda: page.comm)
    page.reply(do="hello")
    rows, seconds = drawn(page.state["data"], clicks), []
    for row in rows:
        page.wait(think_s)
        seconds.append(page.click(row))
    facts, prices, ready = zip(*seconds, strict=True)
    last, start = rows[-1], time.perf_counter()
    page.until(lambda: not page.answer(last)["estimated"])
    scheduled = time.perf_counter() - start
    row, choice = next((row, x["text"]) for row in rows for x in page.answer(row).get("choices", ()) if x["fits"])
    taking = page.send(do="take", id=row, choice=choice)
    rest = {"take, begun": page.until(lambda: page.state["work"]) - taking}
    rest["take, shown"] = page.until(lambda: page.state["current"] == 1 and not page.state["work"]) - taking
    rest["show"] = max(page.shown(n) for n in (0, 1, 0))
    rest |= {f"copy {what}": page.reply(do="copy", what=what) for what in ("pins", "code")}
    copying, known = page.send(do="copy", what="json"), len(page.replies)
    page.wait(0.1)
    comparing = page.send(do="compare", a=0, b=1)
    rest["compare, while JSON is copied"] = page.until(lambda: any("title" in x for x in page.replies[known:])) - comparing
    rest["copy JSON"] = page.until(lambda: any(x.get("copied") == "json" for x in page.replies[known:])) - copying
    return {"facts": facts, "prices": prices, "ready": ready, "scheduled": scheduled, "rest": rest}


def figures(seconds) -> str:
    """Median and most, in ms."""
    some = sorted(seconds)
    most = f"nine in ten within {1e3 * some[int(0.9 * (len(some) - 1))]:.0f} ms, {1e3 * some[-1]:.0f} ms at most"
    return f"{1e3 * statistics.median(some):.0f} ms median, {most}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="gpt2", choices=[case.name for case in planning.CASES], help="a case of planning.py")
    parser.add_argument("--clicks", type=int, default=40, help="rows that are opened")
    parser.add_argument("--think", type=float, default=2.0, help="seconds between an answer and the next click")
    options = parser.parse_args(argv)
    here = Path(__file__).parent
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel()
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        page = Page(client)
        code = PLAN.format(benchmarks=str(here), root=str(here.parent), name=options.only)
        reply = client.execute_interactive(code, timeout=900, output_hook=lambda _: None)
        if reply["content"]["status"] != "ok":
            print("\n".join(reply["content"]["traceback"]))
            return 1
        client.execute("widget = plan.explore()")
        found = measured(page, options.clicks, options.think)
        handled = client.execute_interactive("", user_expressions={"handled": "handled"}, timeout=60)["content"]["user_expressions"]
        found["handled"] = ast.literal_eval(handled["handled"]["data"]["text/plain"])
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    print(f"{options.only}, {len(found['facts'])} rows opened, {options.think:g} s apart")
    for name in ("facts", "prices"):
        print(f"  {name:<10}{figures(found[name])}")
    print(f"  {'processor':<10}{figures(seconds for what, seconds in found['handled'] if what == 'ask')}")
    print(f"  others    {', '.join(f'{what} {1e3 * seconds:.0f}' for what, seconds in found['handled'] if what != 'ask')} processor ms")
    print(f"  {'ready':<10}{sum(found['ready'])} of {len(found['ready'])}: {''.join('.r'[x] for x in found['ready'])}")
    print(f"  scheduled {found['scheduled']:.1f} s after the last click")
    for name, seconds in found["rest"].items():
        print(f"  {name}: {1e3 * seconds:.0f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
