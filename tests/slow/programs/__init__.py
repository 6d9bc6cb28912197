"""Random programs as text: models, what is done with them, and the functions of one process to compare with."""
