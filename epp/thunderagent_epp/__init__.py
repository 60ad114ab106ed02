"""ThunderAgent endpoint picker: program-aware admission and placement behind a plain gateway."""

from importlib.metadata import version

__version__ = version("thunderagent-epp")
