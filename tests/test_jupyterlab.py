"""The widget in a live JupyterLab: layouts, meshes, clusters and memories are priced, taken, undone; copied code gives that plan."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from browser import assert_looks_as_stored, chromium, look
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "explore.ipynb"


def a_free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Address of a JupyterLab that has the notebook: its first cells, and one that names the widget for the test."""
    folder, own = (tmp_path_factory.mktemp(name) for name in ("lab", "jupyter"))
    quiet = own / "s" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    quiet.parent.mkdir(parents=True)
    quiet.write_text('{"fetchNews": "false", "checkForUpdates": false}')
    notebook = json.loads(NOTEBOOK.read_text("utf-8"))
    last = next(n for n, cell in enumerate(notebook["cells"]) if "".join(cell["source"]).endswith("\nplan"))
    notebook["cells"] = notebook["cells"][: last + 1]
    source = "".join(notebook["cells"][last]["source"])
    notebook["cells"][last]["source"] = source[: source.rindex("plan")] + "widget = plan.explore()\nwidget"
    notebook["cells"].append({"cell_type": "code", "id": "empty", "metadata": {}, "source": []})
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
    notebook["metadata"].pop("widgets", None)
    (folder / "explore.ipynb").write_text(json.dumps(notebook), "utf-8")
    port = a_free_port()
    settings = {
        "--ServerApp.ip": "127.0.0.1", "--ServerApp.port": port, "--ServerApp.root_dir": folder, "--IdentityProvider.token": "",
        "--ServerApp.password": "", "--ServerApp.open_browser": False,
        "--ServerApp.disable_check_xsrf": True, "--LabApp.expose_app_in_browser": True,
    }  # fmt: skip
    root = ["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    environment = {**os.environ, "JUPYTER_CONFIG_DIR": str(own / "c"), "JUPYTER_DATA_DIR": str(own / "d"), "IPYTHONDIR": str(own / "i")}
    environment["JUPYTERLAB_SETTINGS_DIR"], environment["JUPYTERLAB_WORKSPACES_DIR"] = str(own / "s"), str(own / "w")
    arguments = [f"{name}={value}" for name, value in settings.items()]
    with (own / "log").open("w") as log:
        server = subprocess.Popen([sys.executable, "-m", "jupyterlab", *root, *arguments], env=environment, stdout=log, stderr=log)
    try:
        until(lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/api", timeout=5).status == 200, 60, (own / "log").read_text)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(20)
        shutil.rmtree(folder, ignore_errors=True)


def until(holds, seconds: float, what=lambda: ""):
    """The first true value of `holds()`, which may raise until then."""
    end, error = time.monotonic() + seconds, None
    while time.monotonic() < end:
        try:
            if value := holds():
                return value
        except Exception as e:
            error = e
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds:.0f} s: {error or ''} {what()}")


class Widget:
    """The instrument in the page, through its shadow root."""

    def __init__(self, driver):
        self.driver = driver

    @property
    def host(self):
        return self.driver.find_element(By.CSS_SELECTOR, ".shardplan-instrument")

    @property
    def root(self):
        return self.host.shadow_root

    def one(self, css: str):
        return self.root.find_element(By.CSS_SELECTOR, css)

    def all(self, css: str):
        return self.root.find_elements(By.CSS_SELECTOR, css)

    def click(self, css: str):
        self.first(css, "x.scrollIntoView({block: 'center'}); x.click()")

    def text(self, css: str) -> str:
        return self.first(css, "return x.textContent")

    def pick(self, name: str, value: str):
        self.first(f"select.{name}", f"x.value = {json.dumps(value)}; x.dispatchEvent(new Event('change'))")

    def first(self, css: str, do: str):
        """Does something with an element at the moment when it is found: rows are drawn anew whenever an answer comes."""
        script = f"const x = arguments[0].shadowRoot.querySelector(arguments[1]); if (!x) throw new Error(arguments[1]); {do}"
        return self.driver.execute_script(script, self.host, css)

    def options(self, name: str) -> set[str]:
        return {*self.each(f"select.{name} option", "x.value")}

    def figures(self) -> dict:
        """What is shown: seconds of the step, peak in bytes, and the mesh."""
        step, peak = self.each(".tile .value", "x.firstChild.data")[:2]
        units = {"µs": 1e-6, "ms": 1e-3, "s": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
        number = [float(n) * units[unit] for n, unit in (step.split(), peak.split())]
        return {"seconds": number[0], "peak": number[1], "mesh": self.text("h1")}

    def planned(self, row: str) -> dict:
        """The figures of a what-if, when it is there: its row, the last one, has this text and is the one shown."""
        last = 'return arguments[0].textContent + [...arguments[0].querySelectorAll("input")].map((x) => x.value).join(" ")'

        def there():
            shown = self.one("table.history tr:last-child.own")
            return row in self.driver.execute_script(last, shown) and not self.all(".work")

        until(there, 180, lambda: self.text(".bar"))
        return self.figures()

    def each(self, css: str, what: str = "x.textContent") -> list:
        """Something of every element, all at one moment."""
        script = f"return [...arguments[0].shadowRoot.querySelectorAll(arguments[1])].map((x) => {what})"
        return self.driver.execute_script(script, self.host, css)

    def copied(self, what: str) -> str:
        self.click(f"button.copy.{what}")
        return until(lambda: self.first(f'textarea[aria-label^="{what}"]', "return x.value"), 30)


def enter(driver, source: str):
    """A cell that is added to the end of the notebook and run, as a person would."""
    panel = driver.find_element(By.CSS_SELECTOR, ".jp-Notebook")
    last = panel.find_elements(By.CSS_SELECTOR, ".jp-Cell")[-1]
    driver.execute_script("arguments[0].scrollIntoView()", last)
    editor = last.find_element(By.CSS_SELECTOR, ".cm-content")
    editor.click()
    driver.execute_cdp_cmd("Input.insertText", {"text": source})
    editor.send_keys(Keys.SHIFT, Keys.ENTER)
    return last


def run(driver, source: str) -> str:
    """What such a cell prints."""
    cell = enter(driver, source)
    return until(lambda: cell.find_element(By.CSS_SELECTOR, ".jp-OutputArea-output").text, 60).strip()


@pytest.fixture(scope="module")
def opened(lab):
    """The widget in a browser, after all cells were run as a person runs them."""
    with chromium() as driver:
        look(driver, 1280, 1500, dark=False)
        driver.get(f"{lab}/lab/tree/explore.ipynb?reset")
        until(lambda: driver.find_element(By.CSS_SELECTOR, ".jp-Notebook .cm-content"), 60)
        since: list[float] = []  # a kernel that has just started answers the menu with a dialog

        def idle() -> bool:
            status = driver.find_element(By.CSS_SELECTOR, ".jp-Notebook-ExecutionIndicator").get_attribute("data-status")
            since[:] = (since or [time.monotonic()]) if status.title() == "Idle" else []
            return bool(since) and time.monotonic() - since[0] > 3

        until(idle, 60)
        until(lambda: run_all(driver), 30)
        widget = Widget(driver)
        until(lambda: widget.one(".tile .value"), 180, lambda: driver.find_element(By.CSS_SELECTOR, ".jp-Notebook").text[-2000:])
        until(lambda: widget.one("input.memory"), 30)
        yield widget


def test_a_layout_is_chosen_replanned_undone_and_its_code_gives_that_plan(opened):
    widget, driver = opened, opened.driver
    before = widget.text(".tile .value")

    row = next(id_ for id_, text in widget.each("tr.row", "[x.dataset.id, x.textContent]") if "params/blocks/*/up" in text)
    widget.click(f'tr.row[data-id="{row}"]')
    until(lambda: len(widget.all(".choices:not(.estimated) tbody tr")) > 2, 180)
    choice = widget.all(".layouts tbody tr")[2]
    said = choice.text
    assert re.search(r"[+−][\d.]+ [µm]s|same", said), said  # the price, before anything is chosen
    driver.execute_script("arguments[0].click()", choice.find_element(By.CSS_SELECTOR, "input"))
    until(lambda: widget.one("button.take").is_enabled(), 5)
    widget.click("button.take")
    until(lambda: widget.one("table.history tr.own button").text == "1", 180, lambda: widget.text(".bar"))
    now = widget.one("table.history tr.own td:nth-child(3)").text
    until(lambda: widget.text(".tile .value").startswith(now) and not widget.all(".work"), 10)
    until(lambda: len(widget.all(".choices:not(.estimated) tbody tr")) > 2, 180)
    driver.execute_script("arguments[0].scrollIntoView()", widget.host)
    assert_looks_as_stored(driver, "lab_1280_light")

    copied = widget.copied("code")
    assert ".what_if(" in copied
    assert "P(" in widget.copied("pins") and json.loads(widget.copied("json"))["format"] == "shardplan-plan"
    widget.click("button.undo")
    until(lambda: widget.text(".tile .value") == before, 20)
    until(lambda: widget.one('tr[class="own"] button').text == "0", 5)
    widget.click("table.history tr:nth-child(2) button.head")
    until(lambda: widget.one("table.history tr.own button").text == "1", 20)
    check = f"ns = dict(plan=plan); exec({copied!r}, ns); print('the same plan:', ns['changed'].dumps() == widget.plan.dumps())"
    assert run(driver, check) == "the same plan: True"

    move = "arguments[0].value = 0.05; for (const name of ['input', 'change']) arguments[0].dispatchEvent(new Event(name))"
    driver.execute_script(move, widget.one("input.memory"))
    refused = lambda: "no plan fits" in widget.text("p.error")  # noqa: E731
    until(lambda: widget.all("p.error") and refused(), 240, lambda: widget.text(".bar"))
    driver.execute_script("arguments[0].scrollIntoView()", widget.host)
    choose_theme(driver, "Dark")
    assert_looks_as_stored(driver, "lab_1280_dark")

    driver.execute_async_script("jupyterapp.commands.execute('application:toggle-left-area').then(() => arguments[0]())")
    for theme, name in (("Dark", "dark"), ("Light", "light")):
        choose_theme(driver, theme)
        look(driver, 400, 1500, dark=False)
        driver.execute_script("arguments[0].scrollIntoView()", widget.host)
        assert driver.execute_script("return arguments[0].scrollWidth <= arguments[0].clientWidth", widget.host)
        assert_looks_as_stored(driver, f"lab_400_{name}")


SMALL = """
def mlp(w, x):
    loss = lambda w: jnp.mean((jax.nn.relu(x @ w['up']) @ w['down']) ** 2)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w))

shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2048, 8192), (8192, 2048), (8192, 2048))]
shardplan.auto(mesh, cluster='h100', donate_argnums=0)(mlp).plan({'up': shapes[0], 'down': shapes[1]}, shapes[2])
"""


class Last(Widget):
    """The last instrument of the page."""

    @property
    def host(self):
        return self.driver.find_elements(By.CSS_SELECTOR, ".shardplan-instrument")[-1]


@pytest.fixture(scope="module")
def small(opened):
    """The widget of a small step, as a plan in a cell of its own shows it."""
    look(opened.driver, 1280, 1500, dark=False)
    others = len(opened.driver.find_elements(By.CSS_SELECTOR, ".shardplan-instrument"))
    enter(opened.driver, SMALL)
    widget = Last(opened.driver)
    until(lambda: len(opened.driver.find_elements(By.CSS_SELECTOR, ".shardplan-instrument")) > others, 60)
    until(lambda: widget.one("input.memory"), 30)
    return widget


def test_another_mesh_and_cluster_are_planned_as_picked(small):
    first = small.figures()
    assert small.options("mesh") == {"data=2, model=4", "data=4, model=2", "data=8", "model=8"}
    assert not small.one("button.retarget").is_enabled()  # what is shown is planned already
    small.click("tr.row")
    until(lambda: small.all(".choices:not(.estimated) tbody tr"), 30)  # an open row, with the axes of the mesh that goes
    small.pick("mesh", "model=8")
    small.click("button.retarget")
    elsewhere = small.planned("model=8 · h100")
    layouts = " ".join(small.each("tr.row td:nth-child(5)"))
    assert "mesh model=8" in elsewhere["mesh"] and "model" in layouts and "data" not in layouts
    assert elsewhere["seconds"] != first["seconds"] and elsewhere["peak"] != first["peak"]
    small.pick("cluster", "a100")
    small.click("button.retarget")
    slower = small.planned("model=8 · a100")
    assert slower["seconds"] > elsewhere["seconds"]
    for before in (elsewhere, first):
        small.click("button.undo")
        until(lambda before=before: small.figures() == before, 20)
    assert small.one("select.mesh").get_property("value") == "data=2, model=4"


def test_seconds_against_memory_are_found_and_cancelled_and_the_slider_plans_for_less(small):
    if small.all("table.history"):
        small.click("table.history tr:first-child button.head")
    first = until(lambda: "data=2, model=4" in small.text("h1") and small.figures(), 20)
    small.click("button.curve")
    until(lambda: re.search(r"\d s, (no|\d+) answer", small.text(".work")), 30)
    until(lambda: len(small.all(".pareto circle:not(.current)")) >= 2, 180, lambda: small.text(".bar"))
    small.click("button.cancel")
    until(lambda: not small.all(".work") and small.text("p.error") == "cancelled", 180, lambda: small.text(".bar"))
    assert small.figures() == first and small.one("button.curve").text == "Find more points"
    small.one("input.memory").send_keys(*[Keys.PAGE_DOWN] * 3)  # by keyboard: of several presses the last is planned for
    limit = small.text(".slide output")
    less = small.planned(limit)
    assert less["peak"] < first["peak"] and less["seconds"] > first["seconds"]
    known = len(small.all("table.history tr"))
    small.one(".pareto circle").send_keys(Keys.ENTER)  # was found before, and is shown at once
    until(lambda: len(small.all("table.history tr")) == known + 1 and small.figures()["peak"] < first["peak"], 5)


def run_all(driver) -> bool:
    """Runs all cells by JupyterLab's own menu; whether they run."""

    def runs() -> bool:
        return any(re.search(r"\[[*\d]", x.text) for x in driver.find_elements(By.CSS_SELECTOR, ".jp-InputPrompt"))

    next(item for item in driver.find_elements(By.CSS_SELECTOR, ".lm-MenuBar-item") if item.text == "Run").click()
    until(lambda: driver.find_element(By.CSS_SELECTOR, '.lm-Menu-item[data-command="runmenu:run-all"]'), 5).click()
    end = time.monotonic() + 3
    while time.monotonic() < end and not runs():
        time.sleep(0.1)
    return runs()


def choose_theme(driver, name: str) -> None:
    """JupyterLab's own theme of this name, on a system that is light."""
    change = "jupyterapp.commands.execute('apputils:change-theme', { theme: arguments[0] }).then(() => arguments[1]())"
    driver.execute_async_script(change, f"JupyterLab {name}")
    until(lambda: driver.execute_script("return document.body.dataset.jpThemeName") == f"JupyterLab {name}", 10)
    time.sleep(0.5)
