"""Names and lines of source files."""

from shardplan.files import portable, source_line


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
