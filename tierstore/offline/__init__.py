"""Work on whole stores: a look inside, packing, quantizing, saving what is sound."""

__all__: list[str] = []
