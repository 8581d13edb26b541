"""How decisions become a program: sharding constraints, and ops that run shard by shard."""
