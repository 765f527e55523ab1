"""Calls that change what is served, on a port of their own: versions, and updates of a replica."""

from .app import admin_app, admin_routes, read_only_route
from .updates import Replica

__all__ = ["Replica", "admin_app", "admin_routes", "read_only_route"]
