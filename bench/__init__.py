"""One program, one committed configuration and one JSON result for each question; ``python -m bench`` runs them all."""
