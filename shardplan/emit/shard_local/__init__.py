"""Ops that every device runs on its own shards, under `shard_map`."""
