"""The notebook runs from top to bottom, and shows what it promises."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda p: p.stem)
def test_it_is_stored_without_outputs(path):
    cells = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    assert all(not c.outputs and c.execution_count is None for c in cells)


@pytest.fixture(scope="module")
def explored():
    notebook = nbformat.read(NOTEBOOKS / "explore.ipynb", as_version=4)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(NOTEBOOKS)}}).execute()
    return notebook


def text(notebook) -> str:
    return "".join(o.get("text", "") for c in notebook.cells if c.cell_type == "code" for o in c.outputs)


def test_a_plan_is_shown_as_a_picture(explored):
    shown = [o.data for c in explored.cells if c.cell_type == "code" for o in c.outputs if o.output_type == "execute_result"]
    assert len(shown) == 1
    assert 'class="shardplan"' in shown[0]["text/html"]
    assert shown[0]["text/plain"]


def test_lines_of_notebook_cells_are_annotated(explored):
    said = text(explored)
    assert "def loss_fn" not in said
    assert 'x = x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"]' in said
    assert "# forward" in said


def test_pins_cost_and_tight_memory_is_explained(explored):
    said = text(explored)
    assert "params/blocks/*/up" in said
    assert "no plan fits" in said and "lowest peak found" in said
    assert "with the saved plan" in said
