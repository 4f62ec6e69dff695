"""Tested on the back end that needs no compiler; a few tests take the compiled one as well."""

from tests.helpers.one_thread import tiled  # noqa: F401
