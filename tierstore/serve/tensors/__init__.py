"""What both protocols and the client share of tensors: heads that are checked, and their contents in binary."""

__all__: list[str] = []
