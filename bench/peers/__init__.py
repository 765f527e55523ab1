"""What the same work costs by other means, measured in the same run."""
