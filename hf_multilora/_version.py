"""The version: the build, `__version__` and the command line all read it here."""

__version__ = "0.1.0.dev0"
