"""What a server says of itself: Prometheus metrics, a status in JSON, a page that shows it."""

from .app import monitoring_routes
from .metrics import Metrics

__all__ = ["Metrics", "monitoring_routes"]
