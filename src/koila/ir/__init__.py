"""Stage 1, the vocabulary: nodes, values, graphs, and what is known about them before anything runs."""
