"""What happens inside one `apply`: units gathered just in time, freed, gathered again; modules bound to them. Layer 3.

session    the weights of one call: gather, free, regather
binding    a copy of the module tree whose parameters come from a session
variance   which values differ along a compute axis, found by a run without data
"""
