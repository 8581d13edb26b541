"""The widget in a live marimo, by `marimo run`: a plan as the last line of a cell is priced, replanned, undone and copied."""

import os
import subprocess
import sys
import urllib.request

import pytest
from browser import chromium, look
from test_jupyterlab import Widget, a_free_port, until

NOTEBOOK = """
import marimo

app = marimo.App()


@app.cell
def _():
    import jax
    import jax.numpy as jnp

    import shardplan

    def step(params, x):
        loss = lambda params: jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"]) ** 2)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    up, down, x = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((512, 2048), (2048, 512), (4096, 512)))
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    plan = shardplan.auto(mesh, cluster="h100", search="propagation")(step).plan({"up": up, "down": down}, x)
    plan
    return
"""
FIND = """const within = (root) => root.querySelector('.shardplan-instrument')
  ?? [...root.querySelectorAll('*')].map((x) => x.shadowRoot && within(x.shadowRoot)).find(Boolean);
return within(document)"""


class InMarimo(Widget):
    """The instrument in marimo's page, whose own elements have shadow roots, too."""

    @property
    def host(self):
        found = self.driver.execute_script(FIND)
        assert found is not None, "no instrument in the page"
        return found


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    """Address of a marimo that runs the notebook."""
    folder, port = tmp_path_factory.mktemp("marimo"), a_free_port()
    (folder / "notebook.py").write_text(NOTEBOOK, "utf-8")
    own = {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "XDG_STATE_HOME": str(folder), "XDG_CACHE_HOME": str(folder)}
    words = "run", "notebook.py", "--headless", "--host", "127.0.0.1", "--port", str(port)
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "marimo", *words],
            cwd=folder,
            env={**os.environ, **own},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        until(
            lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200, 60, (folder / "log").read_text
        )
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(20)


def test_a_layout_is_chosen_replanned_undone_and_copied(app):
    with chromium() as driver:
        look(driver, 1280, 1500, dark=False)
        driver.get(app)
        widget = InMarimo(driver)
        until(lambda: widget.one(".tile .value"), 120, lambda: driver.find_element("css selector", "body").text[-2000:])
        until(lambda: widget.one("input.memory"), 30)
        before = widget.text(".tile .value")
        row = next(id_ for id_, text in widget.each("tr.row", "[x.dataset.id, x.textContent]") if "params/up" in text)
        widget.click(f'tr.row[data-id="{row}"]')
        until(lambda: len(widget.all(".layouts tbody tr")) > 2, 60)
        widget.click(".layouts tbody tr:nth-child(2) input")
        widget.click("button.take")
        until(lambda: widget.one("table.history tr.own button").text == "1", 60, lambda: widget.text(".bar"))
        assert widget.text(".tile .value").startswith(widget.text("table.history tr.own td:nth-child(3)").strip())
        assert ".what_if('params/up', P(" in widget.copied("code")
        widget.click("button.undo")
        until(lambda: widget.text(".tile .value") == before, 20, lambda: widget.text(".instrument")[:500])
