"""What is computed: graphs of formulas, the tables of ops and reductions, and derivatives. Imports no array library."""

from . import scalar_ops, vector_ops  # noqa: F401  (fill the table of ops)
