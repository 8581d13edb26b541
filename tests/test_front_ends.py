"""The widget under the widget managers of VS Code and Colab, as their makers publish them, without the products around them.

`make sweeps` installs VS Code's from npm. Colab's is on no registry: `docs/explore.md` says how it is built, SHARDPLAN_COLAB_MANAGER
is the path of what was built.
"""

import functools
import json
import os
import queue
import re
import shutil
import sys
import threading
import time
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import comm
import jax
import pytest
from browser import chromium, look
from comm.base_comm import BaseComm
from test_explore import arguments, train_step

import shardplan

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("first_plan")]

ROOT = Path(__file__).parent.parent
NBEXTENSIONS = Path(sys.prefix) / "share" / "jupyter" / "nbextensions"
INSTALLED = Path(sys.prefix) / "front_ends"
VIEW = "application/vnd.jupyter.widget-view+json"
PAGE = '<!doctype html><meta charset="utf-8"><body><div id="cell"></div>{scripts}'


class PageComm(BaseComm):
    """The kernel's end of a channel; what it publishes waits for the page."""

    waiting: queue.SimpleQueue = queue.SimpleQueue()

    def publish_msg(self, msg_type, data=None, metadata=None, buffers=None, **keys):
        assert not buffers, "the widget's state is JSON"
        self.waiting.put((msg_type, self.comm_id, {"data": data, **keys}, metadata or {}))


@pytest.fixture(params=["vscode", "colab"])
def front_end(request, tmp_path):
    """Name and folder of a page with the manager, the script of its host, and anywidget's own front end."""
    manager = {"vscode": INSTALLED / "ipywidgets.js", "colab": os.environ.get("SHARDPLAN_COLAB_MANAGER")}[request.param]
    if request.param == "colab" and not manager:
        pytest.skip("Colab's manager is on no registry: SHARDPLAN_COLAB_MANAGER is the path of one that was built")
    if request.param == "vscode" and not (INSTALLED / "ready").exists():
        pytest.skip("npm did not bring VS Code's manager: `make .venv/front_ends/ready` says why")
    for path in (Path(manager), Path(__file__).parent / "data" / "front_ends" / f"{request.param}.js"):
        assert path.exists(), f"{path} is not there: `make sweeps` installs it"
        shutil.copy(path, tmp_path)
    (tmp_path / "nbextensions").symlink_to(NBEXTENSIONS)
    scripts = f'<script type="module" src="{request.param}.js"></script>'
    if request.param == "vscode":
        shutil.copy(INSTALLED / "require.js", tmp_path)
        scripts = '<script src="require.js"></script>' + scripts
    (tmp_path / "index.html").write_text(PAGE.format(scripts=scripts), "utf-8")
    return tmp_path


@contextmanager
def served(folder):
    """Address of a folder."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/index.html"
    finally:
        server.shutdown()
        server.server_close()


class Page:
    """The front end in a browser; messages of the protocol go between it and widgets of this process."""

    def __init__(self, driver):
        self.driver, self.comms = driver, {}
        self.until("return !!window.start")

    def carry(self):
        while not PageComm.waiting.empty():
            self.driver.execute_script("hear(...arguments)", *PageComm.waiting.get())
        for message in self.driver.execute_script("return sent.splice(0)"):
            content = {"content": {"data": message["data"]}, "buffers": []}
            comm.get_comm_manager().get_comm(message["comm"]).handle_msg(content)

    def act(self, script):
        return self.driver.execute_script(f"const root = document.querySelector('.shardplan-instrument')?.shadowRoot; {script}")

    def until(self, script, seconds=30):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.carry() if self.driver.execute_script("return !!window.sent") else None
            if found := self.act(f"try {{ {script} }} catch {{ return null }}"):
                return found
            time.sleep(0.05)
        raise AssertionError(
            f"never: {script}\n{self.driver.get_log('browser')[-5:]}\n{self.act('return root?.textContent.slice(0, 500)')}"
        )


@pytest.fixture
def page(front_end):
    with served(front_end) as address, chromium() as driver:
        look(driver, 1280, 1500, dark=False)
        driver.get(address)
        yield Page(driver)


@pytest.fixture
def widget(monkeypatch):
    """The widget of a plan, in a kernel that the page is the front end of."""
    monkeypatch.setattr(comm, "create_comm", PageComm)
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    plan = shardplan.auto(mesh, cluster="h100", donate_argnums=0)(train_step).plan(*arguments())
    widget = plan.explore()
    yield widget
    widget.close()
    PageComm.waiting = queue.SimpleQueue()


def severe(driver):
    return [x for x in driver.get_log("browser") if x["level"] == "SEVERE" and not re.search("font-awesome|favicon", x["message"])]


def test_a_layout_is_priced_taken_undone_and_copied_and_another_mesh_planned(page, widget):
    page.driver.execute_script("start()")
    page.carry()
    page.driver.execute_script("show(arguments[0])", widget.model_id)
    before = page.until("return root.querySelector('input.memory') && root.querySelector('.tile .value').textContent")
    page.act("[...root.querySelectorAll('tr.row')].find(x => x.textContent.includes('layers/*/up')).click()")
    page.until("return root.querySelectorAll('.layouts tbody tr').length > 2")
    page.act("root.querySelectorAll('.layouts input[type=radio]')[1].click()")
    page.act("root.querySelector('button.take').click()")
    page.until("return root.querySelector('table.history tr.own button').textContent === '1'")
    assert page.act("return root.querySelector('.tile .value').textContent") != before and widget.current == 1
    page.act("root.querySelector('button.copy.code').click()")
    code = page.until("return root.querySelector('textarea.copied').value")
    assert "what_if(" in code
    page.act("root.querySelector('button.undo').click()")
    page.until(f"return root.querySelector('.tile .value').textContent === {json.dumps(before)}")
    page.act("const s = root.querySelector('select.mesh'); s.value = 'data=8'; s.dispatchEvent(new Event('change'))")
    page.act("root.querySelector('button.retarget').click()")
    page.until("return root.querySelector('h1').textContent.includes('data=8')")
    assert dict(widget.plan.mesh) == {"data": 8} and severe(page.driver) == []


def test_a_saved_notebook_shows_it_without_a_kernel(page):
    notebook = json.loads((ROOT / "notebooks" / "explore.ipynb").read_text("utf-8"))
    saved = notebook["metadata"]["widgets"]
    shown = (o["data"].get(VIEW) for c in notebook["cells"] for o in c.get("outputs", ()) if "data" in o)
    id_ = next(x for x in shown if x)["model_id"]
    page.driver.execute_script("restore(arguments[0], arguments[1])", saved, id_)
    assert re.fullmatch(r"[\d.]+ [µm]s", page.until("return root.querySelector('.tile .value').textContent"))
    page.act("root.querySelector('tr.row').click()")
    assert "each device holds" in page.act("return root.textContent")
    assert severe(page.driver) == []
