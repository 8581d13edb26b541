"""The stand-alone page in a browser: rows open, the time line zooms, in light and dark, wide and narrow; GPT-2's page is quick."""

import importlib.util
import json
import re
import sys
import time
from pathlib import Path

import jax
import pytest
from browser import assert_looks_as_stored, chromium, look
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait
from test_explore import arguments, train_step

import shardplan
from shardplan.view.instrument import module

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

BUSY = 3
"""How many times as long a browser takes on a machine that others use, too."""
OPEN_S, INTERACTION_MS, PAGE_BYTES = 1.0 * BUSY, 100 * BUSY, 1_000_000
"""What is asked of GPT-2's page of 9,525 equations; the quickest try counts, since other programs run at the same time."""
REPLANNED = 0.1
"""Most of the processor seconds of a plan that one more pin may take: a second where a plan takes ten."""


@pytest.fixture(scope="module")
def driver():
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def plan_of_page():
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    return shardplan.auto(mesh, cluster="h100", donate_argnums=0)(train_step).plan(*arguments())


@pytest.fixture(scope="module")
def page(plan_of_page, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "plan.html"
    path.write_text(plan_of_page.html(), "utf-8")
    return path.as_uri()


def root(driver):
    return driver.find_element(By.CSS_SELECTOR, ".shardplan-instrument").shadow_root


def act(driver, script: str):
    return driver.execute_script(f"const root = document.querySelector('.shardplan-instrument').shadowRoot; {script}")


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_looks_as_it_should(driver, page, width, dark):
    look(driver, width, 1500 if width > 500 else 2200, dark)
    driver.get(page)
    act(driver, "root.querySelector('tr.row').click()")
    assert_looks_as_stored(driver, f"page_{width}_{'dark' if dark else 'light'}")
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    assert [x for x in driver.get_log("browser") if x["level"] == "SEVERE"] == []


def test_it_is_used_by_keyboard_and_pointer(driver, page):
    look(driver, 1280, 1500, dark=False)
    driver.get(page)
    found = root(driver)
    rows = found.find_elements(By.CSS_SELECTOR, "tr.row")
    rows[0].send_keys("\ue015")  # arrow down, then enter
    driver.switch_to.active_element  # noqa: B018
    act(driver, "root.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter', bubbles: true}))")
    choices = act(driver, "return [...root.querySelectorAll('.layouts tbody tr')].map(x => x.textContent)")
    assert len(choices) > 2 and all("same" in x or "+" in x or "−" in x for x in choices[1:])
    act(driver, "root.querySelector('[role=tab]:nth-child(2)').click()")
    everything = len(found.find_elements(By.CSS_SELECTOR, "tr.row"))
    act(
        driver,
        "const i = root.querySelector('input[type=search]'); i.value = 'gradient'; i.dispatchEvent(new Event('input'))",
    )
    assert 0 < len(found.find_elements(By.CSS_SELECTOR, "tr.row")) < everything
    act(driver, "root.querySelector('th:nth-child(4) button').click()")
    assert found.find_element(By.CSS_SELECTOR, "th:nth-child(4)").get_attribute("aria-sort") == "descending"
    canvas = found.find_element(By.CSS_SELECTOR, "canvas")
    before = driver.execute_script("return arguments[0].toDataURL()", canvas)
    canvas.send_keys("+")
    assert driver.execute_script("return arguments[0].toDataURL()", canvas) != before
    canvas.send_keys("\ue011")  # home
    assert driver.execute_script("return arguments[0].toDataURL()", canvas) == before
    act(driver, "root.querySelector('button.copy.code').click()")
    assert "changed = plan" in act(driver, "return root.querySelector('textarea.copied').value")


def within(limit, of, tries=20):
    """Whether it takes no longer, at least once: other work on this machine comes and goes."""
    return any(of() <= limit for _ in range(tries))


@pytest.mark.slow
def test_gpt2_unrolled_is_replanned_sooner_than_planned_and_its_page_is_small_and_quick(driver, tmp_path):
    import zoo

    step, state, batch = zoo.gpt2()
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    start = time.process_time()
    plan = shardplan.auto(mesh, cluster="h100", donate_argnums=0)(step).plan(state, batch)
    planned_s = time.process_time() - start
    what = "params/blocks/*/up/w"
    choice = plan.why(what).choices[0].text

    def replan() -> float:
        start = time.process_time()
        plan.what_if(what, choice)
        return time.process_time() - start

    assert within(REPLANNED * planned_s, replan, tries=3)
    text = plan.html()
    assert len(text.encode()) < PAGE_BYTES
    (tmp_path / "gpt2.html").write_text(text, "utf-8")
    look(driver, 1280, 1500, dark=False)

    def opened() -> float:
        driver.get((tmp_path / "gpt2.html").as_uri())
        assert act(driver, "return root.querySelectorAll('tr.row').length") > 20
        return driver.execute_script("return performance.getEntriesByType('navigation')[0].loadEventEnd") / 1000

    assert within(OPEN_S, opened)
    for script in (
        "root.querySelector('tr.row').click()",
        "root.querySelector('button[title=\"zoom in\"]').click()",
        "root.querySelector('[role=tab]:nth-child(4)').click()",
        "const i = root.querySelector('input[type=search]'); i.value += 'a'; i.dispatchEvent(new Event('input'))",
    ):
        timed = f"const from = performance.now(); {script}; root.host.offsetHeight; return performance.now() - from"
        assert within(INTERACTION_MS, lambda timed=timed: act(driver, timed)), script


EVIL = "</script><img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
EVIL_STEP = """
import jax
import jax.numpy as jnp


def step(params, x):
    def loss(params):
        return jnp.mean((x @ params[{name!r}]) ** 2)  # {name}

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))
"""


@pytest.fixture(scope="module")
def evil_plan(tmp_path_factory):
    path = tmp_path_factory.mktemp("evil") / "evil.py"
    path.write_text(EVIL_STEP.format(name=EVIL))
    spec = importlib.util.spec_from_file_location("evil", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    mesh = jax.sharding.AbstractMesh((2, 4), (EVIL, "model"))
    arrays = {EVIL: jax.ShapeDtypeStruct((512, 2048), "float32")}, jax.ShapeDtypeStruct((4096, 512), "float32")
    return shardplan.auto(mesh, cluster="h100", donate_argnums=0)(module.step).plan(*arrays)


def test_names_of_keys_axes_and_source_lines_stay_text(driver, evil_plan, tmp_path):
    plan = evil_plan
    assert EVIL in plan.dumps().replace('\\"', '"') and any(EVIL in x.code for x in plan.lines)
    pages = {"page": plan.html(), "saved": shardplan.Plan.loads(plan.dumps()).html(), "cell": plan._repr_html_()}
    for name, text in pages.items():
        path = tmp_path / f"{name}.html"
        path.write_text(text, "utf-8")
        driver.get(path.as_uri())
        if name == "page":
            for script in (
                "root.querySelector('tr.row').click()",
                "root.querySelectorAll('[role=tab]').forEach(x => x.click())",
                "const i = root.querySelector('input[type=search]'); i.value = '<'; i.dispatchEvent(new Event('input'))",
            ):
                act(driver, script)
            assert EVIL[:20] in act(driver, "return root.textContent")
            assert act(driver, "return root.querySelectorAll('img, [onerror]').length") == 0
        assert driver.title != "taken"
        assert driver.execute_script("return document.querySelectorAll('img, [onerror]').length") == 0


HOST = """<!doctype html><meta charset="utf-8"><body><script type="module">
const traits = {traits}, heard = new Map(), of = (name) => heard.get(name) ?? heard.set(name, new Set()).get(name);
window.sent = [];
window.changed = (name, value) => {{ traits[name] = value; of(`change:${{name}}`).forEach((act) => act()); }};
window.told = (message) => of("msg:custom").forEach((act) => act(message));
const only = (object) => new Proxy(object, {{ get: (_, name) => {{
  if (!(name in object)) throw new Error(`anywidget documents no ${{String(name)}}`);
  return object[name];
}} }});
const model = only({{
  get: (name) => traits[name], send: (message) => sent.push(message), set: undefined, save_changes: undefined,
  widget_manager: undefined, on: (name, act) => of(name).add(act), off: (name, act) => of(name).delete(act),
}});
const widget = (await import(URL.createObjectURL(new Blob([{module}], {{ type: "text/javascript" }})))).default;
const el = document.createElement("div");  // is in the page only later, as in JupyterLab
window.stop = widget.render(only({{ model, el, signal: undefined, experimental: undefined }}));
document.body.append(el);
window.names = Object.keys(widget);
window.listeners = () => [...heard.values()].reduce((n, some) => n + some.size, 0);
</script>"""


class Host:
    """What a notebook does for a widget, with a page in the notebook's place: it carries messages and traits between both."""

    TRAITS = "css", "data", "answers", "history", "current", "work", "pareto", "pickers", "message"

    def __init__(self, driver, plan, folder):
        self.driver, self.widget = driver, plan.explore()
        self.widget.send = lambda content, buffers=None: driver.execute_script("told(arguments[0])", content)
        self.known = self.traits()
        as_text = [json.dumps(x).replace("<", "\\u003c") for x in (self.known, self.widget._esm)]
        (folder / "widget.html").write_text(HOST.format(traits=as_text[0], module=as_text[1]), "utf-8")
        driver.get((folder / "widget.html").as_uri())
        WebDriverWait(driver, 10).until(lambda _: driver.execute_script("return window.names"))
        self.carry()

    def traits(self):
        return {name: getattr(self.widget, name) for name in self.TRAITS}

    def carry(self):
        """Messages to the widget, until none is left; what it does in its threads is waited for; then its traits to the page."""
        while messages := self.driver.execute_script("return sent.splice(0)"):
            for message in messages:
                self.widget._on_message(None, message, None)
            self.widget._planning.submit(lambda: None).result(60)
            for pieces in (self.widget._pricing, self.widget._scheduling, self.widget._writing):  # the first begins jobs of the second
                WebDriverWait(self.driver, 60).until(lambda _, jobs=pieces: not jobs._jobs)
        now = self.traits()
        for name in (name for name in now if now[name] != self.known[name]):
            self.driver.execute_script("changed(arguments[0], arguments[1])", name, now[name])
        self.known = now

    def act(self, script):
        found = act(self.driver, script)
        self.carry()
        return found


def test_in_the_live_widget_they_stay_text_too(driver, evil_plan, tmp_path):
    host = Host(driver, evil_plan, tmp_path)
    host.act("root.querySelector('tr.row').click()")
    host.act("root.querySelectorAll('.layouts input[type=radio]')[1].click()")
    assert len(host.widget.history) == 1
    host.act("root.querySelector('button.take').click()")
    assert len(host.widget.history) == 2 and host.widget.plan != evil_plan and host.widget.message == ""
    host.act(f"const i = root.querySelectorAll('input.name')[1]; i.value = {json.dumps(EVIL)}; i.dispatchEvent(new Event('change'))")
    assert host.widget.history[1]["name"] == EVIL[:80]
    for button in ("copy.code", "copy.pins", "copy.json", "undo"):
        host.act(f"root.querySelector('button.{button}').click()")
    assert host.widget.current == 0 and host.widget.plan == evil_plan
    host.act("const s = root.querySelector('select[aria-label=\"compare with\"]'); s.value = 1; s.dispatchEvent(new Event('change'))")
    assert EVIL[-11:] in act(driver, "return root.querySelector('textarea.copied').value")
    host.act("root.querySelectorAll('[role=tab]').forEach(x => x.click())")
    host.widget._on_message(None, {"do": "show", "n": EVIL}, None)  # a wrong message comes back in words
    assert EVIL[:20] in host.widget.message
    host.widget.work = {"what": EVIL, "state": EVIL}
    host.carry()
    shown = act(driver, "return root.textContent")
    assert shown.count(EVIL[:20]) > 5 and "Plan for it" in shown and driver.title != "taken"
    assert act(driver, "return root.querySelectorAll('img, script, [onerror]').length") == 0
    assert [x for x in driver.get_log("browser") if x["level"] == "SEVERE"] == []


def test_a_saved_notebook_shows_it_without_a_kernel(driver, tmp_path):
    notebook = json.loads((Path(__file__).parent.parent / "notebooks" / "explore.ipynb").read_text("utf-8"))
    states = notebook["metadata"]["widgets"]["application/vnd.jupyter.widget-state+json"]["state"].values()
    state = next(x["state"] for x in states if "_esm" in x["state"])
    assert state["_esm"] == module(), "store the notebook anew: SHARDPLAN_NOTEBOOKS=write"
    as_text = [json.dumps(x).replace("<", "\\u003c") for x in (state, state["_esm"])]
    (tmp_path / "saved.html").write_text(
        HOST.format(traits=as_text[0], module=as_text[1]).replace("sent.push(message)", "nobody()"), "utf-8"
    )
    driver.get((tmp_path / "saved.html").as_uri())
    WebDriverWait(driver, 10).until(lambda _: driver.execute_script("return window.names"))
    assert act(driver, "return root.querySelector('.tile .value').textContent").endswith("s")
    act(driver, "root.querySelector('tr.row').click()")
    assert "each device holds" in act(driver, "return root.textContent")
    assert [x for x in driver.get_log("browser") if x["level"] == "SEVERE"] == []


FRONT_ENDS = (
    "jp-",
    "jptheme",
    "jupyter",
    "vscode",
    "acquirevscodeapi",
    "colab",
    "marimo",
    "google",
    "require(",
    "requirejs",
    "import ",
    "import(",
)


def test_the_widget_asks_for_no_more_than_anywidget_documents(driver, plan_of_page, tmp_path):
    code = "\n".join(line for line in module().splitlines() if not line.lstrip().startswith(("//", "/**", "*")))
    assert [name for name in FRONT_ENDS if name in code.lower()] == [] and code.count("export ") == 1
    assert set(re.findall(r"\bmodel\.(\w+)", code)) == {"get", "on", "off", "send"}
    look(driver, 1280, 1500, dark=False)
    host = Host(driver, plan_of_page, tmp_path)  # whose model has nothing else, and whose element is not in the page yet
    assert driver.execute_script("return names") == ["render"] and driver.execute_script("return listeners()") > 0
    host.act("root.querySelector('tr.row').click()")
    assert len(act(driver, "return [...root.querySelectorAll('.layouts tbody tr')]")) > 1
    ground = "return getComputedStyle(root.querySelector('section')).backgroundColor"
    light = act(driver, ground)
    for colour, same in (
        ("#ddd", False),
        ("#222", True),
        ("oklch(0.9 0.02 250)", False),
        ("color(srgb 0.1 0.1 0.1)", True),
        ("lab(90 0 0)", False),
    ):
        driver.execute_script("document.body.style.color = arguments[0]; return new Promise(requestAnimationFrame)", colour)
        assert (act(driver, ground) == light) == same, colour
    driver.execute_script("stop()")
    assert driver.execute_script("return listeners()") == 0 and [x for x in driver.get_log("browser") if x["level"] == "SEVERE"] == []
