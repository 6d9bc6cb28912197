"""The rows of `test_fsdp2_table.py`, a module for each section."""
