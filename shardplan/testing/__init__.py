"""Proof in numbers that a rule is right: the sharded op, its partial results reduced, equals the op on global arrays.

Every device runs the primitive on its shards of the operands; shards of the result are joined, partial ones reduced by their
collective. An op with no local form (random bits of one position in the stream) is proven by dependence (`prove.py`).

The devices are real ones; on a CPU set XLA_FLAGS=--xla_force_host_platform_device_count=8 before importing jax.
"""

from shardplan.testing.check import Proof as Proof
from shardplan.testing.check import check_rule as check_rule
from shardplan.testing.prove import difference as difference
