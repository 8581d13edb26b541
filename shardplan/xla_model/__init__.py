"""What XLA for GPU will do with a program: docs/xla_model.md states the rules, `facts.toml` the facts behind them."""
