"""What is served: each table and all of them together as lookups, the ranking model of a training run, a program."""

from .make import Models, rehearse
from .program import Program, load_program

__all__ = ["Models", "Program", "load_program", "rehearse"]
