"""What is served: each table and all of them together as lookups, the ranking model of a training run, a program."""

from .exported import Program, load_program
from .make import Models, rehearse

__all__ = ["Models", "Program", "load_program", "rehearse"]
