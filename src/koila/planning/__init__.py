"""Stage 4, planning: facts and a budget in, a plan out."""
