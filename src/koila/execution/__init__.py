"""Stage 5, execution: a plan and tensors in, results and committed effects out."""
