"""Names and lines of source files."""

import types

import IPython
from IPython.core.compilerop import CachingCompiler

from shardplan.files import base_name, portable, short_place, source_line


def test_a_file_has_the_same_name_wherever_it_is_installed(tmp_path):
    for home in ("/home/ada/venv/lib/python3.11/site-packages", "/usr/lib/python3/dist-packages", "C:\\py\\Lib\\site-packages"):
        assert portable(f"{home}/flax/nnx/linear.py") == "site-packages/flax/nnx/linear.py"
    package = tmp_path / "somewhere" / "model" / "layers"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    assert portable(str(package / "mlp.py")) == "model/layers/mlp.py"
    assert portable(str(tmp_path / "train.py")) == "train.py"
    assert portable("<string>") == "<string>"
    assert portable("") == ""


def test_only_python_source_is_read(tmp_path):
    (tmp_path / "passwd").write_text("root:hunter2\n")
    (tmp_path / "fifo.py").symlink_to("/dev/zero")
    (tmp_path / "train.py").write_text("x = 1\n\ty = 2  \n")
    assert source_line(str(tmp_path / "train.py"), 2) == "    y = 2"
    assert source_line(str(tmp_path / "train.py"), 9) == ""
    for file in (str(tmp_path / "passwd"), str(tmp_path / "fifo.py"), "relative.py", "/tmp/\0.py"):
        assert source_line(file, 1) == ""


def test_a_cell_of_a_notebook_is_named_by_its_number(monkeypatch):
    shell = types.SimpleNamespace(compile=CachingCompiler())
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    file = shell.compile.cache("def loss(w):\n    return w.sum()\n", 2)
    assert portable(file) == base_name(file) == "In [2]"
    assert short_place(f"{file}:1") == short_place("In [2]:1") == "In [2]:1"
    assert source_line(file, 2) == "    return w.sum()"
    again = shell.compile.cache("def loss(w):\n    return w.sum()\n", 7)
    assert portable(again) == "In [7]"
    assert portable("/home/ada/train.py") == "train.py"
