"""Every test sees 8 emulated CPU devices; XLA compiles for them without LLVM's optimizations, in about half the time."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
FLAGS = " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + FLAGS
