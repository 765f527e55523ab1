"""Work on whole stores: a look inside, compacting, quantizing, saving what is sound."""
