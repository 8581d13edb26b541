# make demo: train a GPT by plan.   make test: lint, docs and tests.   make lint: style, types, imports.   make docs: the site in out/site.
# make sweeps: the tests marked slow, over more programs and over steps compiled for GPUs; CI runs them after make test.
# The first call makes .venv with $(PYTHON), which must be 3.11 or newer; PYTHON=/path/to/python chooses another.

PYTHON ?= python3
# Python 3.12 or newer, for the newest jax: whichever of these runs first; NEWER= (empty) leaves that part out.
NEWER ?= $(shell for p in python3.12 python3.13 python3.14 $$HOME/.pyenv/versions/3.1[2-9]*/bin/python; do \
	"$$p" -c "import ensurepip, venv" 2>/dev/null && { command -v "$$p"; break; }; done)
PIP = -m pip install --quiet --disable-pip-version-check
PYTEST_ARGS ?= -n 2 --dist worksteal
# What runs at the same time is printed one after the other, by GNU Make 4.
SYNC = $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)

.PHONY: demo test sweeps lint docs browser smoke-newest clean

demo: .venv/demo
	.venv/bin/python examples/gpt.py

test: browser
	+$(MAKE) -j2 $(SYNC) --no-print-directory lint docs $(if $(NEWER),smoke-newest)
	.venv/bin/python -m pytest -m "not slow" $(PYTEST_ARGS)
	$(if $(NEWER),,@echo "no Python 3.12 found: the newest jax was not tried")

sweeps: browser .venv/test $(if $(NEWER),.venv312/smoke)
	-+$(MAKE) --no-print-directory .venv/front_ends/ready
	.venv/bin/python -m pytest -m slow $(PYTEST_ARGS)
	$(if $(NEWER),.venv312/bin/python -m pytest -m slow tests/test_smoke.py)

lint: .venv/test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/lint-imports --no-logo
	.venv/bin/pyright --pythonpath .venv/bin/python
	.venv/bin/pyright -p benchmarks --pythonpath .venv/bin/python

docs: .venv/test
	.venv/bin/python docs/generate.py --check
	.venv/bin/mkdocs build --strict --quiet

# The browser of tests/test_page.py and tests/test_jupyterlab.py, from Debian's packages where there is none.
browser:
	@command -v chromium chromedriver >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
	apt-get update -q && apt-get install -y -q chromium chromium-driver; } || \
	{ echo "tests need chromium and chromedriver: apt-get install chromium chromium-driver"; exit 1; }

# VS Code's widget manager, of tests/test_front_ends.py, from npm: each package as it is published, without those that it was built from.
.venv/front_ends/ready: Makefile | .venv/test
	@command -v npm >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -q && apt-get install -y -q npm; } || \
	{ echo "VS Code's widget manager is not tried: it needs npm"; exit 1; }
	mkdir -p $(@D)
	cd $(@D) && npm pack --silent @vscode/jupyter-ipywidgets8@1.0.9 requirejs@2.3.7 >/dev/null
	tar -xzf $(@D)/vscode-jupyter-ipywidgets8-1.0.9.tgz -C $(@D) --strip-components=2 package/dist/ipywidgets.js
	tar -xzf $(@D)/requirejs-2.3.7.tgz -C $(@D) --strip-components=1 package/require.js
	touch $@

smoke-newest: .venv312/smoke
	.venv312/bin/python -c "import jax, sys; print('Python', sys.version.split()[0], 'jax', jax.__version__)"
	.venv312/bin/python -m pytest -m "not slow" tests/test_smoke.py tests/test_travel.py

# Each stamp is made after its installation, one after the other, and again when pyproject.toml changes.
.venv/demo: pyproject.toml
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python $(PIP) --upgrade "pip>=25.1"
	.venv/bin/python $(PIP) --editable ".[solver,examples,view]"
	touch $@

.venv/test: .venv/demo
	.venv/bin/python $(PIP) --group test --group docs --editable ".[solver,examples,view,gpu-check]"
	touch $@

.venv312/smoke: pyproject.toml | .venv/test
	test -x .venv312/bin/python || $(NEWER) -m venv .venv312
	.venv312/bin/python $(PIP) --upgrade "pip>=25.1"
	.venv312/bin/python $(PIP) --group test --editable ".[solver,examples,view]"
	touch $@

clean:
	rm -rf .venv .venv312 out
