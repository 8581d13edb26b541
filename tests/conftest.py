"""Every test sees 8 emulated CPU devices; XLA compiles for them without LLVM's optimizations, and kernels as older releases emit them.

That takes a third of the time; planned and plain steps are compiled alike.
"""

import gc
import os
from importlib.metadata import version

import pytest
from hypothesis import settings

settings.register_profile("same", derandomize=True)  # the same examples in every run
settings.load_profile("same")
os.environ["JAX_PLATFORMS"] = "cpu"
FLAGS = " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
if version("jaxlib").startswith("0.10."):  # jaxlib 0.12 no longer knows the flag, and an unknown one ends the process
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + FLAGS


@pytest.fixture(scope="module")
def first_plan():
    """For modules that ask whether plans are right, not how fast: the search ends with its first plan, after a sixth of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardplan.ilp.integer_program.IntegerProgram._near_enough", lambda *_: True)
        yield


@pytest.fixture(autouse=True, scope="module")
def forgotten_plans(request):
    """What a module's cached functions made is given up with the module; the collector no longer visits what other caches keep."""
    yield
    for found in vars(request.module).values():
        if hasattr(found, "cache_clear") and found.__module__ == request.module.__name__:
            found.cache_clear()
    gc.collect()
    gc.freeze()
