"""What happens inside one `apply`: units gathered just in time, freed, gathered again; modules that compute. Layer 3.

session      the weights of one call: gather, free, gather again; looks one unit ahead
runtime      what all calls of a plan on a grid share: memory, learnt order, what is in the air
gradients    reductions that go on while the backward does
order        one order of communication on every rank: learnt, used to look ahead, and guarded
neighbours   `regather=n`: what stays between forward and backward, split over n ranks
in_place     the user's modules, whose tables of parameters have the weights of a session while somebody computes
variance     which values differ along a compute axis, found by a run without data
"""
