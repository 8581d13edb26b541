"""Lower bounds: bucket elimination, TRW-S, the Lagrangian dual, and what they fix."""
