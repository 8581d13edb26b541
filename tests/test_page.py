"""The stand-alone page in a browser: rows open, the time line zooms, in light and dark, wide and narrow; GPT-2's page is quick."""

import importlib.util
import json
import sys
import time
from pathlib import Path

import jax
import pytest
from browser import assert_looks_as_stored, chromium, look
from selenium.webdriver.common.by import By
from test_explore import arguments, train_step

import shardplan
from shardplan.view.instrument import module
from shardplan.view.values import rounded

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

OPEN_S, INTERACTION_MS, REPLAN_S, PAGE_BYTES = 1.0, 100, 1.0, 1_000_000
"""What is asked of GPT-2's page of 9,525 equations; the quickest of three tries counts, since other programs run at the same time."""


@pytest.fixture(scope="module")
def driver():
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    plan = shardplan.auto(mesh, cluster="h100", donate_argnums=0)(train_step).plan(*arguments())
    path = tmp_path_factory.mktemp("page") / "plan.html"
    path.write_text(plan.html(), "utf-8")
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
    act(driver, "const i = root.querySelector('input[type=search]'); i.value = 'reduce-scatter'; i.dispatchEvent(new Event('input'))")
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


def quickest(of, tries=3):
    return min(of() for _ in range(tries))


def test_gpt2_unrolled_is_replanned_in_a_second_and_its_page_is_small_and_quick(driver, tmp_path):
    import zoo

    step, state, batch = zoo.gpt2()
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    plan = shardplan.auto(mesh, cluster="h100", donate_argnums=0)(step).plan(state, batch)
    what = "params/blocks/*/up/w"
    choice = plan.why(what).choices[0].text

    def replan() -> float:
        start = time.process_time()
        plan.what_if(what, choice)
        return time.process_time() - start

    assert quickest(replan) <= REPLAN_S
    text = plan.html()
    assert len(text.encode()) < PAGE_BYTES
    (tmp_path / "gpt2.html").write_text(text, "utf-8")
    look(driver, 1280, 1500, dark=False)

    def opened() -> float:
        driver.get((tmp_path / "gpt2.html").as_uri())
        assert act(driver, "return root.querySelectorAll('tr.row').length") > 20
        return driver.execute_script("return performance.getEntriesByType('navigation')[0].loadEventEnd") / 1000

    assert quickest(opened) < OPEN_S
    for script in (
        "root.querySelector('tr.row').click()",
        "root.querySelector('button[title=\"zoom in\"]').click()",
        "root.querySelector('[role=tab]:nth-child(4)').click()",
        "const i = root.querySelector('input[type=search]'); i.value += 'a'; i.dispatchEvent(new Event('input'))",
    ):
        timed = f"const from = performance.now(); {script}; root.host.offsetHeight; return performance.now() - from"
        assert quickest(lambda timed=timed: act(driver, timed)) < INTERACTION_MS, script


EVIL = "</script><img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
EVIL_STEP = """
import jax
import jax.numpy as jnp


def step(params, x):
    def loss(params):
        return jnp.mean((x @ params[{name!r}]) ** 2)  # {name}

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))
"""


LIVE = """<!doctype html><meta charset="utf-8"><body><div id="cell"></div>
<script type="application/json" id="state">{state}</script><script type="module">{module}
const state = JSON.parse(document.getElementById("state").textContent);
render({{ model: {{ get: (name) => state[name], on() {{}}, off() {{}}, send() {{}} }}, el: document.getElementById("cell") }});
</script>"""
"""A notebook's cell, as anywidget fills it."""


def live(plan) -> str:
    """The widget after a layout was asked for, taken and named, and another was refused."""
    widget = plan.explore()
    entry = widget._entries[0].renamed(EVIL)
    for id_ in list(entry.instrument.targets)[:3]:
        entry.answer(id_)
    widget.answers, widget.message, widget.work = dict(entry.answers), EVIL, {"what": EVIL, "state": EVIL}
    widget.history = [entry.row(), entry.row()]
    state = {
        name: getattr(widget, name) for name in ("css", "data", "answers", "history", "current", "work", "pareto", "pickers", "message")
    }
    state = json.dumps(rounded(state)).translate({ord(c): f"\\u{ord(c):04x}" for c in "<>&"})
    return LIVE.format(state=state, module=module())


def test_names_of_keys_axes_and_source_lines_stay_text(driver, tmp_path):
    (tmp_path / "evil.py").write_text(EVIL_STEP.format(name=EVIL))
    spec = importlib.util.spec_from_file_location("evil", tmp_path / "evil.py")
    evil = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(evil)
    mesh = jax.sharding.AbstractMesh((2, 4), (EVIL, "model"))
    arrays = {EVIL: jax.ShapeDtypeStruct((512, 2048), "float32")}, jax.ShapeDtypeStruct((4096, 512), "float32")
    plan = shardplan.auto(mesh, cluster="h100", donate_argnums=0)(evil.step).plan(*arrays)
    assert EVIL in plan.dumps().replace('\\"', '"') and any(EVIL in x.code for x in plan.lines)
    pages = {"page": plan.html(), "saved": shardplan.Plan.loads(plan.dumps()).html(), "cell": plan._repr_html_(), "widget": live(plan)}
    for name, text in pages.items():
        path = tmp_path / f"{name}.html"
        path.write_text(text, "utf-8")
        driver.get(path.as_uri())
        if name in ("page", "widget"):
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
