"""Placements of all values of a joint graph along an axis, inferred from the placements of its parameters.

`capture.tensor_sharding` goes through the nodes of forward and backward with these functions::

    rules = rules_for(node, degree)              # all placements that an operation can read and make
    rule = choose(node, held, ...)               # the rule whose changes of placement cost least
    proof.prove(node, rule, degree)              # run the operation on shards and on the whole, and compare
    localize(graph, held, degree)                # rewrite the graph into the graph of one member

A rule says, for example, that `mm` of S(1) and S(0) makes P(sum). `ir.values` defines the placements.
"""
