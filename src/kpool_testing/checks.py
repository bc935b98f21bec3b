"""The errors, under the path they had first."""

from kpool_testing.errors import *  # noqa: F403
