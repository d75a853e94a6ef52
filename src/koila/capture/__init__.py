"""Stage 2, capture: torch calls on lazy tensors become nodes of a graph."""
