"""The searches that are linear in the size of the network: sharding propagation, and one mesh axis after the other."""
