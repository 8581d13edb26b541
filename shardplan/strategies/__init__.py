"""What each op may do on a mesh: one rule and one set of traits per primitive; rule x mesh -> strategies.

Importing the package registers the rules and traits of all primitives.
"""

from shardplan.strategies import rules  # noqa: F401
