"""Calls that change what is served, on a port of their own; a replica, and the files of updates that it offers."""

from .app import admin_app, admin_routes, metrics_route, read_only_route
from .updates import Replica

__all__ = ["Replica", "admin_app", "admin_routes", "metrics_route", "read_only_route"]
