"""Measurements of tables sharded over ranks, beside TorchRec's."""
