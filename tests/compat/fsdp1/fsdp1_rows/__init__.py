"""The rows of FSDP1's table, a module for each section; `test_fsdp1_table.py` runs them."""
