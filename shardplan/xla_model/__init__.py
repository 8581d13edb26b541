"""What XLA for GPU will do with a program: docs/xla_model.md states the rules, `facts.toml` the facts behind them."""

from shardplan import strategies  # noqa: F401  # registers the traits of all primitives, which every file here reads
