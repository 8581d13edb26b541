"""Reports on compiled steps: thresholds, planned against emitted collectives, seconds."""
