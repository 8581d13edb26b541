"""A plan as HTML: whole in itself, well formed, and nothing a program's names can break."""

import json
import re
from html.parser import HTMLParser

import pytest
from msgspec.structs import replace
from plans import MESH, decision, layout, leaf, transformer

from shardplan.mesh.layout import Layout, MeshShape
from shardplan.plan.data import Leaf, MemoryReport, PlannedCollective, PlannedReshard, SourceLine
from shardplan.view import html
from shardplan.view.html import axis_colours, environment, to_html

VOID = {"meta", "br", "wbr", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Checks that every tag is closed; keeps tags, attributes and the text of scripts."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.tags, self.texts, self.scripts = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        (self.scripts if self.open and self.open[-1] == "script" else self.texts).append(data)

    def count(self, tag, **attributes):
        wanted = {k.rstrip("_"): v for k, v in attributes.items()}
        return sum(t == tag and all(a.get(k) == v for k, v in wanted.items()) for t, a in self.tags)


@pytest.fixture
def plan():
    return transformer()


@pytest.mark.parametrize("page", [True, False])
def test_it_is_well_formed_and_loads_nothing(plan, page):
    text = to_html(plan, page)
    found = Page(text)
    assert found.count("html") == page
    assert not re.search(r"https?:|@import|url\(|\ssrc=|<link", text)
    if page:
        assert "default-src 'none'" in text


def test_it_shows_what_the_plan_says(plan):
    text = to_html(plan, page=True)
    words = ("4.38 ms", "2.71 GiB", "63.7 MB", "state/<wbr>params/<wbr>blocks/<wbr>*/<wbr>up", "×3", "train.py:6", "my_kernel")
    assert [word for word in words if word not in text] == []
    assert "return x + h @ w[&#34;down&#34;]" in text
    found = Page(text)
    assert found.count("span", class_="device") == 8
    assert found.count("path", class_="activations") == 1
    assert found.count("path", class_="budget") == 0  # far above the peak, so said in words
    assert "is 27.5 times the peak" in text


def test_a_budget_near_the_peak_is_a_line(plan):
    near = replace(plan, memory_report=replace(plan.memory_report, limit=3.2e9))
    assert Page(to_html(near, page=True)).count("path", class_="budget") == 1


def test_it_is_the_same_every_time(plan):
    assert to_html(plan, page=True) == to_html(transformer(), page=True)


def test_names_from_the_program_cannot_break_out(plan):
    evil = '"><script>alert(1)</script><img src=x onerror=alert(2)>${css}&lt;'
    mesh = MeshShape((evil, "model"), (2, 4))
    split = Layout(((evil,), ()))
    move = PlannedReshard(0, evil, split, Layout(((), ())), (PlannedCollective("all-gather", (evil,), 8.0, 1e-6),))
    found = replace(
        plan,
        mesh=mesh,
        cluster=evil,
        inputs=(Leaf(evil, (8, 8), evil, split, evil),),
        decisions=(
            decision("evil.py", 1, evil, evil, result_layouts=(split,), result_type=evil, reshards=(move,), phase=evil),
            decision(evil, 2, evil, evil, reshards=(move,), seconds=1e-3),
        ),
        lines=(SourceLine("evil.py", 1, f"x = 1  # {evil}", 1e-3),),
        memory_report=MemoryReport(8.0, 9.0, evil, {evil: 8.0}, ({evil: 8.0}, {evil: 4.0, "</script>": 1.0})),
        unknown=((evil, evil),),
        fingerprint=evil,
    )
    for page in (True, False):
        text = to_html(found, page)
        assert "<script>alert" not in text and "<img" not in text
        parsed = Page(text)
        assert parsed.count("script") == 2
        assert not any(k.startswith("on") for _, attributes in parsed.tags for k in attributes)
        points = json.loads(parsed.scripts[0])["points"]
        assert points[1][2] == "</script>  1 B"


def test_in_a_notebook_its_style_stays_inside(plan):
    text = plan._repr_html_()
    style = re.search(r"<style>(.*?)</style>", text, re.S)[1]
    style = re.sub(r"/\*.*?\*/", "", style, flags=re.S)
    for selectors in re.findall(r"([^{}]+)\{", style):
        assert all(".shardplan" in s for s in selectors.split(",") if "(" not in selectors), selectors


def test_an_empty_plan_is_a_page_too(plan):
    nothing = dict.fromkeys(("inputs", "outputs", "decisions", "lines", "unknown"), ())
    free = {"memory_report": MemoryReport(0.0, None, "", {}), "seconds": dict.fromkeys(plan.seconds, 0.0)}
    assert "nothing costs anything" in to_html(replace(plan, mesh=MeshShape((), ()), **nothing, **free), page=True)


@pytest.mark.parametrize("sizes", [(8,), (2, 2, 2), (4, 8, 8), (64, 64)])
def test_every_mesh_is_drawn_within_reason(plan, sizes):
    mesh = MeshShape(("x", "y", "z")[: len(sizes)], sizes)
    found = Page(to_html(replace(plan, mesh=mesh, inputs=(), decisions=()), page=True))
    devices = found.count("span", class_="device")
    assert devices == (mesh.n_devices if mesh.n_devices <= 512 else 0)


def drawn(leaf, mesh) -> str:
    picture = html.picture(leaf, mesh, axis_colours(mesh))
    return environment().get_template("array.jinja").render(picture=picture)


def blocks(*dims, shape=(64, 64)):
    return Page(drawn(leaf("x", shape, *dims), MESH))


def test_an_array_is_cut_into_its_shards_in_the_colours_of_the_axes():
    assert blocks("", "").count("rect", class_="replicated") == 1
    assert blocks("data", "").count("rect", class_="a0") == 2
    assert blocks("", "model").count("rect", class_="a1") == 4
    both = blocks("data", "model")
    assert (both.count("rect", class_="a1"), both.count("path", class_="a0")) == (8, 8)
    deep = blocks("data", "", "model", shape=(8, 16, 64))
    assert (deep.count("rect", class_="a1"), deep.count("rect", class_="plate a1")) == (8, 0)
    assert "each device holds 32×16, 1/8 of 64×64" in "".join(both.texts)


@pytest.mark.parametrize("shape", [(), (0,), (1, 1), (0, 7), (10**9, 1), (1, 10**9), (2, 3, 4, 5)])
def test_every_shape_has_a_picture(shape):
    box = Page(drawn(leaf("x", shape, *[""] * len(shape)), MESH)).tags[0][1]
    assert float(box["width"]) <= 90 and float(box["height"]) <= 50


def test_a_split_over_a_third_dim_is_seen_as_depth():
    mesh = MeshShape(("x", "y", "z"), (2, 2, 2))
    found = Page(drawn(leaf("w", (8, 8, 8), "x", "y", "z"), mesh))
    assert found.count("rect", class_="plate a0") == 1


def test_layout_of_one_dim_over_two_axes_has_both_colours():
    found = blocks("data model", shape=(64,))
    assert found.count("rect", class_="a1") == 8
    assert found.count("path", class_="a0") + found.count("rect", class_="a0") == 8
    assert layout("data model").shards(MESH) == 8
