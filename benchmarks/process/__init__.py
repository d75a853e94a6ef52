"""The memory of the whole process, on six plain scripts."""
